"""KServe calls of a ControlNet service, as its denoisers make them."""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import Overloaded
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.pool import Server
from maskserve_triton.loop_thread import LoopThread
from maskserve_triton.tensor_io import relayed

_MODEL = "controlnet"


class ControlNetCalls:
    """One connection; from any thread.

    Args:
        loop: the loop of all calls of this process.
        url: HOST:PORT of the service.
    """

    def __init__(self, loop: LoopThread, url: str) -> None:
        self._loop, self._server = loop, loop.run(_connected(url))

    def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
        """Call the service and return its answer.

        Args:
            op: the operation with its arguments.
            arrays: the ARRAYS tensor; empty: none.
            limit_s: seconds after which the call fails.

        Raises:
            MaskserveError: the service's error, or Overloaded where it does not answer.
        """
        request = pb.ModelInferRequest(model_name=_MODEL)
        bytes_tensor.add_input(request, "OP", [json.dumps(op).encode()])
        if arrays:
            request.inputs.add(name="ARRAYS", datatype="UINT8", shape=[len(arrays)])
            request.raw_input_contents.append(arrays)
        try:
            answer = self._loop.run(self._server.infer(request.SerializeToString(), limit_s))
        except Failure as failure:
            if failure.coded:
                raise relayed(failure.details, "") from None
            raise Overloaded(
                f"the ControlNet service does not answer ({failure.status.name}); try again later"
            ) from failure
        outputs = bytes_tensor.outputs(pb.ModelInferResponse.FromString(answer))
        result: dict[str, Any] = json.loads(bytes(outputs["RESULT"]))
        return result

    def close(self) -> None:
        self._loop.run(self._server.upstream.close())


async def _connected(url: str) -> Server:
    return Server(url)
