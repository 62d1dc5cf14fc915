"""encoder: VAE moments of the source and embeddings of the prompt."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.request import EditRequest
from maskserve_core.triton.sync_execute import Outputs
from maskserve_core.triton.tensor_io import read_bytes
from maskserve_core.triton.together import Together, view_item
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.stages.encoded import pack_conditioning
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_engine.triton.encoder import EditEncoder, ToEncode


class TritonPythonModel(WorkerModel):
    name = "encoder"

    def open(self, config: Config) -> None:
        hide_unused_libraries(config)
        self._encoder = EditEncoder.load(beside_denoiser(config, "encoder"))
        self._tracer = make_tracer(config, "encoder")
        self._requests = Together(pb_utils, self._tracer, "encode", _read, self._encode)

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def close(self) -> None:
        self._encoder.close()
        self._tracer.close()

    def _encode(self, edits: Sequence[ToEncode]) -> Iterator[Outputs | Exception]:
        for made in self._encoder.encode_all(edits):
            if isinstance(made, Exception):
                yield made
                continue
            encoded, report = made
            yield {
                "MOMENTS": encoded.moments,
                "MASKED_MOMENTS": encoded.masked_moments,
                "CONTROL_MOMENTS": encoded.control_moments,
                "CONDITIONING": pack_conditioning(encoded.conditioning, encoded.negative),
                "ENCODED": report.to_json(),
            }


def _read(request: Any) -> ToEncode:
    return ToEncode(
        EditRequest.from_json(read_bytes(pb_utils, request, "REQUEST")),
        view_item(pb_utils, request, "PIXELS", np.uint8, ndim=3),
        view_item(pb_utils, request, "EDIT_MASK", np.uint8, ndim=2),
        view_item(pb_utils, request, "CONTROLS", np.uint8, ndim=4),
    )
