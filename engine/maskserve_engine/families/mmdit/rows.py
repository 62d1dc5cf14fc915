"""Rows: an edit, or a template being primed, with its state between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_engine.batch.packing import RowInput, RowResiduals, TokenCache
from maskserve_engine.batch.skipping import FirstBlockCache
from maskserve_engine.batch.step_cache import (
    Entry,
    StepCache,
    input_between_refreshes,
)
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


@dataclass(slots=True)
class FixedWords:
    """Prompt tokens that depend only on the tokens before them, not on the row
    (`RowInput.fixed`).
    """

    embeds: Tensor
    """[T, in] states of the prompt."""
    cis: Tensor
    pictures: tuple[TokenCache, ...] = ()
    back: Tensor | None = None
    """`RowInput.back` of the tokens that attend to the prompt."""
    entry: AnchorEntry | None = None
    """Keys and values; None until they are computed."""

    def __len__(self) -> int:
        return len(self.embeds)

    def source(self, block: int, part: str = "kv") -> KvSource:
        assert self.entry is not None, "packed before they were made"
        return KvSource(self.entry.blocks[block].part(part))


@dataclass(slots=True)
class PromptPass:
    """One pass of each step over the model: its prompt, and the step cache that it fills."""

    text: Tensor
    """[T, width] after context_embedder."""
    cis: Tensor
    """[T, head_dim / 2] rotary factors of the text."""
    pooled: Tensor | None
    guidance: float | None = None
    """Embedded guidance scale."""
    pads: int = 0
    """See `RowInput.pads`."""
    timeless: bool = False
    """See `RowInput.timeless`."""
    words: FixedWords | None = None
    """Prompt that does not depend on the row; `text` is then empty."""
    cache: StepCache | None = None
    """In a row with a template it keeps text and ring, and the residual correction."""
    scale: float = 1.0
    """Scale of a negative prompt in true classifier-free guidance (diffusers)."""


@dataclass(slots=True)
class References:
    """Reference pictures that do not depend on the row (`RowInput.fixed`)."""

    tokens: Tensor
    """[R, 4C] tokens of the pictures."""
    cis: Tensor
    entry: AnchorEntry | Handle | None = None
    """Keys and values, computed by the row or read from the template; None until then."""
    computed: bool = False
    """Whether the row's last step computed these keys and values, or those of `before`."""
    before: FixedWords | None = None
    """Prompt tokens before the references, which they attend to."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sees(self) -> tuple[TokenCache, ...]:
        return () if self.before is None else (self.before,)

    def source(self, block: int, part: str = "kv") -> KvSource:
        if isinstance(self.entry, AnchorEntry):
            return KvSource(self.entry.blocks[block].part(part))
        assert self.entry is not None, "packed before they were made"
        return KvSource(*self.entry.wait_whole(block, part))


@dataclass(slots=True)
class FlowInactive:
    """The cached tokens of a row, and its computed tokens' ids."""

    active: Tensor
    """[n] ids of the computed tokens."""
    index: Tensor
    """[m + R + shown] ids of the cached tokens: image, context, then shown tokens."""
    outside: FlowTemplate | ExtrapolatedOutside
    """Latents of these tokens, for dense steps and for the result."""
    cis: Tensor
    """[m + R + shown, head_dim / 2] rotary factors."""
    selection: Selection
    """The same ids, for loading entries."""
    picture_words: int = 0
    """Number of shown tokens. In the row's text they come first, and steps that read entries leave
    them out."""


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """`packing.CachedTokens` that a row reads from its template, at the row's present step."""

    row: FlowRow
    inactive: FlowInactive
    step_cache: StepCache | None = None
    """Step cache of the pass, if it adds a residual correction to the entries."""
    lookahead: int | None = None
    """Refresh step of a lookahead pass; None: the pass belongs to the row's next step."""

    def __len__(self) -> int:
        return len(self.inactive.cis)

    @property
    def cis(self) -> Tensor:
        return self.inactive.cis

    def tokens(self) -> Tensor:
        assert not self.inactive.picture_words, "of text tokens there are keys and values alone"
        assert self.lookahead is None, "a lookahead pass reads only keys and values"
        return self.inactive.outside.at(self.row.sigma)

    def source(self, block: int, part: str = "kv") -> KvSource:
        kv_source = KvSource(*self._handle.wait_whole(block, part))
        if self.step_cache is None or part != "kv":
            return kv_source
        return self.step_cache.lifted(block, kv_source, self._sigma)

    @property
    def entry(self) -> object:
        """A different object at each step if entries get a residual correction."""
        lifted = self.step_cache is not None and self.step_cache.corrects_residuals
        return self._sigma if lifted else self._handle

    @property
    def _sigma(self) -> float:
        row = self.row
        return row.schedule.walk[row.step if self.lookahead is None else self.lookahead].sigma

    @property
    def _handle(self) -> Handle:
        assert isinstance(self.row.entry, Handle), "packed for a step that reads no entry"
        return self.row.entry


@dataclass(slots=True)
class ExtrapolatedOutside:
    """The cached tokens of a row with refresh steps. Between refresh steps they move by the
    extrapolated velocity; if the pipeline blends, they are the noised source.
    """

    latents: Tensor
    """[m, 4C] latents after the last refresh step; before the first one the initial latents."""
    condition: Tensor | None
    """[m, extra channels]"""
    blend: FlowBlend | None
    clean: Tensor
    """[m, 4C] latents of the source."""
    context: Tensor | None = None
    """[R, 4C] context tokens: reference pictures, if the model takes any."""
    ring: int = 0
    velocity: tuple[Tensor, ...] = ()
    """[m, 4C] velocity at the last refresh step, and at the one before."""
    times: tuple[float, float] = (0.0, 0.0)
    """Change of sigma that each velocity has been applied for since then."""

    @classmethod
    def begin(
        cls, start: FlowStart, clean: Tensor, context: Tensor | None = None, *, ring: int = 0
    ) -> ExtrapolatedOutside:
        """Return the tokens of a row before its first step; the first `ring` of them are the
        ring.
        """
        return cls(start.latents, start.condition, start.blend, clean, context, ring)

    @property
    def answer(self) -> Tensor:
        """[m, 4C] latents in the edit's result: the source, except for the ring."""
        if not self.ring:
            return self.clean
        around = self.latents_now if self.blend is None else self.blend.clean
        return torch.cat((around[: self.ring], self.clean[self.ring :]))

    def at(self, sigma: Tensor, change: float = 0.0) -> Tensor:
        """Return [m + R, in_channels] model inputs at `sigma`, which is `change` away from the
        present sigma.
        """
        if self.blend is not None:
            latents = self.blend.source(sigma)
        else:
            latents = self.latents_now + change * self.velocity[0] if change else self.latents_now
        return model_inputs(latents, self.condition, self.context)

    @property
    def latents_now(self) -> Tensor:
        """[m, 4C] extrapolated latents, if the pipeline does not blend."""
        latents = self.latents
        for velocity, times in zip(self.velocity, self.times, strict=False):
            latents = latents + times * velocity
        return latents

    def begun(self, latents: Tensor) -> ExtrapolatedOutside:
        """Return the same tokens with latents [m, 4C], before any refresh step."""
        return replace(self, latents=latents, velocity=(), times=(0.0, 0.0))

    def anchored(self, move: Tensor, change: float) -> None:
        """Record the velocity of a refresh step, from the `move` of the latents."""
        if self.blend is None:
            self.velocity, self.times = (move / change, *self.velocity[:1]), (0.0, 0.0)

    def lookahead(self, velocity: Tensor) -> None:
        """Record the [m, 4C] velocity of a refresh step computed ahead, and keep the present
        latents.
        """
        if self.blend is None:
            self.latents, self.times = self.latents_now, (0.0, 0.0)
            self.velocity = (velocity, *self.velocity[:1])

    def passed(self, change: float, weight: float) -> None:
        """Move the tokens by the sigma `change` of a step between refresh steps."""
        last, previous = self.times
        self.times = (last + change * (1.0 + weight), previous - change * weight)


class FlowRing(NamedTuple):
    """The ring round the mask of a row with a template. Steps that leave the text out read text and
    ring from the step cache.
    """

    ids: Tensor
    """[r]"""
    tokens: ExtrapolatedOutside
    cis: Tensor
    """[r, head_dim / 2]"""


class Lookahead(NamedTuple):
    """A refresh step that a row's next step computes beside its own tokens."""

    step: int
    place: slice


class PackedTokens(NamedTuple):
    """A row's tokens in the batch that packed it last."""

    place: slice
    """Place of the computed tokens."""
    cached: Tensor
    """[m + R or less, 4C] latents of the cached tokens, packed beside the computed ones."""
    lookahead: Lookahead | None = None


@dataclass(slots=True)
class SamplerState:
    """State of a sampler between steps."""

    moved: Tensor | None = None
    """[n, 4C] change of the computed tokens in the last step; None: no step was taken."""
    memory: tuple[Tensor, ...] = ()
    """[n, 4C] tensors of a multistep sampler."""
    next_memory: tuple[Tensor, ...] = ()
    """Memory after the step under way."""


@dataclass(slots=True)
class FlowRow:
    """One edit inside the running batch."""

    request_id: str
    schedule: Schedule
    grid: tuple[int, int]
    prompt: PromptPass
    negative: PromptPass | None
    cis: Tensor
    """[n, head_dim / 2] rotary factors of the computed tokens; in a dense row with the context."""
    latents: Tensor
    """[n, 4C] of the computed tokens; once packed, a view of the batch."""
    condition: Tensor | None
    blend: FlowBlend | None
    context: Tensor | None = None
    """[R, 4C] reference pictures of a dense row."""
    references: References | None = None
    """Reference pictures that do not depend on the row."""
    first_block: FirstBlockCache | None = None
    recorded: bool = False
    residuals: RowResiduals | None = None
    adapters: Adapters = ()
    inactive: FlowInactive | None = None
    ring: FlowRing | None = None
    """None: all steps compute the ring, or the row reads no template."""
    entry: Entry | None = None
    """Entry that the next step reads; None: it computes all tokens."""
    frozen: bool = False
    """Whether the next step of a row with a template leaves out text and ring."""
    step: int = 0
    sampler: SamplerState = field(default_factory=SamplerState)
    packed: PackedTokens | None = None

    @property
    def steps(self) -> int:
        return self.schedule.steps

    @property
    def needs_references(self) -> bool:
        """Whether its next step needs keys and values of references that are not computed yet."""
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
        return self.latents.shape[1]

    def walk(self, begin: int) -> tuple[Walk, ...]:
        return self.schedule.walk[begin:]

    @property
    def steady(self) -> int:
        """Number of steps, from the next one on, whose packed inputs differ only in latents."""
        if self.inactive is not None and self.entry is None:
            return 1  # it packs tokens that other steps do not compute
        if self.fills_step_cache or self.lookahead_step is not None:
            return 1  # the capture is prepared for that step
        anchors = frozenset[int]() if self.step_cache is None else self.step_cache.plan.computed_at
        return min((a for a in anchors if a > self.step), default=self.steps) - self.step

    @property
    def anchored(self) -> bool:
        """Whether the row has refresh steps and reads no template."""
        return self.inactive is not None and isinstance(self.inactive.outside, ExtrapolatedOutside)

    @property
    def step_cache(self) -> StepCache | None:
        """Step cache of the first pass; the second pass has one if this has."""
        return self.prompt.cache

    @property
    def passes(self) -> tuple[PromptPass, ...]:
        return (self.prompt,) if self.negative is None else (self.prompt, self.negative)

    @property
    def anchors(self) -> tuple[StepCache, ...]:
        return tuple([prompt.cache for prompt in self.passes if prompt.cache is not None])

    @property
    def keeps_text(self) -> bool:
        """Whether its step caches can serve a step that does not compute the text."""
        return self.anchored or (self.step_cache is not None and self.step_cache.whole())

    @property
    def reads_step_cache(self) -> bool:
        """Whether the next step reads the step cache, in place of computing all tokens that only
        refresh steps compute.
        """
        return self.entry is not None and (self.anchored or self.frozen)

    @property
    def fills_step_cache(self) -> bool:
        """Whether the next step is a refresh step, or one whose residuals correct the entries."""
        cache = self.step_cache
        if cache is None or self.reads_step_cache:
            return False
        corrects = cache.plan.corrects_residuals and self.entry is None
        return self.anchored or cache.text or corrects

    @property
    def lookahead_step(self) -> int | None:
        """Refresh step that the next step computes ahead: the first one after it, once the row has
        arrived at the last one in its step cache. None: there is none.
        """
        step_cache = self.step_cache
        if (
            step_cache is None
            or not step_cache.plan.looks_ahead
            or not self.reads_step_cache
            or self.sampler.moved is None
        ):
            return None
        return (
            step_cache.plan.next_refresh(self.step)
            if step_cache.reaches >= self.walk_sigma()
            else None
        )

    def model_input(self) -> RowInput:
        return self._input(self.prompt)

    def second_input(self) -> RowInput:
        assert self.negative is not None
        return self._input(self.negative)

    def lookahead_inputs(self) -> list[RowInput]:
        """Return the inputs of the lookahead's passes; empty if the next step has no lookahead."""
        step = self.lookahead_step
        return (
            [] if step is None else [self._lookahead_input(prompt, step) for prompt in self.passes]
        )

    def _lookahead_input(self, prompt: PromptPass, step: int) -> RowInput:
        """Return the input of one lookahead pass at refresh step `step`; see `_input`."""
        inactive, cache = self.inactive, prompt.cache
        assert inactive is not None
        assert cache is not None, "both passes fill a step cache"
        row_input = self._image_tokens(prompt, step)
        if not self.anchored:
            row_input = replace(
                self._with_ring(row_input, step), cached=(self._cached(inactive, cache, step),)
            )
            return replace(row_input, capture=self._cache_with_template(cache, row_input, step))
        row_input = self._whole(row_input, inactive, step)
        sigma, total = self.schedule.walk[step].sigma, len(row_input.tokens)
        capture = cache.anchor(self.step, sigma, self.active, total, reads=True)
        residuals = None if self.residuals is None else self.residuals.for_lookahead
        return replace(row_input, capture=capture, residuals=residuals)

    def _input(self, prompt: PromptPass) -> RowInput:
        """Return the input of one pass."""
        inactive, cache = self.inactive, prompt.cache
        read = 0 if inactive is None or self.entry is None else inactive.picture_words
        row_input = self._image_tokens(prompt, self.step, first_word=read)
        if inactive is None:
            return row_input
        if self.entry is None:
            row_input = self._whole(row_input, inactive, self.step)
        elif cache is not None and self.anchored:
            return input_between_refreshes(row_input, inactive.cis, cache, self.walk_sigma)
        else:
            row_input = replace(row_input, cached=(self._cached(inactive, cache),))
            if cache is not None and self.reads_step_cache:
                ring = self.cis[:0] if self.ring is None else self.ring.cis
                return input_between_refreshes(row_input, ring, cache, self.walk_sigma)
            row_input = self._with_ring(row_input, self.step)
        if cache is None or not self.fills_step_cache:
            return row_input
        if not self.anchored:
            return replace(
                row_input, capture=self._cache_with_template(cache, row_input, self.step)
            )
        capture = cache.anchor(self.step, self.walk_sigma(), self.active, len(row_input.tokens))
        return replace(row_input, capture=capture)

    def _cached(
        self, inactive: FlowInactive, cache: StepCache | None, lookahead: int | None = None
    ) -> TemplateTokens:
        lifts = cache is not None and cache.plan.corrects_residuals
        return TemplateTokens(self, inactive, cache if lifts else None, lookahead)

    def _cache_with_template(self, cache: StepCache, row_input: RowInput, step: int) -> StepCache:
        end = self.active + self._ring_tokens
        cached_count = len(row_input.tokens) - end if self.entry is None else 0
        around, sigma = slice(self.active, end), self.schedule.walk[step].sigma
        ahead = step != self.step
        return cache.begin_with_template(
            self.step, len(row_input.text), around, cached_count, sigma, reads=ahead
        )

    def walk_sigma(self) -> float:
        return self.schedule.walk[self.step].sigma

    def _image_tokens(self, prompt: PromptPass, step: int, *, first_word: int = 0) -> RowInput:
        """Return the input of the prompt's text, from `first_word` on, and the computed tokens."""
        latents = self.latents if step == self.step else self._moved_to(step)
        row_input = RowInput(
            model_inputs(latents, self.condition, self.context),
            prompt.text[first_word:],
            prompt.pooled,
            prompt.guidance,
            torch.cat((prompt.cis[first_word:], self.cis)),
            residuals=self.residuals,
            pads=prompt.pads,
            timeless=prompt.timeless,
        )
        if self.references is not None:
            row_input = replace(row_input, fixed=(*self.references.sees, self.references))
        if self.context is not None:
            row_input = replace(row_input, still=len(self.context))
        words = prompt.words
        if words is None:
            return row_input
        return replace(row_input, fixed=(*row_input.fixed, words), back=words.back)

    @property
    def _ring_tokens(self) -> int:
        return 0 if self.ring is None else len(self.ring.ids)

    def _with_ring(self, row_input: RowInput, step: int) -> RowInput:
        """Append the ring as image tokens, unless it is among the computed ones."""
        if self.ring is None:
            return row_input
        around = self.ring.tokens.at(self.schedule.sigmas[step], self._change_to(step))
        tokens = torch.cat((row_input.tokens, around))
        return replace(row_input, tokens=tokens, cis=torch.cat((row_input.cis, self.ring.cis)))

    def _whole(self, row_input: RowInput, inactive: FlowInactive, step: int) -> RowInput:
        row_input = self._with_ring(row_input, step)
        outside_latents, context = self._outside_at(inactive, step), 0
        if inactive.outside.context is not None:
            context = len(inactive.outside.context)
        count = len(inactive.cis) - inactive.picture_words
        cis = torch.cat((row_input.cis, inactive.cis[:count]))
        return replace(
            row_input, tokens=torch.cat((row_input.tokens, outside_latents)), cis=cis, still=context
        )

    def _outside_at(self, inactive: FlowInactive, step: int) -> Tensor:
        """Return [m + R, in_channels] model inputs of the cached tokens at a step."""
        outside, sigma = inactive.outside, self.schedule.sigmas[step]
        if isinstance(outside, ExtrapolatedOutside):
            return outside.at(sigma, self._change_to(step))
        return outside.at(sigma)

    def _change_to(self, step: int) -> float:
        return sum(walk.change for walk in self.schedule.walk[self.step : step])

    def _moved_to(self, step: int) -> Tensor:
        """Return [n, 4C] latents of the computed tokens at a later step, if the model's last answer
        holds until then.
        """
        moved = self.sampler.moved
        assert moved is not None, "no step was taken yet"
        last = self.schedule.walk[self.step - 1].change
        latents = self.latents + moved * (self._change_to(step) / last)
        if self.blend is None:
            return latents
        return self.blend.apply(latents, self.schedule.sigmas[step], step, self.steps)

    def all_tokens(self, lookahead: int | None = None) -> RowInput:
        """Return the input of all tokens, the computed ones first: at the next step, or as
        predicted for the later step `lookahead`.
        """
        step = self.step if lookahead is None else lookahead
        row_input = self._image_tokens(replace(self.prompt, words=None), step)
        return row_input if self.inactive is None else self._whole(row_input, self.inactive, step)

    @property
    def computed(self) -> int:
        inactive, row_tokens = self.inactive, len(self.latents)
        if inactive is None:
            return row_tokens
        if self.entry is not None:
            return row_tokens if self.frozen else row_tokens + self._ring_tokens
        return row_tokens + self._ring_tokens + len(inactive.index) - inactive.picture_words

    @property
    def active(self) -> int:
        """Number of image tokens computed by steps that read entries or the step cache; 0: all
        steps are dense.
        """
        return 0 if self.inactive is None else len(self.latents)

    def settle(self, latents: Tensor, begin: int) -> None:
        """Replace the latents by their view [n or all, 4C] in the batch, the computed tokens
        first.
        """
        computed = len(self.latents)
        self.latents = latents[:computed]
        self.packed = PackedTokens(slice(begin, begin + computed), latents[computed:])

    def settle_lookahead(self, place: slice) -> None:
        """Note where the first pass of the next step's lookahead was packed."""
        assert self.packed is not None
        assert self.lookahead_step is not None
        self.packed = self.packed._replace(lookahead=Lookahead(self.lookahead_step, place))

    @property
    def lookahead(self) -> Lookahead | None:
        """Lookahead of the next step, as it was packed."""
        return None if self.packed is None else self.packed.lookahead

    def steer(self, velocity: Tensor) -> None:
        """Replace the model's answer, [N, 4C] of the whole batch, by the velocity that takes the
        latents where the multistep sampler takes them. Tokens that only some steps compute keep the
        model's velocity.
        """
        assert self.packed is not None
        row_velocity, latents = velocity[self.packed.place], self.latents.float()
        move = self.schedule.moves[self.step]
        memory = self.sampler.memory or (torch.zeros_like(latents),) * (len(move) - 1)
        moved, *memory_after = [
            _combined(row, (latents, *memory, row_velocity.float())) for row in move
        ]
        self.sampler.next_memory = tuple(memory_after)
        row_velocity.copy_(moved.sub_(latents).div_(self.schedule.walk[self.step].change))

    @property
    def blends(self) -> bool:
        return self.blend is not None

    def blend_in(self, moved: Tensor) -> None:
        """Apply Inpaint's blend to [n or all, 4C] `moved`, between the sampler's step and
        `advance`.
        """
        if self.blend is not None:
            computed, next_step = moved[: len(self.latents)], self.step + 1
            sigma = self.schedule.sigmas[next_step]
            computed.copy_(self.blend.apply(computed, sigma, next_step, self.steps))

    def advance(self, moves: Tensor) -> None:
        """Record a step; `moves`, [N, 4C] of the whole batch, are velocity times change of
        sigma.
        """
        assert self.packed is not None
        sampler = self.sampler
        sampler.moved, sampler.memory = moves[self.packed.place], sampler.next_memory
        if self.step_cache is not None and self.inactive is not None:
            self._go_on(self.step_cache, self.packed, moves)
        self.step += 1

    def _go_on(self, cache: StepCache, packed: PackedTokens, moves: Tensor) -> None:
        """Update step caches, and move the tokens that the step left out."""
        walk, ahead = self.schedule.walk[self.step], packed.lookahead
        if ahead is not None:
            self._passed(self.schedule.walk[ahead.step].sigma)
        elif not self.reads_step_cache and (cache.text or self.anchored):
            self._passed(walk.sigma)
        left_out = self._left_out
        if left_out is None:
            return
        count = len(left_out.clean)
        if not self.reads_step_cache:
            begin = packed.place.stop
            left_out.latents = packed.cached[:count]
            left_out.anchored(moves[begin : begin + count], walk.change)
            return
        if ahead is not None:
            begin = ahead.place.start + len(self.latents)
            left_out.lookahead(moves[begin : begin + count])
        left_out.passed(walk.change, cache.weight(walk.sigma))

    @property
    def _left_out(self) -> ExtrapolatedOutside | None:
        """Image tokens that only some steps compute and whose latents the row keeps."""
        if self.ring is not None:
            return self.ring.tokens
        outside = None if self.inactive is None else self.inactive.outside
        return outside if isinstance(outside, ExtrapolatedOutside) else None

    def _passed(self, sigma: float) -> None:
        for step_cache in self.anchors:
            step_cache.passed(sigma)

    def extrapolated_latents(self) -> Tensor | None:
        """Return [gh·gw, 4C] of all tokens after the next step, the computed ones first, if the
        model's last answer holds; None: no answer yet, or no further step.
        """
        next_step = self.step + 1
        if self.sampler.moved is None or next_step >= self.steps:
            return None
        latents = self._moved_to(next_step)
        if self.inactive is None:
            return latents
        outside_latents = self.inactive.outside.at(self.schedule.sigmas[next_step])
        return torch.cat((latents, outside_latents[:, : self.channels]))

    def estimate(self) -> HostCopy:
        """Return [C, h, w] final latents by the last step's velocity."""
        moved = self.sampler.moved
        assert moved is not None, "no step was taken yet"
        share = self.sigma / self.schedule.walk[self.step - 1].change
        return self._image(self.latents.float() - share * moved.float(), ended=False)

    def result(self) -> HostCopy:
        """Return [C, h, w] latents."""
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
                if ended and isinstance(outside, ExtrapolatedOutside):
                    answer = outside.answer
                tokens[ids[: len(answer)]] = answer.to(computed.dtype)
        return HostCopy(unpack_latents(tokens, self.grid).float())


def _combined(factors: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for factor, tensor in zip(factors, tensors, strict=True):
        if factor:
            total.add_(tensor, alpha=factor)
    return total


@dataclass(slots=True)
class FlowPrimingRow:
    """A template being primed, one anchor per step; the STILL anchor computes only its
    references.
    """

    request_id: str
    template: FlowTemplate
    anchors: tuple[Anchor, ...]
    sigmas: Tensor
    """[anchors] sigmas, float32."""
    prompt: PromptPass
    embeds: Tensor
    """[T, in] prompt states that the text was made of."""
    cis: Tensor
    """[N, head_dim / 2] rotary factors of the image tokens."""
    kinds: Sequence[frozenset[str]]
    """Parts to keep per block: "h", "kv"."""
    format: str
    references: References | None = None
    """Reference pictures that do not depend on the row, if the model takes any."""
    picture_words: int = 0
    """Number of first text tokens whose keys and values are recorded."""
    step: int = 0
    done: list[AnchorEntry] = field(default_factory=list)
    recorder: Recorder | None = None
    negative: None = None
    first_block: None = None
    recorded: bool = False
    entry: Entry | None = None
    """Always None: it computes all tokens."""
    adapters: Adapters = ()

    @classmethod
    def of_references(cls, row: Row, blocks: int) -> FlowPrimingRow:
        """Return a row that computes the references of `row`, in the model's dtype."""
        references = row.references
        assert references is not None, "a row without references lacks none"
        template, kinds = (
            FlowTemplate(references.tokens, references.tokens, None),
            (frozenset({"kv"}),) * blocks,
        )
        return cls(
            row.request_id, template, (STILL,), references.tokens.new_zeros(1), row.prompt,
            row.prompt.text, references.cis, kinds, "model", references, adapters=row.adapters,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        return len(self.anchors)

    @property
    def needs_references(self) -> bool:
        references = self.references
        return (
            references is not None and references.entry is None and self.anchors[self.step] != STILL
        )

    def take_entry(self) -> AnchorEntry:
        return self.done.pop()

    @property
    def channels(self) -> int:
        return self.template.clean.shape[1]

    def walk(self, begin: int) -> tuple[Walk, ...]:
        return tuple(Walk(a.timestep, a.sigma, 0.0) for a in self.anchors[begin:])

    @property
    def steady(self) -> int:
        return 1

    def second_input(self) -> RowInput:
        raise AssertionError("priming takes one pass")

    def model_input(self) -> RowInput:
        references, prompt = self.references, self.prompt
        if references is not None and self.anchors[self.step] == STILL:
            self.recorder = Recorder((frozenset({"kv"}),) * len(self.kinds), self.format)
            return RowInput(
                references.tokens, prompt.text[:0], None, None, references.cis,
                capture=self.recorder, fixed=references.sees,
            )  # fmt: skip
        tokens = self.template.at(self.sigmas[self.step])
        words = len(prompt.text) - self.picture_words
        self.recorder = Recorder(
            self.kinds, self.format, text_tokens=self.picture_words, words=words
        )
        context = self.template.context
        row_input = RowInput(
            tokens, prompt.text, prompt.pooled, prompt.guidance, torch.cat((prompt.cis, self.cis)),
            capture=self.recorder, pads=prompt.pads, still=0 if context is None else len(context),
            timeless=prompt.timeless,
        )  # fmt: skip
        return (
            row_input
            if references is None
            else replace(row_input, fixed=(*references.sees, references))
        )

    def settle(self, latents: Tensor, begin: int) -> None:
        """Do nothing: priming moves no latents."""

    @property
    def blends(self) -> bool:
        return False

    def blend_in(self, moved: Tensor) -> None:
        """Do nothing."""

    def advance(self, moves: Tensor) -> None:
        assert self.recorder is not None
        entry = self.recorder.entry(self.anchors[self.step])
        if self.references is not None and entry.anchor == STILL:
            self.references.entry = entry
        self.done.append(entry)
        self.recorder = None
        self.step += 1


Row = FlowRow | FlowPrimingRow
