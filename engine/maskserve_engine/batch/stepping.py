"""How adapters step rows: a batch is packed once and kept while its rows are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Generic, Protocol, Self, TypeVar, cast

import torch

from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import Entry
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.planning.two_stream import Plan


class Row(Protocol):
    request_id: str
    step: int
    """Number of completed model calls; the adapter's step counts them."""

    @property
    def steps(self) -> int: ...


class ReadingRow(Row, Protocol):
    """A row that may read an entry in its next step."""

    entry: Entry | None
    """Entry that the next step reads; None: it computes all tokens."""
    adapters: Adapters
    """LoRAs of the row; they may change between two steps."""


R = TypeVar("R", bound=ReadingRow)
M = TypeVar("M")


class ReusableBatch(ABC, Generic[R, M]):
    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = tuple(rows)
        self._reads = tuple([row.entry is not None for row in rows])
        self._adapters = tuple([row.adapters for row in rows])

    @classmethod
    def of(cls, rows: Sequence[R], last: Self | None) -> Self:
        """Return `last` if it still holds for these rows, else a new batch."""
        if last is not None and last.holds(rows):
            return last
        batch = cls(rows)
        if last is not None:
            batch.follow(last)
        return batch

    def follow(self, last: Self) -> None:
        """Take over what `last`, which is not stepped again, has computed for these rows."""

    def holds(self, rows: Sequence[R]) -> bool:
        """Return whether the batch was packed for exactly these rows and their next step."""
        return (
            len(rows) == len(self.rows)
            and all(map(is_, rows, self.rows))
            and self._reads == tuple([row.entry is not None for row in rows])
            and self._adapters == tuple([row.adapters for row in rows])
        )

    @abstractmethod
    def step(self, model: M, kinds: Sequence[str], exchange: Exchange | None = None) -> None:
        """Take one step of every row: the model, then the sampler.

        If it raises, no row has moved, so the rows can be retried one by one.

        Args:
            model: the family's model.
            kinds: `dense`, `project` or `kv` per block, for rows that read entries.
            exchange: connects the ranks that take the step together; None: one rank takes it
                alone.

        Raises:
            ValueError: these rows' steps cannot be shared among ranks.
        """


class Stepping(Generic[R, M]):
    device: torch.device

    def __init__(self, batches: type[ReusableBatch[R, M]], stepped: M) -> None:
        self._batches, self.stepped = batches, stepped
        self._batch: ReusableBatch[R, M] | None = None

    def step(
        self,
        rows: Sequence[Row],
        plan: Plan | None,
        reads: Sequence[Entry | None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        typed_rows = cast(Sequence[R], rows)
        if reads is not None:
            for row, entry in zip(typed_rows, reads, strict=True):
                row.entry = entry
        # Entering it costs more than the rest of this method; the engine's thread is always in it.
        with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
            last, self._batch = self._batch, None  # one whose step fails is not stepped again
            batch = self._batches.of(typed_rows, last)
            del last
            batch.step(self.stepped, () if plan is None else plan.kinds, exchange)
            self._batch = batch

    @contextmanager
    def session(self) -> Iterator[None]:
        # Kernels in the Triton language go to the current device, wherever their tensors lie.
        device_context = (
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        )
        with torch.inference_mode(), device_context:
            yield

    def release(self) -> None:
        self._batch = None
