"""What the engine asks of a model family: its rows, and an adapter that makes and steps them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskserve_core.contracts.entry_key import Anchor
from maskserve_core.contracts.facts import ModelFacts
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.job import Conditioning, EditJob, TokenCounts


class Row(Protocol):
    """State between steps of whatever the batch computes: an edit, or a template being primed."""

    request_id: str
    step: int
    """Model calls done; the adapter's step counts them."""

    @property
    def steps(self) -> int: ...

    @property
    def uses_entries(self) -> bool:
        """Whether the next step reads entries."""
        ...

    def load(self) -> None:
        """Bring in what the next step reads."""
        ...


class EditRow(Row, Protocol):
    """An edit in the batch, with the state of its sampler."""

    @property
    def loaded_bytes(self) -> int:
        """Of entries, so far."""
        ...

    def result(self) -> NDArray[np.float32]:
        """[C, h, w] latents of the finished row."""
        ...

    def estimate(self) -> NDArray[np.float32]:
        """[C, h, w] latents as they would end, judged by the last step."""
        ...


class PrimingRow(Row, Protocol):
    """A template in the batch: each step computes the entries of one anchor."""

    def take_entry(self) -> AnchorEntry:
        """What the last step has recorded; once per step."""
        ...


class Adapter(Protocol):
    """Runs one family's model over explicit per-row state; the model itself holds none."""

    facts: ModelFacts
    blocks: int
    """Transformer blocks a plan speaks of."""
    anchor_tolerance: float
    """How far, in sigma, a step may be from the anchor it uses."""

    def steps(self, job: EditJob) -> int:
        """Model calls of the edit, the second pass of guided steps not counted."""
        ...

    def tokens(self, job: EditJob) -> TokenCounts: ...

    def batch_key(self, job: EditJob) -> Hashable:
        """Rows of equal keys may share a step."""
        ...

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        """(sigma, timestep) of each of the edit's model calls."""
        ...

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Timesteps to prime for an image of so many tokens."""
        ...

    def dense_row(self, job: EditJob) -> EditRow:
        """A row that computes all tokens, exactly as the diffusers pipeline does."""
        ...

    def cached_row(
        self, job: EditJob, entries: Sequence[AnchorEntry | None], noise_seed: int
    ) -> EditRow:
        """A row that computes the active tokens and reads `entries` (per step) for the rest."""
        ...

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: Conditioning,
        noise_seed: int,
        kind: str,
        format: str,
    ) -> PrimingRow:
        """A row that computes the template's entries at `anchors`, one per step."""
        ...

    def step(self, rows: Sequence[Row], kinds: Sequence[str]) -> None:
        """One model call for rows of this adapter; `kinds` per block, for rows that use entries.

        No row has moved if it raises, so that the rows can be tried again one by one.
        """
        ...

    def session(self) -> AbstractContextManager[object]:
        """What a thread that makes rows and steps them is inside of all the while."""
        ...

    def release(self) -> None:
        """Let go of what was kept of the last step's rows; there is nothing to step."""
        ...
