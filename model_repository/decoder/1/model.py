"""decoder: latents to pixels; events without latents pass through."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.meta import with_timing
from maskserve_core.contracts.postprocess_context import NOTHING
from maskserve_core.models.registry import load_facts
from maskserve_core.triton.sync_execute import failed_event, respond
from maskserve_core.triton.tensor_io import read_bytes, view_array
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.families.registry import load_decoder
from maskserve_engine.triton.decoder import EditDecoder

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


class TritonPythonModel(WorkerModel):
    name = "decoder"

    def open(self, config: Config) -> None:
        config = beside_denoiser(config, "decoder")
        facts = load_facts(config.model.path, config.model.native_resolution)
        self._decoder = EditDecoder(load_decoder(config), facts, config)
        self._tracer = make_tracer(config, "decoder")
        self._work = self._tracer.recorded("decode", self._decode, output="PIXELS")

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work, self._failed)

    def close(self) -> None:
        self._tracer.close()

    def _decode(self, request: Any) -> dict[str, Any]:
        start = time.perf_counter()
        latents = view_array(pb_utils, request, "LATENTS", np.float32, ndim=3)
        meta = read_bytes(pb_utils, request, "META")
        context = view_array(pb_utils, request, "CONTEXT", np.uint8, ndim=1)
        pixels = _NO_PIXELS
        if latents.size:
            pixels, meta = self._decoder.decode(latents, meta, context)
        taken_ms = (time.perf_counter() - start) * 1e3
        return {
            "PIXELS": pixels,
            "META": with_timing(meta, "decode", taken_ms),
            "CONTEXT": context,
        }

    def _failed(self, request: Any, error: Exception) -> dict[str, Any]:
        meta = failed_event(pb_utils, request, error)
        return {"PIXELS": _NO_PIXELS, "META": meta, "CONTEXT": NOTHING}
