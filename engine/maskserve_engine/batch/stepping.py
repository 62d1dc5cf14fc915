"""How adapters step rows: a batch is packed once and kept for as long as the same rows go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Generic, Protocol, Self, TypeVar, cast

import torch

from maskserve_engine.batch.own_anchors import Entry
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.planning.two_stream import Plan


class Row(Protocol):
    """State between steps of whatever the batch computes: an edit, or a template being primed."""

    request_id: str
    step: int
    """Model calls done; the adapter's step counts them."""

    @property
    def steps(self) -> int: ...


class ReadingRow(Row, Protocol):
    """A row that is told what its next step reads."""

    entry: Entry | None
    """None: the step computes all its tokens."""
    adapters: Adapters
    """That change what its steps compute; it may get others between two steps."""


R = TypeVar("R", bound=ReadingRow)
M = TypeVar("M")


class KeptBatch(ABC, Generic[R, M]):
    """Some rows, and what does not change between their steps.

    Args:
        rows: of equal `batch_key`.
    """

    def __init__(self, rows: Sequence[R]) -> None:
        self.rows = tuple(rows)
        self._reads = tuple([row.entry is not None for row in rows])
        self._adapters = tuple([row.adapters for row in rows])

    @classmethod
    def of(cls, rows: Sequence[R], last: Self | None) -> Self:
        """The batch of these rows: the last one, if it holds for them still."""
        return last if last is not None and last.holds(rows) else cls(rows)

    def holds(self, rows: Sequence[R]) -> bool:
        """Whether it was packed for just these rows and their next step."""
        return (
            len(rows) == len(self.rows)
            and all(map(is_, rows, self.rows))
            and self._reads == tuple([row.entry is not None for row in rows])
            and self._adapters == tuple([row.adapters for row in rows])
        )

    @abstractmethod
    def step(self, model: M, kinds: Sequence[str], exchange: Exchange | None = None) -> None:
        """Take one step of every row: the model, then the sampler.

        No row has moved if it raises, so that the rows can be tried again one by one.

        Args:
            model: of the family.
            kinds: `dense`, `project` or `kv` per block, for rows that read entries.
            exchange: with the ranks that take the step of the same rows at the same time; None:
                there are none.

        Raises:
            ValueError: these rows' steps are not shared.
        """


class Stepping(Generic[R, M]):
    """The half of an adapter (`adapter.Adapter`) that steps rows.

    Args:
        batches: the family's.
        stepped: the model that its steps are given.
    """

    device: torch.device
    """Of the model; the adapter sets it."""

    def __init__(self, batches: type[KeptBatch[R, M]], stepped: M) -> None:
        self._batches, self._stepped = batches, stepped
        self._batch: KeptBatch[R, M] | None = None

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
        # Entered anew it costs more than the rest of this; the engine's thread is in it for good.
        with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
            last, self._batch = self._batch, None  # one whose step fails is not stepped again
            batch = self._batches.of(typed_rows, last)
            del last
            batch.step(self._stepped, () if plan is None else plan.kinds, exchange)
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
