"""denoiser: the engine, which batches edits step by step on its own thread."""

from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_common.tracing import make_tracer
from maskserve_triton.metrics import EngineMetrics, MetricsThread
from maskserve_triton.worker_model import WorkerModel

# A drain has come before; edits still in flight get an error.
_CLOSE_GRACE_S = 5.0


class TritonPythonModel(WorkerModel):
    name = "denoiser"

    def open(self, config: Config) -> None:
        from maskserve_engine.stages.unused_libraries import hide_unused_libraries
        from maskserve_engine.start.assembly import load_engine
        from maskserve_triton.denoiser import DenoiserFrontend

        hide_unused_libraries(config, text=False)
        calls = self._loop = None
        if config.controls.service:  # imports gRPC
            from maskserve_triton.controlnet_calls import ControlNetCalls
            from maskserve_triton.loop_thread import LoopThread

            self._loop = LoopThread("controlnet-calls")
            calls = partial(ControlNetCalls, self._loop)
        self._engine = load_engine(config, calls=calls)
        self._engine.start()
        self._engine.warm_up()
        self._tracer = make_tracer(config, "denoiser")
        self._frontend = DenoiserFrontend(pb_utils, self._engine, config, self._tracer)
        metrics = EngineMetrics(
            pb_utils, config.worker, self._engine.observations, config.runtime_dir
        )
        self._metrics = MetricsThread(metrics)

    def execute(self, requests: list[Any]) -> None:
        self._frontend.execute(requests)

    def close(self) -> None:
        self._metrics.close()
        self._engine.close(_CLOSE_GRACE_S)
        if self._loop is not None:
            self._loop.close()
        self._frontend.close()
        self._tracer.close()
