"""The engine's interface to a model family: its rows, and an adapter that creates and steps
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from maskserve_common.contracts.keys import Anchor
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import Ranged
from maskserve_engine.base.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import Entry, NetStepCaches, RefreshingRow, RefreshSchedule
from maskserve_engine.batch.stepping import Row
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.loader import Selection
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.control_link.served import ServedRow
from maskserve_engine.families.control import NetBatch, NetRow
from maskserve_engine.layers.low_rank import Adapters, Factors, LowRankSet
from maskserve_engine.planning.flops import ModelWork, Totals
from maskserve_engine.planning.two_stream import Plan
from maskserve_engine.spec.model_spec import ModelSpec


class EditRow(Row, Protocol):
    @property
    def selection(self) -> Selection | None:
        """Cached tokens of a cached row; None for a dense row."""
        ...

    def result(self) -> HostCopy:
        """Return [C, h, w] latents of the finished row."""
        ...

    def estimate(self) -> HostCopy:
        """Return [C, h, w] final latents predicted by the last step."""
        ...


class RefreshingEditRow(EditRow, RefreshingRow, Protocol):
    """An edit with refresh steps."""


class PrimingRow(Row, Protocol):
    def take_entry(self) -> AnchorEntry:
        """Return the entry that the last step recorded; once per step."""
        ...


class LoneLengths(NamedTuple):
    """Lengths of rows that step alone, for each of which a GPU prepares their first step."""

    image: Sequence[int] = ()
    """Numbers of computed image tokens; empty: lengths decide nothing."""
    words: Sequence[int] = ()
    """Numbers of a prompt's tokens, without those of the source, the largest last."""


class Adapter(Protocol):
    """Runs a family's model over explicit per-row state; the model itself holds none."""

    spec: ModelSpec
    weight_bytes: int
    device: torch.device
    dtype: torch.dtype
    blocks: int
    entry_blocks: int
    """Number of blocks in an entry, including feature maps after the transformer blocks."""
    entry_halves: int
    """2 where both passes of guided steps have their own entries, else 1."""
    anchor_tolerance: float
    """Largest distance, in sigma, between a step and the anchor it uses."""

    def steps(self, job: EditJob) -> int:
        """Return the edit's number of model calls, without the second pass of guided steps."""
        ...

    def tokens(self, job: EditJob) -> TokenCounts: ...

    def work(
        self, height: int, width: int, *, kind: EditKind = "inpaint", further: int = 0
    ) -> ModelWork:
        """Return the counted work, and with it the shape of entries, at a size of latents; with
        `further` tokens of references beside the source.
        """
        ...

    def totals(
        self, job: EditJob, schedule: RefreshSchedule | None = None, *, refresh: bool = False
    ) -> Totals:
        """Return the work of one step of this edit, in a batch of equal `batch_key`.

        Args:
            job: the edit.
            schedule: count a step between these refresh steps.
            refresh: count a refresh step of a row with a template.
        """
        ...

    def batch_key(self, job: EditJob) -> Hashable:
        """Return a key; only rows of equal keys may share a step."""
        ...

    def blank_prompt(self, tokens: int) -> Conditioning: ...

    def lone_lengths(self, job: EditJob, words: int, usual: tuple[float, float]) -> LoneLengths:
        """Return the lengths for which a lone row's attention is planned, or its step recorded.

        Args:
            job: an edit of the size and guidance of most.
            words: most tokens of a prompt.
            usual: least and largest share of a picture's tokens that edits compute.
        """
        ...

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]: ...

    def net_schedule(self, job: EditJob, controls: Sequence[Ranged]) -> RefreshSchedule:
        """Return the refresh steps of these ControlNets of an edit that reads a template."""
        ...

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Return the timesteps to prime for an image of so many tokens."""
        ...

    def prepare(self, job: EditJob) -> EditJob:
        """Return the job with all initial tensors that depend on it alone: random numbers, packed
        pictures, computed tokens. It is slow, so it runs outside the engine thread; thread-safe.
        """
        ...

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        """Return a prepared job with the template's inputs, for rows that read or make entries.
        Thread-safe, as `prepare`.
        """
        ...

    def with_settings(self, job: EditJob, **changes: int) -> EditJob:
        """Return a prepared job with another `mask_ring` or `step_interval`; its random numbers
        stay.
        """
        ...

    def dense_row(self, job: EditJob) -> EditRow:
        """Return a row that computes all tokens, exactly as the diffusers pipeline does."""
        ...

    def cached_row(
        self, job: EditJob, noise_seed: int, schedule: RefreshSchedule | None = None
    ) -> EditRow:
        """Return a row that reads entries for its cached tokens.

        Args:
            job: the edit, preferably prepared with the same `noise_seed`.
            noise_seed: seed of the template's noise.
            schedule: schedule of its step cache beside the entries; None: it has none (as in
                families without `RefreshSpec.stride`).
        """
        ...

    def refreshing_row(self, job: EditJob, schedule: RefreshSchedule) -> RefreshingEditRow:
        """Return a row whose steps read the step cache that its refresh steps fill
        (`RefreshSpec.stride`).
        """
        ...

    def refreshing_row_bytes(self, job: EditJob) -> int:
        """Return the bytes that such a row holds beside the cached parts of blocks."""
        ...

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: Conditioning,
        noise_seed: int,
        kinds: Sequence[frozenset[str]],
        format: str,
    ) -> PrimingRow:
        """Return a row that computes the template's entries, one anchor per step.

        `kinds` are the parts to keep per block: "h", "kv" or both; required `end` parts are kept,
        too.
        """
        ...

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRankSet:
        """Return a LoRA on the model's device, from factors by diffusers layer name.

        Raises:
            ValueError: it does not fit the model.
        """
        ...

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        """Set all LoRAs of a row's next steps, between two steps; no scale is 0."""
        ...

    @property
    def net_module_bytes(self) -> int:
        """Bytes of the model's modules that its ControlNets run, too: a service, whose model has no
        weights, holds them beside the nets.
        """
        ...

    def control_net(self, model: Any) -> Any:
        """Return a ControlNet in the family's own form.

        Raises:
            ValueError: it does not fit the model.
        """
        ...

    def control(
        self,
        row: Any,
        job: EditJob,
        nets: Mapping[str, Any],
        caches: NetStepCaches | None = None,
    ) -> None:
        """Add ControlNets to a row that has taken no step.

        Args:
            row: the row.
            job: its edit.
            nets: all ControlNets that the job's controls name.
            caches: receives the nets' step caches; None: they stay on the device.
        """
        ...

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        """Return the data of a row without steps that a ControlNet service needs; None: no control
        is active. Its nets have the job's controls, in order.
        """
        ...

    def serve_control(self, row: Any, served: ServedRow) -> None:
        """Add a service's residuals to a row."""
        ...

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        """Return a row of a service, whose base runs elsewhere; ids in `opening` are in host
        memory.
        """
        ...

    def net_batch(self) -> NetBatch: ...

    def step(
        self,
        rows: Sequence[Row],
        plan: Plan | None,
        reads: Sequence[Entry | None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Run one step of the rows. If it raises, no row has moved, so the rows can be retried one
        by one.

        Args:
            rows: rows of equal `batch_key`.
            plan: how rows that read entries run each block; None: no row reads any.
            reads: entry of each row, None for one that computes all tokens. The step waits for each
                part when it needs it (`Handle.wait`). Without `reads` each row reads the same entry
                as before, at first none.
            exchange: connects the ranks that take this step together, with equal arguments and
                rows; None: one rank takes it alone.

        Raises:
            ValueError: the family, or a feature of a row, does not support such a step.
            EntryLost: a part of an entry will not arrive; the rows can run without it
                (`reads`).
        """
        ...

    def most_ranks(self, job: EditJob) -> int:
        """Return the largest number of ranks that can share the steps of this edit alone."""
        ...

    def carried(self, row: Any) -> tuple[Any, ...] | None:
        """Return the state of a row between two steps that `follow` needs: numbers, and tensors on
        its device. None: the row cannot move to another process and has to restart there.
        """
        ...

    def follow(self, row: Any, carried: tuple[Any, ...], steps: int) -> None:
        """Continue a row from `carried` of the same edit's row in another process, after `steps`
        steps.
        """
        ...

    def session(self) -> AbstractContextManager[object]: ...

    def release(self) -> None:
        """Free the state kept for the last step's rows."""
        ...


def work_of(adapter: Adapter, job: EditJob) -> ModelWork:
    """Return the counted work of an edit's picture and references."""
    _, height, width = job.moments.shape
    latents = sum(moments.shape[1] * moments.shape[2] for moments in job.references)
    further = latents // adapter.spec.patch**2
    return adapter.work(height, width, kind=job.request.kind, further=further)
