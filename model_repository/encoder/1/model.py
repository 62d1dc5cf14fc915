"""encoder: VAE moments of the source and embeddings of the prompt."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.request import EditRequest
from maskserve_core.triton.sync_execute import respond
from maskserve_core.triton.tensor_io import read_bytes, view_array
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.stages.encoded import pack_conditioning
from maskserve_engine.triton.encoder import EditEncoder


class TritonPythonModel(WorkerModel):
    name = "encoder"

    def open(self, config: Config) -> None:
        self._encoder = EditEncoder.load(beside_denoiser(config, "encoder"))
        self._tracer = make_tracer(config, "encoder")
        self._work = self._tracer.recorded("encode", self._encode)

    def execute(self, requests: list[Any]) -> list[Any]:
        return respond(pb_utils, requests, self._work)

    def close(self) -> None:
        self._encoder.close()
        self._tracer.close()

    def _encode(self, request: Any) -> dict[str, Any]:
        encoded, report = self._encoder.encode(
            EditRequest.from_json(read_bytes(pb_utils, request, "REQUEST")),
            view_array(pb_utils, request, "PIXELS", np.uint8, ndim=3),
            view_array(pb_utils, request, "EDIT_MASK", np.uint8, ndim=2),
            view_array(pb_utils, request, "CONTROLS", np.uint8, ndim=4),
        )
        return {
            "MOMENTS": encoded.moments,
            "MASKED_MOMENTS": encoded.masked_moments,
            "CONTROL_MOMENTS": encoded.control_moments,
            "CONDITIONING": pack_conditioning(encoded.conditioning, encoded.negative),
            "ENCODED": report.to_json(),
        }
