"""encoder: VAE moments of the source and embeddings of the prompt."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.request import EditRequest
from maskserve_core.triton.sync_execute import respond
from maskserve_core.triton.tensor_io import read_array, read_bytes
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.adapters.text_encoders import TextAdapters
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT, write_priming_prompt
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.stages.encoded import pack_conditioning


class TritonPythonModel(WorkerModel):
    name = "encoder"

    def open(self, config: Config) -> None:
        config = beside_denoiser(config, "encoder")
        self._encoder = load_encoder(config)
        self._adapters = TextAdapters(config, self._encoder.text_models)
        # The denoiser has no text encoders; priming needs the embedding of an empty prompt.
        embedding = self._encoder.encode_prompt(PRIMING_PROMPT)
        write_priming_prompt(embedding, config.runtime_dir)
        self._tracer = make_tracer(config, "encoder")
        self._work = self._tracer.recorded("encode", self._encode)

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work)

    def close(self) -> None:
        self._adapters.close()
        self._tracer.close()

    def _encode(self, request: Any) -> dict[str, Any]:
        start = time.perf_counter()
        edit = EditRequest.from_json(read_bytes(pb_utils, request, "REQUEST"))
        with self._adapters.applied(edit.settings.loras):
            encoded = self._encoder.encode(
                read_array(pb_utils, request, "PIXELS", np.uint8, ndim=3),
                read_array(pb_utils, request, "EDIT_MASK", np.uint8, ndim=2),
                edit.prompt,
                edit.settings.negative_prompt,
            )
        taken_ms = (time.perf_counter() - start) * 1e3
        return {
            "MOMENTS": encoded.moments,
            "MASKED_MOMENTS": encoded.masked_moments,
            "CONDITIONING": pack_conditioning(encoded.conditioning, encoded.negative),
            "ENCODE_MS": np.array([taken_ms], np.float32),
        }
