"""One case of the corpus: a request and its expected answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tests.fakes.hostile import good_inputs

Pixels: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Refused:
    """An error whose message begins with `start`."""

    field: str
    code: str = "INVALID_REQUEST"

    @property
    def start(self) -> str:
        return f"[{self.code}] {self.field}: "


@dataclass(frozen=True)
class Works:
    """A final edit."""

    source: Pixels
    """RGB [H, W, 3]: the decoded source."""
    background: Bools
    """[H, W]: pixels that the answer must copy from the source, bit for bit; none for lossy
    sources.
    """


@dataclass(frozen=True)
class Damaged:
    """A damaged file whose damage a decoder may overlook. The request is refused with its field's
    name, or edited with the pixels that Pillow alone reads from the file.
    """

    field: str

    @property
    def refused(self) -> Refused:
        return Refused(self.field)


Expected: TypeAlias = Refused | Works | Damaged


@dataclass(frozen=True)
class Case:
    sort: str
    """The odd part: `image`, `bomb`, `mask`, `settings`, `prompt`, `mutation`."""
    name: str
    make: Callable[[], dict[str, bytes]]
    """Makes IMAGE, MASK, PROMPT and SETTINGS. They are made on demand, because some are large."""
    expected: Expected

    @property
    def inputs(self) -> dict[str, bytes]:
        return self.make()

    def __str__(self) -> str:
        return f"{self.sort}: {self.name}"


def refused(sort: str, name: str, field: str, **changed: bytes) -> Case:
    """The good request with `changed` tensors, which must be refused."""
    return Case(sort, name, lambda: {**good_inputs(), **changed}, Refused(field))


def works(sort: str, name: str, source: Pixels, background: Bools, **changed: bytes) -> Case:
    """The good request with `changed` tensors, which must be edited."""
    return Case(sort, name, lambda: {**good_inputs(), **changed}, Works(source, background))


def damaged(sort: str, name: str, field: str, file: bytes) -> Case:
    """The good request with a damaged IMAGE or MASK."""
    return Case(sort, name, lambda: {**good_inputs(), field: file}, Damaged(field))
