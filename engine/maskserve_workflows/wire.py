"""Values between a router and a node server: BYTES elements, and a layout that assigns them.

The model `nodes` takes TASK (the node, its settings, the layout of its inputs) and VALUES, and
answers with RESULT (the layout of its outputs) and MADE. A picture that a node made passes as its
pixels: for the next node, PNG costs more time than its bytes save. A mask is a small PNG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from maskserve_common.files.values import Values, parse
from maskserve_common.imaging.images import encode_png, plain_picture
from maskserve_workflows.values import Areas, Judgement, NamedValue, changed

RECORD = "record"
"""Node name that requests the server's record (`NodeModels.record`), as RESULT."""
PLACED = "placed"
"""Setting of that request: models that the server has to load (`NodeModels.place`)."""
NOT_HOSTED = "is not run by this node server"
"""Message of a server whose `[nodes]` lack the node's model."""
MOST_ELEMENTS = 256
"""Most elements of a call, one way."""
Put: TypeAlias = Callable[[Sequence[bytes | memoryview]], bytes | None]
"""Stores parts as one file and returns its reference; None: the value passes as bytes."""


class Laid(msgspec.Struct, frozen=True):
    """One value of a layout."""

    name: str
    kind: str
    count: Annotated[int, Meta(ge=0, le=MOST_ELEMENTS)] = 1
    waves: tuple[int, ...] = ()
    """Waves of the regions."""


class NodeTask(msgspec.Struct, frozen=True):
    """Request to a node server."""

    node: str
    inputs: tuple[Laid, ...]
    settings: dict[str, Any]
    scope: str = ""
    """Scope of the client."""
    run: str = ""
    """Run that outputs are stored for, if the server shares files with the router; empty: outputs
    pass as bytes."""


class NodeResult(msgspec.Struct, frozen=True):
    """Answer of a node server."""

    outputs: tuple[Laid, ...]
    seconds: float


def read_all(elements: Mapping[str, Any], values: Values, scope: str) -> dict[str, Any]:
    """Return values by name, with references to files replaced by the files' data.

    Raises:
        TemplateNotFound: a file does not exist, or is not the client's.
    """

    def read(part: Any) -> Any:
        return values.read(part.element, scope) if isinstance(part, NamedValue) else part

    return {name: changed(value, read) for name, value in elements.items()}


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


def laid_out(
    values: Mapping[str, Any], kinds: Mapping[str, str], put: Put = lambda parts: None
) -> tuple[tuple[Laid, ...], list[bytes]]:
    """Return values by name as a layout and elements.

    `kinds` may name more than there are. `put` stores pictures and masks.
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
        layout.append(Laid(name, kind, len(parts), waves))
        elements += parts
    return tuple(layout), elements


def picked_up(layout: Sequence[Laid], elements: Sequence[bytes]) -> dict[str, Any]:
    """Return the values of a layout by name.

    Raises:
        ValueError: the elements do not fit the layout.
    """
    if sum(laid.count for laid in layout) != len(elements):
        raise ValueError(f"{len(elements)} elements are not those of the layout")
    at, values = 0, {}
    for laid in layout:
        parts = elements[at : at + laid.count]
        at += laid.count
        values[laid.name] = _decoded(laid, parts)
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


def _decoded(laid: Laid, parts: Sequence[bytes]) -> Any:
    if laid.kind == "regions":
        if len(laid.waves) != len(parts):
            raise ValueError(f"{laid.name}: {len(laid.waves)} waves for {len(parts)} regions")
        return Areas(tuple(map(drawn, parts)), laid.waves)
    many = laid.kind in ("pictures", "verdicts")
    kind = laid.kind[:-1] if many else laid.kind
    if not many and len(parts) != 1:
        raise ValueError(f"{laid.name}: is {len(parts)} elements in place of one")
    values = tuple(_one(kind, part) for part in parts)
    return values if many else values[0]


def _one(kind: str, raw: bytes) -> Any:
    if kind == "verdict":
        return msgspec.json.decode(raw, type=Judgement)
    return raw.decode() if kind == "text" else drawn(raw)


def drawn(element: bytes) -> bytes | NamedValue:
    """Return the picture or mask of an element: a reference, or its bytes."""
    return element if parse(element) is None else NamedValue(element)
