"""gRPC messages that Triton itself refuses before any of our code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from tests.fakes.corpus.tensors import CHANGES, Change, cell
from tests.fakes.hostile import good_inputs


@dataclass(frozen=True)
class GrpcCase:
    """A ModelInfer message."""

    name: str
    request: Any
    code: str
    error_text: str

    def __str__(self) -> str:
        return self.name


def grpc_cases() -> Iterator[GrpcCase]:
    for tensor in good_inputs():
        for key, change in CHANGES.items():
            error_text = change.error_text or tensor
            yield GrpcCase(
                f"{tensor} {key}", _message({tensor: change}), "INVALID_ARGUMENT", error_text
            )
        yield GrpcCase(
            f"{tensor} missing", _message({}, without=tensor), "INVALID_ARGUMENT", tensor
        )
    for name, (change, code, error_text) in _ODD_MESSAGES.items():
        message = _message({})
        change(message)
        yield GrpcCase(name, message, code, error_text)


def _message(changes: dict[str, Change], without: str = "") -> Any:
    request = service_pb2.ModelInferRequest(model_name="edit")
    for name, value in good_inputs().items():
        if name == without:
            continue
        change = changes.get(name, Change())
        shape = [1] if change.shape is None else change.shape
        request.inputs.add(
            name=change.name or name, datatype=change.datatype or "BYTES", shape=shape
        )
        request.raw_input_contents.append(cell(value) if change.data is None else change.data)
    return request


def _no_contents(message: Any) -> None:
    del message.raw_input_contents[:]


def _one_content_less(message: Any) -> None:
    del message.raw_input_contents[-1]


def _both_contents(message: Any) -> None:
    message.inputs[0].contents.bytes_contents.append(b"x")


def _numbers(message: Any) -> None:
    del message.raw_input_contents[:]
    for tensor in message.inputs:
        tensor.contents.int_contents.append(1)


def _extra(message: Any) -> None:
    message.inputs.add(name="EXTRA", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(cell(b"a"))


def _twice(message: Any) -> None:
    message.inputs[2].name = "IMAGE"


def _negative(message: Any) -> None:
    message.inputs[2].shape[:] = [-1]


def _version(text: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.model_version = text

    return change


def _model(name: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.model_name = name

    return change


def _output(message: Any) -> None:
    message.outputs.add(name="NOPE")


def _region(message: Any) -> None:
    message.inputs[0].parameters["shared_memory_region"].string_param = "nope"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 9
    del message.raw_input_contents[0]


def _priority(message: Any) -> None:
    message.parameters["priority"].int64_param = -5


_ODD_MESSAGES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "no contents": (_no_contents, "INVALID_ARGUMENT", "IMAGE"),
    "one content less": (_one_content_less, "INVALID_ARGUMENT", "SETTINGS"),
    "both kinds of contents": (_both_contents, "INVALID_ARGUMENT", "IMAGE"),
    "contents of numbers": (_numbers, "INVALID_ARGUMENT", "IMAGE"),
    "an extra tensor": (_extra, "INVALID_ARGUMENT", "EXTRA"),
    "a tensor twice": (_twice, "INVALID_ARGUMENT", "IMAGE"),
    "a negative shape": (_negative, "INVALID_ARGUMENT", "PROMPT"),
    "an unknown version": (_version("7"), "NOT_FOUND", "edit"),
    "a version that is none": (_version("latest"), "INVALID_ARGUMENT", "latest"),
    "an unknown model": (_model("nope"), "NOT_FOUND", "nope"),
    "no model": (_model(""), "NOT_FOUND", "model"),
    "an unknown output": (_output, "INVALID_ARGUMENT", "NOPE"),
    "an unknown shared memory": (_region, "NOT_FOUND", "nope"),
    "a negative priority": (_priority, "INVALID_ARGUMENT", "priority"),
}
