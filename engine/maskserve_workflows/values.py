"""Values of a running workflow: bytes of pictures and masks, text, and the classes here.

The node that makes a picture or mask returns its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Areas:
    """Regions of a picture."""

    masks: tuple[Any, ...]
    waves: tuple[int, ...]
    """Wave of each region. Regions of one wave do not touch; a region is in a later wave than the
    earlier regions that it touches."""

    @classmethod
    def of_masks(cls, masks: Sequence[Any]) -> Areas:
        """Return regions that may all touch: each has a wave of its own."""
        return cls(tuple(masks), tuple(range(len(masks))))


@dataclass(slots=True, eq=False)
class NamedValue:
    """A picture or mask in a file of the host (`maskserve_common.files.values`)."""

    reference: bytes
    data: bytes | None = None
    """Data, if the value was made again and its folder had no room for a file."""

    @property
    def element(self) -> bytes:
        """The bytes that represent it in a tensor."""
        return self.reference if self.data is None else self.data

    def replace_with(self, value: Any) -> None:
        """Take over the reference or the data of `value`, which was made again."""
        if isinstance(value, NamedValue):
            self.reference, self.data = value.reference, value.data
        else:
            self.data = bytes(value)


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the single pictures, masks, texts and verdicts of a value or of several."""
    match value:
        case Areas():
            yield from value.masks
        case tuple() | list():
            for part in value:
                yield from parts_of(part)
        case _:
            yield value


def named_in(values: Any) -> list[NamedValue]:
    """Return the parts of a value, or of several, that are in files."""
    return [part for part in parts_of(values) if isinstance(part, NamedValue)]


def map_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with each of its parts replaced by `change(part)`."""
    match value:
        case Areas():
            return replace(value, masks=tuple(map(change, value.masks)))
        case tuple() | list():
            return tuple(map(change, value))
    return change(value)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict."""

    score: float
    passed: bool
