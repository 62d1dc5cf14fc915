"""Limits on the number of parts of a request, checked before it is parsed.

Parsers hold the GIL until they have finished. They copy long strings fast, but make an object for
each small value, so a body of millions of small values would block the router. Counting is cheap
and stops at the limit.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from maskserve_common.errors import InvalidRequest

T = TypeVar("T")
_PART = 2**20
"""Bytes that are counted at a time, so that other threads can run in between."""
_MOST_COMMAS = 65_536
"""Most commas of a JSON text. They bound the number of values, and leave room for long prompts."""
_MOST_MARKS = 4 * 2**20
"""Most bytes outside base64: blanks, escapes, text that is not ASCII. Some encoders escape each `/`
and `+` of a picture's base64."""
_BASE64 = (string.ascii_letters + string.digits + "+/=-_").encode()

_MOST_FIELDS = 1024
"""Most fields of a message; an edit with three ControlNets has about fifty."""
_MOST_FIELD_BYTES = 64 * 1024
"""Most bytes of a field other than a picture: a name, a shape, a parameter."""
_CONTENTS, _BYTES = 7, 2
"""Number of the field `raw_input_contents`, and the wire type of a field with a length."""
_LARGE: tuple[dict[int, int | None], ...] = (
    {5: 1, 7: None},  # ModelInferRequest: inputs, raw_input_contents
    {5: 2},  # InferInputTensor: contents
    {8: None},  # InferTensorContents: bytes_contents
)
"""For each level of messages: field numbers of large fields -> level of the message in them; None:
they have bytes."""
_RESPONSE, _OUTPUTS = 2, 6
"""Field numbers: `infer_response` in ModelStreamInferResponse, and `raw_output_contents` in
ModelInferResponse."""


def check_json(text: bytes | memoryview) -> None:
    """Raise InvalidRequest if JSON has more values, blanks or escapes than any request needs."""
    commas = marks = 0
    for at in range(0, len(text), _PART):
        part = bytes(text[at : at + _PART])
        commas += part.count(b",")
        marks += len(part.translate(None, _BASE64))
        if commas > _MOST_COMMAS:
            raise InvalidRequest("body", f"has over {_MOST_COMMAS} values", "an inference request")
        if marks > _MOST_MARKS:
            raise InvalidRequest("body", "has millions of blanks or escapes", "JSON without them")


def read_json(
    text: bytes | memoryview,
    decode: Callable[[bytes | memoryview], T],
    description: str,
    accepted: str = "",
) -> T:
    """Return what a JSON body holds.

    Args:
        text: the body.
        decode: decodes it.
        description: what it should be, for errors.
        accepted: what is accepted, for errors.

    Raises:
        InvalidRequest: it is something else, or has more parts than any request needs.
    """
    check_json(text)
    try:
        return decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"is not {description} ({error})", accepted) from None


def raw_contents(raw: bytes) -> list[tuple[int, int, int]]:
    """Return tag, begin and end of each raw content of a ModelInferRequest.

    Raises:
        InvalidRequest: it is malformed, or has more fields than any request needs.
    """
    view, count, spans = memoryview(raw), 0, []
    inside = [(0, len(raw), 0)]
    while inside:
        start, stop, level = inside.pop()
        for number, kind, tag, begin, end in _fields(view, start, stop):
            count += 1
            if count > _MOST_FIELDS:
                raise InvalidRequest("request", f"has over {_MOST_FIELDS} fields", "fewer")
            if number not in _LARGE[level]:
                if end - begin > _MOST_FIELD_BYTES:
                    problem = f"has a field of {end - begin} bytes that is no tensor's content"
                    raise InvalidRequest("request", problem, f"up to {_MOST_FIELD_BYTES}")
            elif (deeper := _LARGE[level][number]) is not None:
                inside.append((begin, end, deeper))
            elif (level, number, kind) == (0, _CONTENTS, _BYTES):
                spans.append((tag, begin, end))
    return spans


def raw_outputs(raw: memoryview) -> list[tuple[int, int, int]]:
    """Return tag, begin and end of each raw content of a worker's ModelInferResponse.

    Raises:
        InvalidRequest: it is malformed.
    """
    fields = _fields(raw, 0, len(raw))
    return [
        (tag, begin, end)
        for number, kind, tag, begin, end in fields
        if (number, kind) == (_OUTPUTS, _BYTES)
    ]


def streamed_response(raw: memoryview) -> tuple[int, int, int]:
    """Return tag, begin and end of the response in a ModelStreamInferResponse.

    All three are equal if it has no response.

    Raises:
        InvalidRequest: it is malformed, or has several responses.
    """
    fields = _fields(raw, 0, len(raw))
    spans = [field[2:] for field in fields if field[:2] == (_RESPONSE, _BYTES)]
    if len(spans) > 1:
        raise _no_message()
    return spans[0] if spans else (len(raw),) * 3


def _fields(view: memoryview, at: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield number, wire type, tag position, begin and end of each field of a message.

    Raises:
        InvalidRequest: the message is malformed.
    """
    while at < stop:
        start = at
        tag, at = _varint(view, at, stop)
        begin = end = at
        match tag & 7:
            case 0:
                _, at = _varint(view, at, stop)
            case 1:
                at += 8
            case 2:  # _BYTES
                size, begin = _varint(view, at, stop)
                at = end = begin + size
            case 5:
                at += 4
            case _:
                raise _no_message()
        if at > stop:
            raise _no_message()
        yield tag >> 3, tag & 7, start, begin, end


def _varint(view: memoryview, at: int, stop: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = 0
    for place, byte in enumerate(view[at : min(at + 10, stop)]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _no_message()


def _no_message() -> InvalidRequest:
    return InvalidRequest("request", "is not a ModelInferRequest")
