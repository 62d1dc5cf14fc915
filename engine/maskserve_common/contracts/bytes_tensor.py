"""BYTES tensors in KServe's gRPC messages: 4 bytes of length before each element.

(tritonclient also has a codec, by way of numpy arrays of objects: it copies each element once more,
and its reader accepts lengths beyond the end.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_LENGTH = 4


def pack(elements: Iterable[bytes]) -> bytes:
    """The contents of a tensor of these elements."""
    return b"".join(
        part for element in elements for part in (len(element).to_bytes(_LENGTH, "little"), element)
    )


def count(raw: bytes | memoryview, most: int) -> int:
    """Elements in a tensor's contents; -1: the lengths do not fit the bytes, or they are more than
    `most`.
    """
    at = element_count = 0
    while at < len(raw) and element_count <= most:
        at += _LENGTH + int.from_bytes(raw[at : at + _LENGTH], "little")
        element_count += 1
    return element_count if at == len(raw) and element_count <= most else -1


def elements(raw: bytes, most: int) -> list[bytes]:
    """Return copies of all elements of a tensor.

    Raises:
        ValueError: there are more than `most`, or their lengths do not fit.
    """
    values, at = [], 0
    if count(raw, most) < 0:
        raise ValueError(f"is not up to {most} BYTES elements")
    while at < len(raw):
        end = at + _LENGTH + int.from_bytes(raw[at : at + _LENGTH], "little")
        values.append(raw[at + _LENGTH : end])
        at = end
    return values


def only(raw: bytes | memoryview) -> memoryview:
    """Return a view of the one element of a tensor.

    Raises:
        ValueError: it has more or fewer, or lengths that do not fit.
    """
    if int.from_bytes(raw[:_LENGTH], "little") + _LENGTH != len(raw):
        raise ValueError("is not one BYTES element")
    return memoryview(raw)[_LENGTH:]


def first(raw: bytes | memoryview) -> memoryview:
    """Return a view of a tensor's first element, in contents of which `count` knows the elements;
    empty: there is none.
    """
    end = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
    return memoryview(raw)[_LENGTH:end]


def add_input(request: Any, name: str, elements: Sequence[bytes]) -> None:
    """Append a tensor to a `ModelInferRequest` with raw contents."""
    request.inputs.add(name=name, datatype="BYTES", shape=[len(elements)])
    request.raw_input_contents.append(pack(elements))


def add_output(response: Any, name: str, elements: Sequence[bytes]) -> None:
    """Append a tensor to a `ModelInferResponse`."""
    response.outputs.add(name=name, datatype="BYTES", shape=[len(elements)])
    response.raw_output_contents.append(pack(elements))


def outputs(response: Any) -> dict[str, memoryview]:
    """Return the outputs of a `ModelInferResponse` that has one element in each.

    Raises:
        ValueError: an output has more or fewer.
    """
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    values = {}
    for tensor, raw in contents:
        try:
            values[tensor.name] = only(raw)
        except ValueError as error:
            raise ValueError(f"{tensor.name} {error}") from None
    return values
