"""KServe calls of a ControlNet service, as its denoisers make them."""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import Overloaded
from maskserve_triton.remote_model import NoAnswer, RemoteModel

_MODEL = "controlnet"


class ControlNetCalls:
    """One connection; from any thread.

    Args:
        url: HOST:PORT of the service.
    """

    def __init__(self, url: str) -> None:
        self._model = RemoteModel(url, _MODEL)

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
            response = self._model.call_decoupled(request, limit_s)
        except NoAnswer as error:
            raise Overloaded(
                f"the ControlNet service does not answer ({error.code.name}); try again later"
            ) from error
        result: dict[str, Any] = json.loads(bytes(bytes_tensor.outputs(response)["RESULT"]))
        return result

    def close(self) -> None:
        self._model.close()
