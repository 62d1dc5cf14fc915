"""Rows: one edit or one template being primed, with all the state between its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_engine.batch.own_anchors import Entry, OwnAnchors, foretold, without_text
from maskserve_engine.batch.packing import FixedTokens, InactiveTokens, RowInput, RowResiduals
from maskserve_engine.batch.skipping import FirstBlockCache
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.entries import AnchorEntry, Recorder
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.mmdit.preparation import (
    FlowBlend,
    FlowStart,
    FlowTemplate,
    model_inputs,
    unpack_latents,
)
from maskserve_engine.families.mmdit.schedule import Schedule, Walk
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.layers.scatter_kv import KvSource


@dataclass(frozen=True, slots=True)
class Negative:
    """A negative prompt: each step also runs the model with it, and is led away from its answer
    (diffusers' true classifier-free guidance).
    """

    text: Tensor
    """[T, width] as `RowInput` has it."""
    pooled: Tensor | None
    scale: float
    """true_cfg_scale, above 1."""
    own: OwnAnchors | None = None
    """Of the second pass, where the row has anchors of its own."""
    cis: Tensor | None = None
    """[T, head_dim / 2] of its text; None: it has as many tokens as the prompt."""
    words: FixedWords | None = None
    """As of `FlowRow`."""


@dataclass(slots=True)
class FixedWords:
    """Text that sees nothing of a row but what stands before it (`packing.FixedTokens`)."""

    embeds: Tensor
    """[T, in] states of a prompt."""
    cis: Tensor
    """[T, head_dim / 2]"""
    seen: tuple[FixedTokens, ...] = ()
    """What it sees."""
    back: Tensor | None = None
    """As of `RowInput`, for whoever sees it."""
    entry: AnchorEntry | None = None
    """Their keys and values; None: not made yet."""

    def __len__(self) -> int:
        return len(self.embeds)

    def source(self, block: int) -> KvSource:
        assert self.entry is not None, "packed before they were made"
        return KvSource(self.entry.blocks[block].part("kv"))


@dataclass(slots=True)
class References:
    """A row's reference pictures where they see nothing of it (`packing.FixedTokens`)."""

    tokens: Tensor
    """[R, 4C] of the pictures."""
    cis: Tensor
    """[R, head_dim / 2]"""
    entry: AnchorEntry | Handle | None = None
    """Their keys and values: the row's own, or the template's; None: not made yet."""
    made: bool = False
    """Whether the row's last step has made them, or words."""
    before: FixedWords | None = None
    """What they see."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sees(self) -> tuple[FixedTokens, ...]:
        return () if self.before is None else (self.before,)

    def source(self, block: int) -> KvSource:
        if isinstance(self.entry, AnchorEntry):
            return KvSource(self.entry.blocks[block].part("kv"))
        assert self.entry is not None, "packed before they were made"
        return KvSource(*self.entry.wait_whole(block, "kv"))


@dataclass(slots=True)
class FlowInactive:
    """A cached row's tokens outside the mask: what stands in for computing them."""

    active: Tensor
    """[n] ids of the computed tokens."""
    index: Tensor
    """[m + R + shown] ids of the others, the context's last but for the shown."""
    outside: FlowTemplate | OwnOutside
    """What a step that computes them takes them for, and what they are in the answer."""
    cis: Tensor
    """[m + R + shown, head_dim / 2]"""
    selection: Selection
    """The same ids, for who brings entries in."""
    shown: int = 0
    """Of these, the last ones, which are text tokens: the first ones of the row's text, as long as
    it reads entries."""


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """`packing.InactiveTokens` of one row, at whatever step it is."""

    row: FlowRow
    inactive: FlowInactive
    own: OwnAnchors | None = None
    """Of the pass, where its own first step lifts the entries."""
    ahead: int | None = None
    """The step where the pass is foreseen; None: it is the next one's own."""

    @property
    def cis(self) -> Tensor:
        return self.inactive.cis

    @property
    def parts(self) -> Sequence[InactiveTokens]:
        return (self,)

    def tokens(self) -> Tensor:
        assert not self.inactive.shown, "of text tokens there are keys and values alone"
        assert self.ahead is None, "a foreseen pass reads keys and values alone"
        return self.inactive.outside.at(self.row.sigma)

    def source(self, block: int, part: str) -> KvSource:
        kv_source = KvSource(*self._handle.wait_whole(block, part))
        if self.own is None or part != "kv":
            return kv_source
        return self.own.lifted(block, kv_source, self._sigma)

    @property
    def entry(self) -> object:
        """Another one at each step, where it is lifted."""
        lifted = self.own is not None and self.own.lifts
        return self._sigma if lifted else self._handle

    @property
    def _sigma(self) -> float:
        row = self.row
        return row.schedule.walk[row.step if self.ahead is None else self.ahead].sigma

    @property
    def _handle(self) -> Handle:
        assert isinstance(self.row.entry, Handle), "packed for a step that reads no entry"
        return self.row.entry


@dataclass(slots=True)
class OwnOutside:
    """The inactive tokens of a row with anchors of its own. Between anchors they go on by the
    velocity that the dense steps foretell; where the pipeline blends, they are the noised source.
    """

    latents: Tensor
    """[m, 4C] behind the last anchor; before the first one those that the edit begins with."""
    condition: Tensor | None
    """[m, extra channels]"""
    blend: FlowBlend | None
    clean: Tensor
    """[m, 4C] the source."""
    context: Tensor | None = None
    """[R, 4C] of the pictures that are only looked at, where the model takes any."""
    ring: int = 0
    """Of the tokens, the first ones, which lie round the mask."""
    velocity: tuple[Tensor, ...] = ()
    """[m, 4C] at the last anchor, and at the one before."""
    times: tuple[float, float] = (0.0, 0.0)
    """By how much sigma each of them has moved the latents since."""

    @classmethod
    def begin(
        cls, start: FlowStart, clean: Tensor, context: Tensor | None = None, *, ring: int = 0
    ) -> OwnOutside:
        """Of a row before its first step; the rest as above."""
        return cls(start.latents, start.condition, start.blend, clean, context, ring)

    @property
    def answer(self) -> Tensor:
        """[m, 4C] what an edit's latents are there: the source, but for its ring."""
        if not self.ring:
            return self.clean
        around = self.now if self.blend is None else self.blend.clean
        return torch.cat((around[: self.ring], self.clean[self.ring :]))

    def at(self, sigma: Tensor, change: float = 0.0) -> Tensor:
        """[m + R, in_channels] model inputs, after a `change` of sigma from now to `sigma` by the
        last velocity.
        """
        if self.blend is not None:
            latents = self.blend.source(sigma)
        else:
            latents = self.now + change * self.velocity[0] if change else self.now
        return model_inputs(latents, self.condition, self.context)

    @property
    def now(self) -> Tensor:
        """[m, 4C] latents as the anchors foretell them, where the pipeline does not blend."""
        latents = self.latents
        for velocity, times in zip(self.velocity, self.times, strict=False):
            latents = latents + times * velocity
        return latents

    def begun(self, latents: Tensor) -> OwnOutside:
        """The same with these latents, [m, 4C], and no anchor behind it."""
        return replace(self, latents=latents, velocity=(), times=(0.0, 0.0))

    def anchored(self, move: Tensor, change: float) -> None:
        """An anchor has moved the latents where they lay."""
        if self.blend is None:
            self.velocity, self.times = (move / change, *self.velocity[:1]), (0.0, 0.0)

    def foreseen(self, velocity: Tensor) -> None:
        """It is [m, 4C] `velocity` that moves them at the anchor ahead; they are where they are."""
        if self.blend is None:
            self.latents, self.times = self.now, (0.0, 0.0)
            self.velocity = (velocity, *self.velocity[:1])

    def passed(self, change: float, weight: float) -> None:
        """A step between anchors has moved the others by so much sigma."""
        last, previous = self.times
        self.times = (last + change * (1.0 + weight), previous - change * weight)


class FlowRing(NamedTuple):
    """The ring round the mask, of a row that reads a template: steps that leave its text out read
    both from its own anchors.
    """

    ids: Tensor
    """[r]"""
    tokens: OwnOutside
    cis: Tensor
    """[r, head_dim / 2]"""


class Foreseen(NamedTuple):
    """An anchor that a row's next step computes beside its own tokens."""

    step: int
    """Where it lies."""
    place: slice
    """Of all its tokens in the batch."""


@dataclass(slots=True)
class FlowRow:
    """One edit inside the running batch."""

    request_id: str
    schedule: Schedule
    grid: tuple[int, int]
    """Tokens down and across."""
    text: Tensor
    """[T, width] after context_embedder."""
    pooled: Tensor | None
    guidance: float | None
    cis: Tensor
    """[T + n, head_dim / 2] of text and computed tokens, a dense row's context among them."""
    latents: Tensor
    """[n, 4C] of the computed tokens; once packed, where they lie in the batch."""
    condition: Tensor | None
    blend: FlowBlend | None
    context: Tensor | None = None
    """[R, 4C] of a dense row: the pictures that are only looked at."""
    references: References | None = None
    """Such pictures where they see nothing of the row."""
    words: FixedWords | None = None
    """Its prompt, where that sees nothing of the row either: `text` is then empty."""
    pads: int = 0
    """Of its text's tokens (`RowInput.pads`)."""
    timeless: bool = False
    """Of its context (`RowInput.timeless`)."""
    negative: Negative | None = None
    first_block: FirstBlockCache | None = None
    """Of a row that may skip blocks."""
    recorded: bool = False
    """Whether its steps may be recorded as CUDA graphs."""
    residuals: RowResiduals | None = None
    adapters: Adapters = ()
    inactive: FlowInactive | None = None
    """None for a dense row."""
    ring: FlowRing | None = None
    """None: its steps compute it as they do the mask's tokens, or it has anchors of its own."""
    own: OwnAnchors | None = None
    """Of its first pass: what its anchors leave; of a row that reads a template, of text and ring,
    and what lifts the entries."""
    entry: Entry | None = None
    """What the next step reads; None: it computes all tokens."""
    frozen: bool = False
    """Whether the next step leaves text and ring out, of a row that reads a template."""
    step: int = 0
    memory: tuple[Tensor, ...] = ()
    """[n, 4C] float32 each, of the computed tokens: what its sampler remembers (`Schedule.moves`);
    none before its first step."""
    next_memory: tuple[Tensor, ...] = ()
    """The same behind the step that is being taken."""
    place: slice = field(default_factory=lambda: slice(0))
    """Of the computed tokens in the batch."""
    moved: Tensor | None = None
    """[n, 4C] by what the last step moved the computed tokens."""
    others: Tensor | None = None
    """[m + R or less, 4C] the inactive tokens, where they were packed beside the computed ones."""
    foreseen: Foreseen | None = None
    """As it was packed."""

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def lacks_references(self) -> bool:
        """Whether its next step needs what its references have not made yet."""
        return self.references is not None and self.references.entry is None

    @property
    def skipped(self) -> int:
        return 0 if self.first_block is None else self.first_block.skipped

    @property
    def sigma(self) -> Tensor:
        return self.schedule.sigmas[self.step]

    @property
    def selection(self) -> Selection | None:
        return None if self.inactive is None else self.inactive.selection

    @property
    def channels(self) -> int:
        """Of its latents as tokens."""
        return self.latents.shape[1]

    def walk(self, begin: int) -> tuple[Walk, ...]:
        """The steps from `begin` on."""
        return self.schedule.walk[begin:]

    @property
    def steady(self) -> int:
        """For how many steps from the next one on the same inputs are packed, but for latents."""
        if self.inactive is not None and self.entry is None:
            return 1  # the tokens pinned to that step are packed, too
        if self._sees or self.foresees is not None:
            return 1  # what sees it is told of that step
        anchors = frozenset[int]() if self.own is None else self.own.plan.computed_at
        return min((a for a in anchors if a > self.step), default=self.steps) - self.step

    @property
    def anchored(self) -> bool:
        """Whether it has anchors of its own, and reads no template."""
        return self.inactive is not None and isinstance(self.inactive.outside, OwnOutside)

    @property
    def anchors(self) -> tuple[OwnAnchors, ...]:
        """What it keeps of its own, of each pass (`own_anchors.AnchoredRow`)."""
        pass_caches = (self.own, None if self.negative is None else self.negative.own)
        return tuple([step_cache for step_cache in pass_caches if step_cache is not None])

    @property
    def keeps_text(self) -> bool:
        """Whether it has what a step reads that leaves the text out."""
        return self.anchored or (self.own is not None and self.own.whole())

    @property
    def _whole_step(self) -> bool:
        """Whether the next step computes what it may leave out between the row's own anchors."""
        return self.entry is None or not (self.anchored or self.frozen)

    @property
    def _sees_text(self) -> bool:
        """Whether the next step keeps its text, of a row that reads a template."""
        step_cache = self.own
        return step_cache is not None and step_cache.text and not self.anchored and self._whole_step

    @property
    def _sees(self) -> bool:
        """Whether the next step of a row that reads a template keeps something."""
        lifts = self.own is not None and self.own.plan.lifts and self.entry is None
        return lifts or self._sees_text

    @property
    def foresees(self) -> int | None:
        """The anchor that the next step is to compute beside its own tokens: the one behind it, if
        the line from the last one ends here; None: none.
        """
        step_cache = self.own
        if (
            step_cache is None
            or not step_cache.plan.foresees
            or self._whole_step
            or self.moved is None
        ):
            return None
        return (
            step_cache.plan.behind(self.step) if step_cache.reaches >= self.walk_sigma() else None
        )

    def model_input(self) -> RowInput:
        return self._input(self.text, self.pooled, self.own, self.cis, self.words)

    def second_input(self) -> RowInput:
        negative = self._negative()
        return self._input(
            negative.text, negative.pooled, negative.own, self._second_cis(), negative.words
        )

    def foreseen_inputs(self) -> list[RowInput]:
        """Of each pass, all tokens as they are foreseen at the anchor that it `foresees`; none
        where it foresees nothing.
        """
        step, step_cache = self.foresees, self.own
        if step is None or step_cache is None:
            return []
        row_inputs = [
            self._foreseen(step, self.text, self.pooled, step_cache, self.cis, self.words)
        ]
        away = self.negative
        if away is not None:
            assert away.own is not None, "both passes have what is their own"
            cis = self._second_cis()
            row_inputs.append(
                self._foreseen(step, away.text, away.pooled, away.own, cis, away.words)
            )
        return row_inputs

    def _foreseen(
        self,
        step: int,
        text: Tensor,
        pooled: Tensor | None,
        own: OwnAnchors,
        cis: Tensor,
        words: FixedWords | None,
    ) -> RowInput:
        """Of one pass; arguments as of `_input`."""
        assert self.inactive is not None
        row_input = self._own_tokens(text, pooled, cis, words, step)
        if not self.anchored:
            row_input = replace(
                self._with_ring(row_input, step), rest=self._cached(self.inactive, own, step)
            )
            return replace(row_input, capture=self._beside(own, row_input, step))
        row_input = self._whole(row_input, self.inactive, step)
        sigma, total = self.schedule.walk[step].sigma, len(row_input.tokens)
        capture = own.anchor(self.step, sigma, self.active, total, reads=True)
        residuals = None if self.residuals is None else self.residuals.ahead
        return replace(row_input, capture=capture, residuals=residuals)

    def _negative(self) -> Negative:
        assert self.negative is not None
        return self.negative

    def _second_cis(self) -> Tensor:
        """[T + n, head_dim / 2] of the second pass."""
        of_text = self._negative().cis
        return self.cis if of_text is None else torch.cat((of_text, self.cis[len(self.text) :]))

    def _input(
        self,
        text: Tensor,
        pooled: Tensor | None,
        own: OwnAnchors | None,
        cis: Tensor,
        words: FixedWords | None,
    ) -> RowInput:
        """Of one pass; `cis` of its text and the computed tokens."""
        inactive = self.inactive
        read = 0 if inactive is None or self.entry is None else inactive.shown
        row_input = self._own_tokens(text[read:], pooled, cis[read:], words, self.step)
        if inactive is None:
            return row_input
        if self.entry is None:
            row_input = self._whole(row_input, inactive, self.step)
        elif own is not None and self.anchored:
            return foretold(row_input, inactive.cis, own, self.walk_sigma)
        else:
            cached_tokens = self._cached(inactive, own)
            if own is not None and not self._whole_step:
                ring = cis[:0] if self.ring is None else self.ring.cis
                return without_text(
                    replace(row_input, rest=cached_tokens), ring, own, self.walk_sigma
                )
            row_input = replace(self._with_ring(row_input, self.step), rest=cached_tokens)
        if own is None or not (self.anchored or self._sees):
            return row_input
        if not self.anchored:
            return replace(row_input, capture=self._beside(own, row_input, self.step))
        capture = own.anchor(self.step, self.walk_sigma(), self.active, len(row_input.tokens))
        return replace(row_input, capture=capture)

    def _cached(
        self, inactive: FlowInactive, own: OwnAnchors | None, ahead: int | None = None
    ) -> CachedTokens:
        """What a pass reads of its template."""
        lifts = own is not None and own.plan.lifts
        return CachedTokens(self, inactive, own if lifts else None, ahead)

    def _beside(self, own: OwnAnchors, made: RowInput, step: int) -> OwnAnchors:
        """What sees a pass, as it is at a step, of a row that reads a template."""
        end = self.active + self._ring_tokens
        cached_count = len(made.tokens) - end if self.entry is None else 0
        around, sigma = slice(self.active, end), self.schedule.walk[step].sigma
        ahead = step != self.step
        return own.beside(self.step, len(made.text), around, cached_count, sigma, reads=ahead)

    def walk_sigma(self) -> float:
        """Of the step that is taken now."""
        return self.schedule.walk[self.step].sigma

    def _own_tokens(
        self, text: Tensor, pooled: Tensor | None, cis: Tensor, words: FixedWords | None, step: int
    ) -> RowInput:
        """The computed tokens of one pass, at a step."""
        latents = self.latents if step == self.step else self._moved_to(step)
        row_input = RowInput(
            model_inputs(latents, self.condition, self.context), text, pooled, self.guidance, cis,
            residuals=self.residuals, pads=self.pads, timeless=self.timeless,
        )  # fmt: skip
        if self.references is not None:
            row_input = replace(row_input, fixed=(*self.references.sees, self.references))
        if self.context is not None:
            row_input = replace(row_input, still=len(self.context))
        if words is None:
            return row_input
        return replace(row_input, fixed=(*row_input.fixed, words), back=words.back)

    @property
    def _ring_tokens(self) -> int:
        return 0 if self.ring is None else len(self.ring.ids)

    def _with_ring(self, made: RowInput, step: int) -> RowInput:
        """The ring, too, as further image tokens, where it is not among the computed ones."""
        if self.ring is None:
            return made
        around = self.ring.tokens.at(self.schedule.sigmas[step], self._change_to(step))
        tokens = torch.cat((made.tokens, around))
        return replace(made, tokens=tokens, cis=torch.cat((made.cis, self.ring.cis)))

    def _whole(self, made: RowInput, inactive: FlowInactive, step: int) -> RowInput:
        """The others, too, as further image tokens."""
        made = self._with_ring(made, step)
        outside_latents, context = self._outside_at(inactive, step), 0
        if inactive.outside.context is not None:
            context = len(inactive.outside.context)
        count = len(inactive.cis) - inactive.shown
        cis = torch.cat((made.cis, inactive.cis[:count]))
        return replace(
            made, tokens=torch.cat((made.tokens, outside_latents)), cis=cis, still=context
        )

    def _outside_at(self, inactive: FlowInactive, step: int) -> Tensor:
        """[m + R, in_channels] the inactive tokens' model inputs at a step."""
        outside, sigma = inactive.outside, self.schedule.sigmas[step]
        if isinstance(outside, OwnOutside):
            return outside.at(sigma, self._change_to(step))
        return outside.at(sigma)

    def _change_to(self, step: int) -> float:
        """Of sigma, from the next step to one behind it."""
        return sum(walk.change for walk in self.schedule.walk[self.step : step])

    def _moved_to(self, step: int) -> Tensor:
        """[n, 4C] latents of the computed tokens at a step behind the next one, if the model goes
        on as it has answered last.
        """
        assert self.moved is not None, "no step was taken yet"
        last = self.schedule.walk[self.step - 1].change
        latents = self.latents + self.moved * (self._change_to(step) / last)
        if self.blend is None:
            return latents
        return self.blend.apply(latents, self.schedule.sigmas[step], step, self.steps)

    def all_tokens(self, foreseen: int | None = None) -> RowInput:
        """All its tokens, those first that its steps compute, whatever it reads.

        Args:
            foreseen: the step where they are foreseen; None: at the next one.
        """
        step = self.step if foreseen is None else foreseen
        row_input = self._own_tokens(self.text, self.pooled, self.cis, None, step)
        return row_input if self.inactive is None else self._whole(row_input, self.inactive, step)

    @property
    def computed(self) -> int:
        """Of its image tokens, those that the next step computes."""
        inactive, row_tokens = self.inactive, len(self.latents)
        if inactive is None:
            return row_tokens
        if self.entry is not None:
            return row_tokens if self.frozen else row_tokens + self._ring_tokens
        return row_tokens + self._ring_tokens + len(inactive.index) - inactive.shown

    @property
    def active(self) -> int:
        """Of its image tokens, those that steps compute which read something; 0: none does."""
        return 0 if self.inactive is None else len(self.latents)

    def settle(self, latents: Tensor, begin: int) -> None:
        """Have the latents where they were packed.

        Args:
            latents: [n or all, 4C] the row's part of the batch, the computed tokens first; kept.
            begin: where that part begins.
        """
        computed = len(self.latents)
        self.latents, self.place = latents[:computed], slice(begin, begin + computed)
        self.others, self.foreseen = latents[computed:], None

    def steer(self, velocity: Tensor) -> None:
        """Have the model's answer be what takes the row's latents where its sampler's step does.
        Tokens that only some of its steps compute go on by the model's own.

        Args:
            velocity: [N, 4C] of the whole batch, guided; written to.
        """
        row_velocity, latents = velocity[self.place], self.latents.float()
        move = self.schedule.moves[self.step]
        memory = self.memory or (torch.zeros_like(latents),) * (len(move) - 1)
        moved, *memory_after = [
            _combined(row, (latents, *memory, row_velocity.float())) for row in move
        ]
        self.next_memory = tuple(memory_after)
        row_velocity.copy_(moved.sub_(latents).div_(self.schedule.walk[self.step].change))

    @property
    def blends(self) -> bool:
        """Whether `blend_in` does anything."""
        return self.blend is not None

    def blend_in(self, moved: Tensor) -> None:
        """Inpaint semantics, after the sampler's step and before it is booked.

        Args:
            moved: [n or all, 4C] the computed tokens first; written to.
        """
        if self.blend is not None:
            computed, next_step = moved[: len(self.latents)], self.step + 1
            sigma = self.schedule.sigmas[next_step]
            computed.copy_(self.blend.apply(computed, sigma, next_step, self.steps))

    def advance(self, moves: Tensor) -> None:
        """Book a step that was taken.

        Args:
            moves: [N, 4C] of the whole batch: model's velocity times change of sigma; kept.
        """
        self.moved, self.memory = moves[self.place], self.next_memory
        if self.own is not None and self.inactive is not None:
            self._go_on(self.own, moves)
        self.step += 1

    def _go_on(self, own: OwnAnchors, moves: Tensor) -> None:
        """Book what a step means for the row's own anchors, and for what is left out between."""
        walk, ahead = self.schedule.walk[self.step], self.foreseen
        if ahead is not None:
            self._passed(self.schedule.walk[ahead.step].sigma)
        elif self._whole_step and (own.text or self.anchored):
            self._passed(walk.sigma)
        left_out = self._left_out
        if left_out is None:
            return
        count = len(left_out.clean)
        if self._whole_step:
            assert self.others is not None, "a step is taken of rows that were packed"
            begin = self.place.stop
            left_out.latents = self.others[:count]
            left_out.anchored(moves[begin : begin + count], walk.change)
            return
        if ahead is not None:
            begin = ahead.place.start + len(self.latents)
            left_out.foreseen(moves[begin : begin + count])
        left_out.passed(walk.change, own.weight(walk.sigma))

    @property
    def _left_out(self) -> OwnOutside | None:
        """Image tokens that only some of its steps compute, of which it keeps something."""
        if self.ring is not None:
            return self.ring.tokens
        outside = None if self.inactive is None else self.inactive.outside
        return outside if isinstance(outside, OwnOutside) else None

    def _passed(self, sigma: float) -> None:
        """An anchor at `sigma` is whole, in each of its passes."""
        for step_cache in self.anchors:
            step_cache.passed(sigma)

    def latents_ahead(self) -> Tensor | None:
        """[gh·gw, 4C] of all tokens, the computed ones first, after the next step, if the model
        then answers what it has answered last; None: it has not, or there is no step after it.
        """
        next_step = self.step + 1
        if self.moved is None or next_step >= self.steps:
            return None
        latents = self._moved_to(next_step)
        if self.inactive is None:
            return latents
        outside_latents = self.inactive.outside.at(self.schedule.sigmas[next_step])
        return torch.cat((latents, outside_latents[:, : self.channels]))

    def estimate(self) -> HostCopy:
        """[C, h, w] latents as the last step's velocity would finish them."""
        assert self.moved is not None, "no step was taken yet"
        share = self.sigma / self.schedule.walk[self.step - 1].change
        return self._image(self.latents.float() - share * self.moved.float(), ended=False)

    def result(self) -> HostCopy:
        """[C, h, w] latents."""
        return self._image(self.latents, ended=True)

    def _image(self, computed: Tensor, *, ended: bool) -> HostCopy:
        tokens = computed
        if self.inactive is not None:
            tokens = computed.new_empty(self.grid[0] * self.grid[1], computed.shape[1])
            tokens[self.inactive.active] = computed
            outside_parts = [(self.inactive.index, self.inactive.outside)]
            outside_parts += [] if self.ring is None else [(self.ring.ids, self.ring.tokens)]
            for ids, outside in outside_parts:
                answer = outside.clean
                if ended and isinstance(outside, OwnOutside):
                    answer = outside.answer
                tokens[ids[: len(answer)]] = answer.to(computed.dtype)
        return HostCopy(unpack_latents(tokens, self.grid).float())


def _combined(factors: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Their sum by these factors, in memory of its own."""
    total = torch.zeros_like(tensors[0])
    for factor, tensor in zip(factors, tensors, strict=True):
        if factor:
            total.add_(tensor, alpha=factor)
    return total


@dataclass(slots=True)
class FlowPrimingRow:
    """A template whose entries are computed, one anchor per step; of STILL those of its references
    alone.
    """

    request_id: str
    template: FlowTemplate
    anchors: tuple[Anchor, ...]
    sigmas: Tensor
    """[anchors] float32, theirs."""
    text: Tensor
    embeds: Tensor
    """[T, in] what `text` was made of."""
    pooled: Tensor | None
    guidance: float | None
    cis: Tensor
    kinds: Sequence[frozenset[str]]
    """Per block, what is kept: any of "h" and "kv"."""
    format: str
    references: References | None = None
    """Pictures that see nothing of a row, where the model takes any."""
    pads: int = 0
    """As of `FlowRow`."""
    shown: int = 0
    """Text tokens whose keys and values are recorded, the first ones."""
    timeless: bool = False
    """As of `FlowRow`."""
    step: int = 0
    done: list[AnchorEntry] = field(default_factory=list)
    recorder: Recorder | None = None
    negative: None = None
    words: None = None
    first_block: None = None
    recorded: bool = False
    entry: Entry | None = None
    """Always None: it computes every token."""
    adapters: Adapters = ()

    @classmethod
    def of_references(cls, row: Row, blocks: int) -> FlowPrimingRow:
        """What makes a row's references for itself, in the model's own format."""
        references = row.references
        assert references is not None, "a row without references lacks none"
        template, kinds = (
            FlowTemplate(references.tokens, references.tokens, None),
            (frozenset({"kv"}),) * blocks,
        )
        return cls(
            row.request_id, template, (STILL,), references.tokens.new_zeros(1), row.text, row.text,
            None, None, references.cis, kinds, "model", references, adapters=row.adapters,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return len(self.anchors)

    @property
    def lacks_references(self) -> bool:
        """As of `FlowRow`."""
        references = self.references
        return (
            references is not None and references.entry is None and self.anchors[self.step] != STILL
        )

    def take_entry(self) -> AnchorEntry:
        return self.done.pop()

    @property
    def channels(self) -> int:
        """Of its latents as tokens."""
        return self.template.clean.shape[1]

    def walk(self, begin: int) -> tuple[Walk, ...]:
        """The anchors from `begin` on: priming takes no step of the sampler."""
        return tuple(Walk(a.timestep, a.sigma, 0.0) for a in self.anchors[begin:])

    @property
    def steady(self) -> int:
        """Each anchor has tokens of its own."""
        return 1

    def second_input(self) -> RowInput:
        raise AssertionError("priming takes one pass")

    def model_input(self) -> RowInput:
        references = self.references
        if references is not None and self.anchors[self.step] == STILL:
            self.recorder = Recorder((frozenset({"kv"}),) * len(self.kinds), self.format)
            return RowInput(
                references.tokens, self.text[:0], None, None, references.cis, capture=self.recorder,
                fixed=references.sees,
            )  # fmt: skip
        tokens = self.template.at(self.sigmas[self.step])
        words = len(self.text) - self.shown
        self.recorder = Recorder(self.kinds, self.format, shown=self.shown, words=words)
        context = self.template.context
        row_input = RowInput(
            tokens, self.text, self.pooled, self.guidance, self.cis, capture=self.recorder,
            pads=self.pads, still=0 if context is None else len(context), timeless=self.timeless,
        )  # fmt: skip
        return (
            row_input
            if references is None
            else replace(row_input, fixed=(*references.sees, references))
        )

    def settle(self, latents: Tensor, begin: int) -> None:
        """Priming moves nothing."""

    @property
    def blends(self) -> bool:
        """Priming takes no step of the sampler."""
        return False

    def blend_in(self, moved: Tensor) -> None:
        """Nothing is blended."""

    def advance(self, moves: Tensor) -> None:
        """Keep what was recorded; nothing has moved."""
        assert self.recorder is not None
        entry = self.recorder.entry(self.anchors[self.step])
        if self.references is not None and entry.anchor == STILL:
            self.references.entry = entry
        self.done.append(entry)
        self.recorder = None
        self.step += 1


Row = FlowRow | FlowPrimingRow
