"""control: status, heartbeat, cancel, templates, drain; JSON in, JSON out."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_core.config_file import load_config
from maskserve_core.triton.control import Control
from maskserve_core.worker.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_core.worker.logs import start_log


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        self._config = load_config()
        start_log(self._config, "control")
        self._control = Control(pb_utils, self._config)
        end_when_stuck()
        sign_in(self._config.runtime_dir, "control")

    def execute(self, requests: list[Any]) -> None:
        self._control.execute(requests)

    def finalize(self) -> None:
        sign_out(self._config.runtime_dir, "control")
        self._control.close()
