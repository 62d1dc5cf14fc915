"""nodes: workflow nodes other than edits."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_common.config import Config
from maskserve_common.files.values import Values
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_triton.nodes import NodeFront
from maskserve_triton.worker_model import WorkerModel
from maskserve_workflows.node_models import NodeModels


class TritonPythonModel(WorkerModel):
    name = "nodes"

    def open(self, config: Config) -> None:
        hide_unused_libraries(config)
        self._models = NodeModels(config, thread=_limit_threads)
        self._front = NodeFront(pb_utils, self._models, Values(config.values))

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def close(self) -> None:
        self._models.close()


def _limit_threads(config: Config) -> None:
    """Prepare a thread that runs a model with weights; a server without one has no torch."""
    from maskserve_engine.stages.cpu_threads import limit_threads

    limit_threads(config)
