"""denoiser: the engine, which batches edits step by step on a thread of its own."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_core.config_file import load_config
from maskserve_core.triton.metrics import EngineMetrics, MetricsThread
from maskserve_core.triton.tracing import make_tracer
from maskserve_core.worker.liveness import end_when_stuck, end_with_server, sign_in, sign_out
from maskserve_core.worker.logs import start_log
from maskserve_engine.engine import Engine
from maskserve_engine.triton.frontend import DenoiserFrontend

# A drain has come before; what is still in flight is told that it failed.
_CLOSE_GRACE_S = 5.0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_server()
        self._config = load_config()
        start_log(self._config, "denoiser")
        self._engine = Engine.load(self._config)
        self._engine.start()
        self._engine.warm_up()
        self._tracer = make_tracer(self._config, "denoiser")
        self._frontend = DenoiserFrontend(pb_utils, self._engine, self._config, self._tracer)
        metrics = EngineMetrics(
            pb_utils, self._config.worker, self._engine.observations, self._config.runtime_dir
        )
        self._metrics = MetricsThread(metrics)
        end_when_stuck()
        sign_in(self._config.runtime_dir, "denoiser")

    def execute(self, requests: list[Any]) -> None:
        self._frontend.execute(requests)

    def finalize(self) -> None:
        sign_out(self._config.runtime_dir, "denoiser")
        self._metrics.close()
        self._engine.close(_CLOSE_GRACE_S)
        self._frontend.close()
        self._tracer.close()
