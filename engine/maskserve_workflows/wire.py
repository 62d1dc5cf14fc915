"""Values between a router and a node server: BYTES elements, and a layout that says which elements
make each value.

The model `nodes` takes TASK (the node, its settings, the layout of its inputs) and VALUES, and
answers with RESULT (the layout of its outputs) and MADE. A picture that a node has made passes as
pixels, because encoding PNG takes more time than the smaller transfer saves. A mask is a small PNG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from maskserve_common.files.values import Values, parse
from maskserve_common.imaging.images import encode_png, plain_picture
from maskserve_workflows.values import Areas, Judgement, NamedValue, map_parts

RECORD = "record"
"""Node name that requests the server's record (`NodeModels.record`), as RESULT."""
PLACED = "placed"
"""Setting of that request: models that the server has to load (`NodeModels.place`)."""
NOT_HOSTED = "is not run by this node server"
"""Message of a server whose `[nodes]` lack the node's model."""
OTHER_VERSION = "is of another version at this node server"
"""Message of a server whose file of the node has other ports or settings than the router's."""
NO_ROOM = "and there is room for"
"""Words of a server whose device cannot hold the node's models, whatever else it unloads."""
MOST_ELEMENTS = 256
"""Most elements of a call, one way."""
Put: TypeAlias = Callable[[Sequence[bytes | memoryview]], bytes | None]
"""Stores parts as one file and returns its reference; None: the value passes as bytes."""


class ValueLayout(msgspec.Struct, frozen=True):
    """The elements of one value."""

    name: str
    kind: str
    count: Annotated[int, Meta(ge=0, le=MOST_ELEMENTS)] = 1
    waves: tuple[int, ...] = ()
    """Wave of each region (`Areas.waves`)."""


class NodeTask(msgspec.Struct, frozen=True):
    """Request to a node server."""

    node: str
    inputs: tuple[ValueLayout, ...]
    settings: dict[str, Any]
    scope: str = ""
    """Scope of the client."""
    run: str = ""
    """Run that outputs are stored for, if the server shares files with the router; empty: outputs
    pass as bytes."""
    signature: str = ""
    """`NodeType.signature` at the router; empty: any."""


class NodeResult(msgspec.Struct, frozen=True):
    """Answer of a node server."""

    outputs: tuple[ValueLayout, ...]
    seconds: float


def read_all(elements: Mapping[str, Any], values: Values, scope: str) -> dict[str, Any]:
    """Return values by name, with references to files replaced by the files' data.

    Raises:
        TemplateNotFound: a file does not exist, or is not the client's.
    """

    def read(part: Any) -> Any:
        return values.read(part.element, scope) if isinstance(part, NamedValue) else part

    return {name: map_parts(value, read) for name, value in elements.items()}


def nbytes(value: Any) -> int:
    """Return the bytes of a value's pictures, masks and texts, or of several values by name."""
    match value:
        case bytes() | bytearray() | memoryview() | str():
            return len(value)
        case NamedValue():
            reference = parse(value.element)
            return len(value.element) if reference is None else reference[1]
        case Areas():
            return nbytes(value.masks)
        case tuple() | list():
            return sum(map(nbytes, value))
        case Mapping():
            return sum(map(nbytes, value.values()))
    return 0


def pack_values(
    values: Mapping[str, Any], kinds: Mapping[str, str], put: Put = lambda parts: None
) -> tuple[tuple[ValueLayout, ...], list[bytes]]:
    """Return values as a layout and elements.

    Args:
        values: values by name.
        kinds: kind of each value by name; it may have further names.
        put: stores pictures and masks.
    """
    layout, elements = [], []
    for name, value in values.items():
        kind = kinds[name]
        waves: tuple[int, ...] = ()
        match value:
            case Areas():
                parts, waves = [_encoded(part, put) for part in value.masks], value.waves
            case tuple() | list():
                parts = [_encoded(part, put) for part in value]
            case _:
                parts = [_encoded(value, put)]
        layout.append(ValueLayout(name, kind, len(parts), waves))
        elements += parts
    return tuple(layout), elements


def unpack_values(layout: Sequence[ValueLayout], elements: Sequence[bytes]) -> dict[str, Any]:
    """Return the values of a layout by name.

    Raises:
        ValueError: the elements do not fit the layout.
    """
    if sum(layout_entry.count for layout_entry in layout) != len(elements):
        raise ValueError(f"{len(elements)} elements are not those of the layout")
    begin, values = 0, {}
    for layout_entry in layout:
        parts = elements[begin : begin + layout_entry.count]
        begin += layout_entry.count
        values[layout_entry.name] = _decoded(layout_entry, parts)
    return values


def _encoded(value: Any, put: Put) -> bytes:
    match value:
        case Judgement():
            return msgspec.json.encode(value)
        case str():
            return value.encode()
        case NamedValue():
            return value.element
        case np.ndarray():
            parts = plain_picture(value)
            return put(parts) or (b"".join(parts) if value.ndim == 3 else encode_png(value))
    return put([value]) or bytes(value)


def _decoded(layout_entry: ValueLayout, parts: Sequence[bytes]) -> Any:
    if layout_entry.kind == "regions":
        if len(layout_entry.waves) != len(parts):
            raise ValueError(
                f"{layout_entry.name}: {len(layout_entry.waves)} waves for {len(parts)} regions"
            )
        return Areas(tuple(map(picture_of, parts)), layout_entry.waves)
    many = layout_entry.kind in ("pictures", "verdicts")
    kind = layout_entry.kind[:-1] if many else layout_entry.kind
    if not many and len(parts) != 1:
        raise ValueError(f"{layout_entry.name}: is {len(parts)} elements instead of one")
    values = tuple(_decoded_part(kind, part) for part in parts)
    return values if many else values[0]


def _decoded_part(kind: str, raw: bytes) -> Any:
    if kind == "verdict":
        return msgspec.json.decode(raw, type=Judgement)
    return raw.decode() if kind == "text" else picture_of(raw)


def picture_of(element: bytes) -> bytes | NamedValue:
    """Return the picture or mask of an element: a value in a file if the element is a reference,
    otherwise its bytes.
    """
    return element if parse(element) is None else NamedValue(element)
