"""edit_stream: progress, previews and the answer; for gRPC streams and HTTP /generate_stream."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_core.config_file import load_config
from maskserve_core.contracts.facts import load_facts
from maskserve_core.triton.frontend import Front
from maskserve_core.worker.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_core.worker.logs import start_log


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        self._config = load_config()
        start_log(self._config, "edit_stream")
        model = self._config.model
        facts = load_facts(model.path, model.native_resolution)
        self._front = Front(pb_utils, self._config, facts, "edit_stream", streaming=True)
        end_when_stuck()
        sign_in(self._config.runtime_dir, "edit_stream")

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def finalize(self) -> None:
        sign_out(self._config.runtime_dir, "edit_stream")
        self._front.close()
