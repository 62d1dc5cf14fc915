"""Operations of `control`, as clients send them and as the router sends them to workers.

An image stays encoded as JSON, because decoding and encoding it would copy it several times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pybase64
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.operations import parse_operation
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import check_beginning
from maskserve_router.messages.model_request import on_the_wire

_SHORT = 64 * 1024
"""Bytes above which the image is searched for; the rest of an operation is shorter than this."""
_PART = 2**20
"""Bytes that are searched at a time, so that other threads can run in between."""
_STAND_IN = "(a long text)"
_BEGINNING = 4096


def read_operation(text: memoryview) -> dict[str, Any]:
    """Parse and check an operation. Its `image` becomes `msgspec.Raw`: a JSON string.

    Raises:
        InvalidRequest: as `parse_operation`.
    """
    long = _long_text(text)
    if long is None:
        operation = parse_operation(bytes(text))
    else:
        begin, end = long
        short = b"".join((text[:begin], msgspec.json.encode(_STAND_IN), text[end:]))
        operation = parse_operation(short)
        if operation.get("image") == _STAND_IN:
            return {**operation, "image": msgspec.Raw(text[begin:end])}
    if "image" in operation:
        operation["image"] = msgspec.Raw(msgspec.json.encode(operation["image"]))
    return operation


def registration(picture: bytes) -> dict[str, Any]:
    """Return the operation that registers a picture, an encoded file."""
    return {"op": "register", "image": msgspec.Raw(b'"%b"' % pybase64.b64encode(picture))}


def image_size(operation: Mapping[str, Any]) -> int:
    """Return the bytes of an operation's image; 0 without one."""
    image = operation.get("image")
    return 0 if image is None else memoryview(image).nbytes


def check_image(operation: Mapping[str, Any]) -> None:
    """Raises InvalidRequest: the image does not begin like a picture in base64."""
    image = memoryview(operation["image"])
    begins = bytes(image[:_BEGINNING])
    if len(begins) < len(image):
        begins = begins.rpartition(b"\\")[0] if b"\\" in begins[-6:] else begins
        begins = begins.decode("utf-8", "ignore").encode() + b'"'
    try:
        text = msgspec.json.decode(begins, type=str)
    except msgspec.MsgspecError:
        raise InvalidRequest("OP.image", "is not base64", "a picture as base64") from None
    check_beginning(text, "OP.image")


def control_request(operation: Mapping[str, Any]) -> bytes:
    """Return the encoded request of an operation."""
    head = pb.ModelInferRequest(model_name="control")
    head.inputs.add(name="OP", datatype="BYTES", shape=[1])
    fields_json = msgspec.json.encode(
        {key: value for key, value in operation.items() if key != "image"}
    )
    parts: list[bytes | memoryview] = [fields_json]
    if "image" in operation:
        parts = [fields_json[:-1], b',"image":', memoryview(operation["image"]), b"}"]
    return on_the_wire(head, [(sum(map(len, parts)).to_bytes(4, "little"), *parts)])


def _long_text(text: memoryview) -> tuple[int, int] | None:
    """Return begin and end of the one long string in a JSON text, including its quotes.

    None: there is none, or it is not plain (ASCII without escapes).
    """
    head = bytes(text[:_SHORT])
    if len(text) <= _SHORT or b"\\" in head or head.count(b'"') % 2 == 0:
        return None
    begin = head.rfind(b'"')  # opens a string that is not closed within `head`
    for at in range(begin + 1, len(text), _PART):
        part, quote, _ = bytes(text[at : at + _PART]).partition(b'"')
        if not part.isascii() or b"\\" in part:
            return None
        if quote:
            end = at + len(part) + 1
            is_it = end - begin > _SHORT >= len(text) - end
            return (begin, end) if is_it else None
    return None
