"""control: status, heartbeat, cancel, templates, drain; JSON in, JSON out."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_triton.control import WorkerControl
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "control"

    def open(self, config: Config) -> None:
        self._control = WorkerControl(pb_utils, config)

    def execute(self, requests: list[Any]) -> None:
        self._control.execute(requests)

    def close(self) -> None:
        self._control.close()
