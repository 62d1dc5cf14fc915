"""What the engine asks of a model family: its rows, and an adapter that makes and steps them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.base.job import Conditioning, EditJob, TokenCounts
from maskserve_engine.batch.own_anchors import AnchoredRow, Entry, OwnPlan
from maskserve_engine.batch.sequence_parallel import Exchange
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
from maskserve_engine.spec.facts import ModelFacts


class EditRow(Row, Protocol):
    """An edit in the batch, with the state of its sampler."""

    @property
    def skipped(self) -> int:
        """Steps so far that left all blocks but the first out (FirstBlockCache)."""
        ...

    @property
    def selection(self) -> Selection | None:
        """The inactive tokens of a cached row; None: a dense row."""
        ...

    def result(self) -> HostCopy:
        """[C, h, w] latents of the finished row."""
        ...

    def estimate(self) -> HostCopy:
        """[C, h, w] latents as they would end, judged by the last step."""
        ...


class AnchoredEditRow(EditRow, AnchoredRow, Protocol):
    """An edit that has anchors of its own."""


class PrimingRow(Row, Protocol):
    """A template in the batch: each step computes the entries of one anchor."""

    def take_entry(self) -> AnchorEntry:
        """What the last step has recorded; once per step."""
        ...


class Adapter(Protocol):
    """Runs one family's model over explicit per-row state; the model itself holds none."""

    facts: ModelFacts
    weight_bytes: int
    """Of the model, on its device."""
    device: torch.device
    """That its steps run on."""
    blocks: int
    """Transformer blocks a plan speaks of."""
    entry_blocks: int
    """What an entry has: blocks and, behind them, what is kept between blocks (feature maps)."""
    entry_halves: int
    """2 where both passes of guided steps have entries of their own, else 1."""
    anchor_tolerance: float
    """How far, in sigma, a step may be from the anchor it uses."""

    def steps(self, job: EditJob) -> int:
        """Model calls of the edit, the second pass of guided steps not counted."""
        ...

    def tokens(self, job: EditJob) -> TokenCounts: ...

    def work(self, height: int, width: int) -> ModelWork:
        """Counted work, and the shape of entries, at a size of latents."""
        ...

    def counted(self, job: EditJob, own: OwnPlan | None = None, *, anchor: bool = False) -> Totals:
        """What a step of this edit costs, beside other rows of equal `batch_key`.

        Args:
            job: the edit.
            own: count a step between these anchors of its own.
            anchor: count one at them, of a row that reads a template.
        """
        ...

    def batch_key(self, job: EditJob) -> Hashable:
        """Rows of equal keys may share a step."""
        ...

    def blank_prompt(self, tokens: int) -> Conditioning:
        """Of zeros, so many tokens long."""
        ...

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        """(sigma, timestep) of each of the edit's model calls."""
        ...

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Timesteps to prime for an image of so many tokens."""
        ...

    def prepare(self, job: EditJob) -> EditJob:
        """The job with all that its rows begin with and that follows from the job alone: random
        numbers, packed pictures, which tokens are active. It takes long, so a thread does it that
        takes no steps; may be called from several.
        """
        ...

    def prepare_template(self, job: EditJob, noise_seed: int) -> EditJob:
        """A prepared job with the template's own inputs, too, for rows that read or make entries;
        as of `prepare`, from any thread.

        Args:
            job: prepared.
            noise_seed: of the template's noise.
        """
        ...

    def with_ring(self, job: EditJob, ring: int) -> EditJob:
        """A prepared job that computes so many tokens round its mask; what was drawn stays."""
        ...

    def dense_row(self, job: EditJob) -> EditRow:
        """A row that computes all tokens, exactly as the diffusers pipeline does."""
        ...

    def cached_row(self, job: EditJob, noise_seed: int, own: OwnPlan | None = None) -> EditRow:
        """A row that computes the active tokens and reads entries for the rest.

        Args:
            job: best prepared, its template with the same `noise_seed`.
            noise_seed: of the template's noise.
            own: what it keeps of its own beside the entries; None: nothing (as families without
                `ModelFacts.own_stride` do).
        """
        ...

    def anchored_row(self, job: EditJob, plan: OwnPlan) -> AnchoredEditRow:
        """A row whose own dense steps are the anchors of the others (`ModelFacts.own_stride`).

        Args:
            job: best prepared.
            plan: which steps are anchors.
        """
        ...

    def anchored_bytes(self, job: EditJob) -> int:
        """That such a row holds beside what its anchors leave of blocks."""
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
        """A row that computes the template's entries at `anchors`, one per step.

        Args:
            job: whose template and encodings are used.
            anchors: in the order of its steps.
            prompt: the priming prompt.
            noise_seed: of the template's noise.
            kinds: per block, what is kept for its inactive tokens: "h", "kv" or both. What the
                model cannot do without (`end`) is kept besides.
            format: storage format.
        """
        ...

    def low_rank(self, factors: Mapping[str, Factors]) -> LowRankSet:
        """A LoRA on the model's device, from its factors by the diffusers model's layers.

        Raises:
            ValueError: it does not fit the model; in one sentence.
        """
        ...

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        """Have a row's next steps computed with these adapters, and with no others.

        Args:
            row: between two steps.
            job: that it was made of.
            adapters: with their scales; none of these is 0.
        """
        ...

    def control_net(self, model: Any) -> Any:
        """A ControlNet as the family's rows take it.

        Args:
            model: diffusers' own, in eval mode, on the device and in the dtype of the model.

        Raises:
            ValueError: it does not fit the model; in one sentence.
        """
        ...

    def control(self, row: Any, job: EditJob, nets: Mapping[str, Any]) -> None:
        """Have an edit's row add what its ControlNets say.

        Args:
            row: that has taken no step.
            job: that it was made of, with `controls`.
            nets: from `control_net`, by name: all that these name.
        """
        ...

    def opening(self, row: Any, job: EditJob) -> Opening | None:
        """What a ControlNet service is to know of a row that has taken no step; None: no ControlNet
        acts on it. Its nets have the job's controls, in their order.
        """
        ...

    def serve_control(self, row: Any, served: ServedRow) -> None:
        """Have a row add what a service says."""
        ...

    def net_row(self, opening: Opening, nets: Mapping[str, Any]) -> NetRow:
        """A row whose base is elsewhere, as a service holds it.

        Args:
            opening: its numbers on the nets' device and in the model's dtype, ids in host memory.
            nets: from `control_net`, by name.
        """
        ...

    def net_batch(self) -> NetBatch:
        """What runs nets beside such rows."""
        ...

    def step(
        self,
        rows: Sequence[Row],
        plan: Plan | None,
        reads: Sequence[Entry | None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """One model call for rows of this adapter.

        Args:
            rows: of equal `batch_key`.
            plan: how the rows that read entries run each block; None: no row reads any.
            reads: of each row what it reads of its template, None if it computes all its tokens.
                The step waits for each part where it needs it (`Handle.wait`). Not given: each row
                reads what it read before, at first nothing.
            exchange: with the ranks that take this step together: each is told the same and has
                the same rows. None: there are none.

        Raises:
            ValueError: the family, or what a row has, knows no such step.
            EntryLost: a part of an entry will not come; the rows can do without it (`reads`).

        No row has moved if it raises, so that the rows can be tried again one by one.
        """
        ...

    def most_ranks(self, job: EditJob) -> int:
        """How many ranks at most can take steps of this edit by itself together."""
        ...

    def carried(self, row: Any) -> tuple[Any, ...] | None:
        """What `follow` needs of a row between two steps: numbers, and tensors on its device; None:
        the row cannot be brought to another process, which has to begin it anew.
        """
        ...

    def follow(self, row: Any, carried: tuple[Any, ...], steps: int) -> None:
        """Have a row where it was brought elsewhere.

        Args:
            row: of the same edit.
            carried: of the row there; on this device, kept.
            steps: that it has taken there.
        """
        ...

    def session(self) -> AbstractContextManager[object]:
        """What a thread that makes rows and steps them is inside of all the while."""
        ...

    def release(self) -> None:
        """Let go of what was kept of the last step's rows; there is nothing to step."""
        ...
