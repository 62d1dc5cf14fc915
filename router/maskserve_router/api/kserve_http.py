"""Conversion of KServe v2 over HTTP (JSON and the binary extension) to and from gRPC messages.

The models for clients have BYTES inputs and outputs; no other type is read. JSON is read into typed
structures, which limits its depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.tensors import Contract, Tensor
from maskserve_common.errors import InvalidRequest
from maskserve_router.messages.edit_call import MODELS, UnknownModel
from maskserve_router.messages.failures import NotSupported
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.messages.request_limits import read_json

_MOST_PARAMETERS = 64
_FEW = Meta(max_length=_MOST_PARAMETERS)
Parameters = Annotated[dict[str, bool | int | float | str | None], _FEW]


class _Input(Struct):
    name: str
    datatype: str
    shape: Annotated[list[int], _FEW]
    parameters: Parameters = {}
    data: Annotated[list[str | Annotated[list[str], _FEW]], _FEW] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class _Output(Struct):
    name: str
    parameters: Parameters = {}


class _Request(Struct):
    inputs: Annotated[list[_Input], _FEW]
    outputs: Annotated[list[_Output], _FEW] = []
    id: str = ""
    parameters: Parameters = {}


_read_request = msgspec.json.Decoder(_Request).decode
_read_object = msgspec.json.Decoder(dict[str, Any]).decode


class RequestedOutputs(Struct):
    """The form of outputs that the client wants: JSON or binary."""

    binary: dict[str, bool]
    """Output name -> True for binary, for outputs that the request names."""
    otherwise: bool
    """True for binary, for the other outputs."""

    def is_binary(self, name: str) -> bool:
        return self.binary.get(name, self.otherwise)


def infer_request(
    model: str, version: str, body: bytes, header_bytes: int | None
) -> tuple[ModelRequest, RequestedOutputs]:
    """Return the message of an inference; binary inputs stay in the body.

    Args:
        model: name of the model.
        version: its version; empty: any.
        body: JSON, followed by the binary inputs.
        header_bytes: length of the JSON; None: the whole body.

    Raises:
        InvalidRequest: naming the faulty part.
    """
    split = len(body) if header_bytes is None else header_bytes
    if not 0 <= split <= len(body):
        raise InvalidRequest(
            "Inference-Header-Content-Length", f"is {split} of a body of {len(body)} bytes"
        )
    view = memoryview(body)
    request = read_json(view[:split], _read_request, "an inference request")
    head = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    contents: list[bytes | memoryview] = []
    _put_parameters(head, request.parameters, without=("binary_data_output",))
    at = split
    for tensor in request.inputs:
        _check_tensor(tensor)
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            contents.append(_from_json(tensor))
        else:
            if type(size) is not int or not 0 <= size <= len(body) - at:
                raise InvalidRequest(
                    f"{tensor.name}.parameters.binary_data_size",
                    f"is {size}",
                    f"up to the {len(body) - at} bytes that follow",
                )
            contents.append(view[at : at + size])
            at += size
        added = head.inputs.add(name=tensor.name, datatype=tensor.datatype)
        added.shape.extend(tensor.shape)
    if at != len(body):
        raise InvalidRequest("body", f"has {len(body) - at} bytes more than its inputs")
    for output in request.outputs:
        added_output = head.outputs.add(name=output.name)
        other_parameters = {k: v for k, v in output.parameters.items() if k != "binary_data"}
        _put_parameters(added_output, other_parameters)
    output_forms = RequestedOutputs(
        {o.name: bool(o.parameters.get("binary_data", False)) for o in request.outputs},
        bool(request.parameters.get("binary_data_output", False)),
    )
    return ModelRequest(head, contents), output_forms


def infer_response(
    answer: bytes, requested: RequestedOutputs
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the parts of a response's body, and the length of its JSON if binary outputs follow.

    Raises:
        InvalidRequest: an output was requested as JSON and is not text.
    """
    response = ModelAnswer.parse(answer)
    head, outputs = response.head, []
    tail: list[bytes | memoryview] = []
    for tensor, raw in zip(head.outputs, response.contents, strict=True):
        output: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if requested.is_binary(tensor.name):
            output["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            output["data"] = [_text(tensor.name, bytes_tensor.only(raw))]
        outputs.append(output)
    first = msgspec.json.encode({**_head_fields(head), "outputs": outputs})
    return [first, *tail], len(first) if tail else None


def generate_request(
    model: str, version: str, body: bytes, models: Mapping[str, Contract] = MODELS
) -> ModelRequest:
    """Return the message of /generate: keys that name inputs become tensors, others parameters.

    Args:
        model: name of the model.
        version: its version; empty: any.
        body: a JSON object.
        models: models that clients may call.

    Raises:
        InvalidRequest: naming the key.
    """
    if model not in models:
        raise UnknownModel(model, models=models)
    values = read_json(body, _read_object, "a JSON object")
    message = ModelRequest(pb.ModelInferRequest(model_name=model, model_version=version))
    if isinstance(values.get("id"), str):
        message.head.id = values.pop("id")
    nested = values.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters", "is not a JSON object")
    for declared in models[model].inputs:
        if declared.name in values:
            elements = _elements(declared, values.pop(declared.name))
            message.add(declared.name, list(map(_encoded, elements)))
    if len(values) + len(nested) > _MOST_PARAMETERS:
        raise InvalidRequest("parameters", f"are over {_MOST_PARAMETERS}")
    _put_parameters(message.head, {**values, **nested})
    return message


def generate_response(response: ModelAnswer) -> bytes:
    """Return the JSON of one response of /generate; raises as `infer_response`."""
    texts = {name: _text(name, element) for name, element in response.outputs().items()}
    return msgspec.json.encode({**_head_fields(response.head), **texts})


def _head_fields(head: pb.ModelInferResponse) -> dict[str, str]:
    """Return the model of a response, and the request's id if it has one."""
    names = {"model_name": head.model_name, "model_version": head.model_version}
    return {**names, "id": head.id} if head.id else names


def _check_tensor(tensor: _Input) -> None:
    if "shared_memory_region" in tensor.parameters:
        raise NotSupported(
            tensor.name, "is in shared memory, which ends at the host", "the tensor's bytes"
        )
    if tensor.datatype != "BYTES":
        raise InvalidRequest(f"{tensor.name}.datatype", f"is {tensor.datatype[:20]}", "BYTES")


def _from_json(tensor: _Input) -> bytes:
    """Return the raw contents of a tensor whose elements are in the JSON."""
    if tensor.data is msgspec.UNSET:
        raise InvalidRequest(f"{tensor.name}.data", "is missing", "a list of strings")
    elements: list[str] = []
    for element in tensor.data:
        elements.extend([element] if isinstance(element, str) else element)
    return bytes_tensor.pack(map(_encoded, elements))


def _elements(declared: Tensor, value: Any) -> list[str]:
    """Return a tensor's elements: a list of strings, or one string for a tensor of one element."""
    elements = value if isinstance(value, list) else [value]
    if not all(isinstance(element, str) for element in elements):
        raise InvalidRequest(declared.name, "is not a string", _accepted(declared))
    if declared.dims == (1,) and len(elements) != 1:
        raise InvalidRequest(declared.name, "is not one string", _accepted(declared))
    return elements


def _accepted(declared: Tensor) -> str:
    return "a string, or a list of one" if declared.dims == (1,) else "a list of strings"


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("body", "holds lone surrogates, not text", "Unicode text") from None


def _text(name: str, element: memoryview) -> str:
    """Return an element of a BYTES output as text."""
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"outputs.{name}",
            "is not text, and JSON was asked for",
            'SETTINGS.output_encoding "base64", or binary_data_output true',
        ) from None


def _put_parameters(
    message: pb.ModelInferRequest | pb.ModelInferRequest.InferRequestedOutputTensor,
    values: dict[str, Any],
    without: tuple[str, ...] = (),
) -> None:
    for name, value in values.items():
        if name in without or value is None:
            continue
        parameter = message.parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int() if -(2**63) <= value < 2**63:
                parameter.int64_param = value
            case float():
                parameter.double_param = value
            case str():
                parameter.string_param = value
            case _:
                raise InvalidRequest(f"parameters.{name[:40]}", "is not a scalar", "a scalar")
