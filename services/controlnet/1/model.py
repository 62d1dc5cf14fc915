"""controlnet: ControlNets for the steps of several workers' denoisers."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_triton.worker_model import WorkerModel


class TritonPythonModel(WorkerModel):
    name = "controlnet"

    def open(self, config: Config) -> None:
        from maskserve_engine.stages.unused_libraries import hide_unused_libraries
        from maskserve_triton.controlnet import ControlNetFrontend

        hide_unused_libraries(config, text=False)
        self._frontend = ControlNetFrontend(pb_utils, config)

    def execute(self, requests: list[Any]) -> None:
        self._frontend.execute(requests)

    def close(self) -> None:
        self._frontend.close()
