"""KServe calls of a ControlNet service, as its denoisers make them."""

from __future__ import annotations

import json
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from maskserve_common import transport
from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import Overloaded
from maskserve_triton.tensor_io import relayed

_MODEL = "controlnet"


class ControlNetCalls:
    """One connection; from any thread.

    Args:
        url: HOST:PORT of the service.
    """

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url, transport.SERVICE)
        self._stub = GRPCInferenceServiceStub(self._channel)

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
            response = next(self._stub.ModelStreamInfer(iter([request]), timeout=limit_s), None)
        except grpc.RpcError as error:
            raise Overloaded(
                f"the ControlNet service does not answer ({error.code().name}); try again later"
            ) from error
        if response is None:
            raise Overloaded("the ControlNet service gives no answer; try again later")
        if response.error_message:
            raise relayed(response.error_message, "")
        raw = bytes_tensor.outputs(response.infer_response)["RESULT"]
        result: dict[str, Any] = json.loads(bytes(raw))
        return result

    def close(self) -> None:
        self._channel.close()
