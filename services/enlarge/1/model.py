"""enlarge: nodes of workflows, pictures with twice the sides."""

from typing import Any

import triton_python_backend_utils as pb_utils

from maskserve_core.config import Config
from maskserve_core.triton.nodes import NodeFront
from maskserve_core.triton.worker_model import WorkerModel
from maskserve_engine.nodes.enlarge import EnlargeNodes


class TritonPythonModel(WorkerModel):
    name = "enlarge"

    def open(self, config: Config) -> None:
        self._front = NodeFront(pb_utils, self.name, EnlargeNodes(config))

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._front.execute(requests)

    def close(self) -> None:
        """It holds nothing that does not end with it."""
