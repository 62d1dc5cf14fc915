"""decoder: latents to pixels; events without latents pass through."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.meta import with_timing
from maskserve_core.contracts.postprocess_context import NOTHING
from maskserve_core.models.registry import load_facts
from maskserve_core.triton.sync_execute import Outputs, failed_event
from maskserve_core.triton.tensor_io import read_bytes
from maskserve_core.triton.together import Together, view_item
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.families.registry import load_decoder
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_engine.triton.decoder import EditDecoder, ToDecode

_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


class TritonPythonModel(WorkerModel):
    name = "decoder"

    def open(self, config: Config) -> None:
        hide_unused_libraries(config, text=False)
        config = beside_denoiser(config, "decoder")
        facts = load_facts(config.model.path, config.model.native_resolution)
        self._decoder = EditDecoder(load_decoder(config), facts, config)
        self._tracer = make_tracer(config, "decoder")
        self._requests = Together(
            pb_utils, self._tracer, "decode", _read, self._decode, _failed, output="PIXELS"
        )

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def close(self) -> None:
        self._tracer.close()

    def _decode(self, events: Sequence[ToDecode]) -> Iterator[Outputs | Exception]:
        decoded = self._decoder.decode_all([event for event in events if event.latents.size])
        for event in events:
            start = time.perf_counter()
            made = next(decoded) if event.latents.size else (_NO_PIXELS, event.meta)
            if isinstance(made, Exception):
                yield made
                continue
            pixels, meta = made
            taken_ms = (time.perf_counter() - start) * 1e3
            yield {
                "PIXELS": pixels,
                "META": with_timing(meta, "decode", taken_ms),
                "CONTEXT": event.context,
            }


def _read(request: Any) -> ToDecode:
    return ToDecode(
        view_item(pb_utils, request, "LATENTS", np.float32, ndim=3),
        read_bytes(pb_utils, request, "META"),
        view_item(pb_utils, request, "CONTEXT", np.uint8, ndim=1),
    )


def _failed(request: Any, error: Exception) -> Outputs:
    meta = failed_event(pb_utils, request, error)
    return {"PIXELS": _NO_PIXELS, "META": meta, "CONTEXT": NOTHING}
