"""What a ControlNet service asks of a family: nets over rows whose base is in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

R = TypeVar("R")


class NetStep(NamedTuple, Generic[R]):
    """A row that is about to take a step elsewhere."""

    name: str
    row: R
    """As the family's `net_row` has made it."""
    step: int
    sample: Tensor
    """What nets are given of the base's latents."""
    computed: int
    """Tokens of them that the base computes; of FLUX the first ones."""


class Residual(NamedTuple):
    """What is added to a row."""

    row: str
    first: int
    last: int
    """At each place of the base from the first to the last."""
    added: Tensor


Send = Callable[[Sequence[Residual]], None]
"""Takes what is whole while later blocks of the nets still run."""


class NetBatch(Protocol[R]):
    """ControlNets beside the rows of one batch, for as long as the same rows go on."""

    def run(self, rows: Sequence[NetStep[R]], send: Send) -> None:
        """Each net runs once, over all rows that have it."""
        ...
