"""edit_stream: progress, previews and the answer; for gRPC streams and HTTP /generate_stream."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_engine.families.specs import load_spec
from maskserve_triton.edit_front import EditFront
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "edit_stream"

    def open(self, config: Config) -> None:
        model = config.model
        spec = load_spec(model.path, model.native_resolution)
        self._front = EditFront(pb_utils, config, spec, "edit_stream", streaming=True)

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def close(self) -> None:
        self._front.close()
