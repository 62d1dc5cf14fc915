"""An emulated node server: a real gRPC server whose nodes take a given time, one after the other.
It computes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import grpc
import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.server import Context, answer_of, server_of
from maskserve_common.contracts import bytes_tensor
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.wire import (
    MOST_ELEMENTS,
    RECORD,
    NodeResult,
    NodeTask,
    pack_values,
    unpack_values,
)

Make: TypeAlias = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""A node's outputs, by its type and inputs."""


class EmulatedNodes:
    """One node server; use `start` and `stop`.

    Args:
        seconds: of each node type that it runs.
        make: the nodes' outputs.
    """

    def __init__(self, seconds: Mapping[str, float], make: Make) -> None:
        self._seconds, self._make = seconds, make
        self._free_at = 0.0
        method = grpc.unary_unary_rpc_method_handler(self._infer)
        self._server, self.port = server_of({"ModelInfer": method})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def run(self, node: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A node's outputs, after the times of earlier nodes and its own time.

        The times work like a worker's steps: a node begins at the planned end of the one before.
        """
        self._free_at = max(self._free_at, time.monotonic()) + self._seconds[node]
        await asyncio.sleep(self._free_at - time.monotonic())
        return self._make(node, inputs)

    async def _infer(self, raw: bytes, context: Context) -> bytes:
        message = pb.ModelInferRequest.FromString(raw)
        encoded_task, values = (
            bytes_tensor.elements(content, MOST_ELEMENTS) for content in message.raw_input_contents
        )
        task = msgspec.json.decode(encoded_task[0], type=NodeTask)
        if task.node == RECORD:
            models = {NODE_TYPES[name].model for name in self._seconds}
            record = {"models": [{"name": name} for name in sorted(models)]}
            return answer_of("nodes", {"RESULT": [msgspec.json.encode(record)], "MADE": [b""]})
        outputs = await self.run(task.node, unpack_values(task.inputs, values))
        layout, parts = pack_values(outputs, NODE_TYPES[task.node].outputs)
        result = msgspec.json.encode(NodeResult(layout, self._seconds[task.node]))
        return answer_of("nodes", {"RESULT": [result], "MADE": parts})
