"""Rows: an edit, or a template being primed, with its state between steps, and the inputs of its
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from maskserve_common.contracts.keys import STILL, Anchor
from maskserve_engine.batch.packing import CachedTokens, RowInput, RowResiduals
from maskserve_engine.batch.picture_tokens import PictureKeys
from maskserve_engine.batch.step_cache import (
    Entry,
    RefreshedTokens,
    RefreshSchedule,
    StepCache,
)
from maskserve_engine.batch.transfer import HostCopy
from maskserve_engine.cache.entries import AnchorEntry, Recorder
from maskserve_engine.cache.loader import Selection
from maskserve_engine.cache.store import Handle
from maskserve_engine.families.mmdit.preparation import (
    FlowTemplate,
    model_inputs,
)
from maskserve_engine.families.mmdit.schedule import Move, Schedule, Walk
from maskserve_engine.families.mmdit.spans import (
    ComputedSpans,
    FixedWords,
    ImageSpans,
    References,
    TokenSpan,
)
from maskserve_engine.layers.low_rank import Adapters
from maskserve_engine.layers.scatter_kv import KvSource


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
    varies: bool = False
    """See `RowInput.varies`."""
    words: FixedWords | None = None
    """Prompt that does not depend on the row; `text` is then empty."""
    cache: StepCache | None = None
    """In a row with a template it keeps text and ring, and the residual correction."""
    scale: float = 1.0
    """Scale of a negative prompt in true classifier-free guidance (diffusers)."""
    picture: PictureKeys = ()
    """Keys and values of an IP-Adapter's picture; empty: there is none."""


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

    def moved_by(self, move: Move, latents: Tensor, velocity: Tensor) -> Tensor:
        """Return [n, 4C] latents after a multistep sampler's step, whose matrix is `move`."""
        memory = self.memory or (torch.zeros_like(latents),) * (len(move) - 1)
        moved, *memory_after = [_combined(row, (latents, *memory, velocity)) for row in move]
        self.next_memory = tuple(memory_after)
        return moved


@dataclass(slots=True)
class FlowRow:
    """One edit inside the running batch."""

    request_id: str
    schedule: Schedule
    passes: tuple[PromptPass, ...]
    """The prompt's pass and, with guidance, the negative prompt's."""
    image: ImageSpans
    references: References | None = None
    """Reference pictures that do not depend on the row."""
    recorded: bool = False
    residuals: RowResiduals | None = None
    adapters: Adapters = ()
    entry: Entry | None = None
    """Entry that the next step reads; None: it computes all tokens."""
    leaves_out_text: bool = False
    """Whether the next step of a row with a template leaves out text and ring."""
    step: int = 0
    sampler: SamplerState = field(default_factory=SamplerState)
    packed: PackedTokens | None = None

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def missing_references(self) -> References | None:
        """Return the references whose keys and values are to be computed next for its next step."""
        return None if self.references is None else self.references.next_missing()

    @property
    def sigma(self) -> Tensor:
        return self.schedule.sigmas[self.step]

    @property
    def selection(self) -> Selection | None:
        return None if self.image.unmasked is None else self.image.unmasked.selection

    @property
    def latents(self) -> Tensor:
        """[n, 4C] of the masked tokens."""
        return self.image.masked.latents

    @property
    def channels(self) -> int:
        return self.image.masked.latents.shape[1]

    def walk(self, begin: int) -> tuple[Walk, ...]:
        return self.schedule.walk[begin:]

    @property
    def steady(self) -> int:
        """Number of steps, from the next one on, whose packed inputs differ only in latents."""
        if self.image.unmasked is not None and self.entry is None:
            return 1  # it packs tokens that other steps do not compute
        if self.fills_step_cache or self.lookahead_step is not None:
            return 1  # the capture is prepared for that step
        repacked = (
            frozenset[int]()
            if self.step_cache is None
            else self.step_cache.schedule.repacking_steps
        )
        return min((step for step in repacked if step > self.step), default=self.steps) - self.step

    @property
    def step_cache(self) -> StepCache | None:
        """Step cache of the first pass; the second pass has one if this has."""
        return self.passes[0].cache

    @property
    def prompt(self) -> PromptPass:
        return self.passes[0]

    @property
    def negative(self) -> PromptPass | None:
        return self.passes[1] if len(self.passes) > 1 else None

    @property
    def step_caches(self) -> tuple[StepCache, ...]:
        return tuple([prompt.cache for prompt in self.passes if prompt.cache is not None])

    @property
    def has_cached_text(self) -> bool:
        """Whether its step caches can serve a step that does not compute the text."""
        caches = self.step_caches
        return self.image.refreshes or (bool(caches) and all(cache.whole() for cache in caches))

    @property
    def reads_step_cache(self) -> bool:
        """Whether the next step reads the step cache, in place of computing all tokens that only
        refresh steps compute.
        """
        return self.entry is not None and (self.image.refreshes or self.leaves_out_text)

    @property
    def computes(self) -> ComputedSpans:
        """The spans that the next step computes."""
        cache = self.step_cache if self.reads_step_cache else None
        return ComputedSpans(
            text=cache is None or not cache.text, ring=cache is None, unmasked=self.entry is None
        )

    @property
    def fills_step_cache(self) -> bool:
        """Whether the next step is a refresh step, or one whose residuals correct the entries."""
        cache = self.step_cache
        if cache is None or self.reads_step_cache:
            return False
        corrects = cache.schedule.corrects_residuals and self.entry is None
        return self.image.refreshes or cache.text or corrects

    @property
    def lookahead_step(self) -> int | None:
        """Refresh step that the next step computes ahead: the first one after it, once the row has
        arrived at the last one in its step cache. None: there is none.
        """
        step_cache = self.step_cache
        if step_cache is None or not self.reads_step_cache or self.sampler.moved is None:
            return None
        schedule = step_cache.schedule
        if schedule.control is not None and self.step in schedule.refresh_steps:
            return None  # the next place depends on this step's error
        arrived = step_cache.last_sigma >= self.walk_sigma()
        return schedule.next_refresh(self.step) if arrived else None

    def walk_sigma(self) -> float:
        return self.schedule.walk[self.step].sigma

    def change_to(self, step: int) -> float:
        return sum(walk.change for walk in self.schedule.walk[self.step : step])

    def moved_to(self, step: int) -> Tensor:
        """Return [n, 4C] latents of the computed tokens at a later step, if the model's last answer
        holds until then.
        """
        moved = self.sampler.moved
        assert moved is not None, "no step was taken yet"
        last = self.schedule.walk[self.step - 1].change
        latents = self.image.masked.latents + moved * (self.change_to(step) / last)
        if self.image.masked.blend is None:
            return latents
        return self.image.masked.blend.apply(latents, self.schedule.sigmas[step], step, self.steps)

    @property
    def computed(self) -> int:
        """Number of image tokens that the next step computes."""
        return self.image.count(self.computes)

    @property
    def active(self) -> int:
        """Number of image tokens computed by steps that read entries or the step cache; 0: all
        steps are dense.
        """
        return 0 if self.image.unmasked is None else len(self.image.masked)

    def settle(self, latents: Tensor, begin: int) -> None:
        """Replace the latents by their view [n or all, 4C] in the batch, the computed tokens
        first.
        """
        computed = len(self.image.masked)
        self.image.masked.latents = latents[:computed]
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

    def arrive(self, velocity: Tensor) -> None:
        """Compare the model's answer, [N, 4C] of the whole batch, with a lookahead's, if one was
        computed for this step.
        """
        assert self.packed is not None
        if self.step_cache is not None:
            self.step_cache.errors.arrive(self.step, velocity[self.packed.place])

    def steer(self, velocity: Tensor) -> None:
        """Replace the model's answer, [N, 4C] of the whole batch, by the velocity that takes the
        latents where the multistep sampler takes them. Tokens that only some steps compute keep the
        model's velocity.
        """
        assert self.packed is not None
        row_velocity, latents = velocity[self.packed.place], self.image.masked.latents.float()
        moved = self.sampler.moved_by(self.schedule.moves[self.step], latents, row_velocity.float())
        row_velocity.copy_(moved.sub_(latents).div_(self.schedule.walk[self.step].change))

    @property
    def blends(self) -> bool:
        return self.image.masked.blend is not None

    def blend_in(self, moved: Tensor) -> None:
        """Apply Inpaint's blend to [n or all, 4C] `moved`, between the sampler's step and
        `advance`.
        """
        if self.image.masked.blend is not None:
            computed, next_step = moved[: len(self.image.masked)], self.step + 1
            sigma = self.schedule.sigmas[next_step]
            computed.copy_(self.image.masked.blend.apply(computed, sigma, next_step, self.steps))

    def advance(self, moves: Tensor) -> None:
        """Record a step; `moves`, [N, 4C] of the whole batch, are velocity times change of
        sigma.
        """
        assert self.packed is not None
        sampler = self.sampler
        sampler.moved, sampler.memory = moves[self.packed.place], sampler.next_memory
        if self.step_cache is not None and self.image.unmasked is not None:
            self._go_on(self.step_cache, self.packed, moves)
        self.step += 1

    def _go_on(self, cache: StepCache, packed: PackedTokens, moves: Tensor) -> None:
        """Update step caches, and move the tokens that the step left out."""
        walk, ahead = self.schedule.walk[self.step], packed.lookahead
        if ahead is not None:
            self._complete_refresh(self.schedule.walk[ahead.step].sigma)
            begin = ahead.place.start
            cache.errors.expect(ahead.step, moves[begin : begin + len(self.image.masked)])
        elif not self.reads_step_cache and (cache.text or self.image.refreshes):
            self._complete_refresh(walk.sigma)
        left_out = self.image.left_out
        if left_out is None:
            return
        count = len(left_out.clean)
        if not self.reads_step_cache:
            begin = packed.place.stop
            left_out.latents = packed.cached[:count]
            left_out.record_refresh(moves[begin : begin + count], walk.change)
            return
        if ahead is not None:
            begin = ahead.place.start + len(self.image.masked)
            left_out.record_lookahead(moves[begin : begin + count])
        left_out.move(walk.change, cache.weight(walk.sigma))

    def _complete_refresh(self, sigma: float) -> None:
        for step_cache in self.step_caches:
            step_cache.complete_refresh(sigma)

    def extrapolated_latents(self) -> Tensor | None:
        """Return [gh·gw, 4C] of all tokens after the next step, the computed ones first, if the
        model's last answer holds; None: no answer yet, or no further step.
        """
        next_step = self.step + 1
        if self.sampler.moved is None or next_step >= self.steps:
            return None
        latents = self.moved_to(next_step)
        if self.image.unmasked is None:
            return latents
        unmasked_latents = self.image.unmasked.latents.at(self.schedule.sigmas[next_step])
        return torch.cat((latents, unmasked_latents[:, : self.channels]))

    def estimate(self) -> HostCopy:
        """Return [C, h, w] final latents by the last step's velocity."""
        return self.image.whole(self._clean_estimate(), ended=False)

    def _clean_estimate(self) -> Tensor:
        """Return [n, 4C] final latents of the computed tokens by the last step's velocity."""
        moved = self.sampler.moved
        assert moved is not None, "no step was taken yet"
        share = self.sigma / self.schedule.walk[self.step - 1].change
        return self.image.masked.latents.float() - share * moved.float()

    def change(self) -> HostCopy:
        """Return [N] changes of the image tokens (`ImageSpans.change`)."""
        return HostCopy(self.image.change(self._clean_estimate(), self.sigma))

    def narrow(self, region: Tensor, schedule: RefreshSchedule) -> None:
        """Compute these image tokens [n] alone between the refresh steps of a schedule, whose first
        one is the next step.
        """
        self.image = self.image.narrowed(region)
        self.sampler = SamplerState()
        self.begin_step_caches(schedule)

    def begin_step_caches(self, schedule: RefreshSchedule | None) -> None:
        """Give the passes new step caches; without a schedule they have none."""
        for prompt in self.passes:
            prompt.cache = None if schedule is None else StepCache(schedule)

    def result(self) -> HostCopy:
        """Return [C, h, w] latents."""
        return self.image.whole(self.image.masked.latents, ended=True)


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
    recorded: bool = False
    entry: Entry | None = None
    """Always None: it computes all tokens."""
    adapters: Adapters = ()

    @classmethod
    def of_references(cls, row: Row, references: References, blocks: int) -> FlowPrimingRow:
        """Return a row that computes references of `row`, in the model's dtype."""
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

    def missing_references(self) -> References | None:
        if self.references is None or self.anchors[self.step] == STILL:
            return None
        return self.references.next_missing()

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
            capture=self.recorder, pads=prompt.pads,
            context=0 if context is None else len(context), timeless=prompt.timeless,
            varies=prompt.varies,
        )  # fmt: skip
        return row_input if references is None else replace(row_input, fixed=references.whole)

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
            self.references.record(entry)
        self.done.append(entry)
        self.recorder = None
        self.step += 1


Row = FlowRow | FlowPrimingRow


def pass_inputs(row: Row) -> list[RowInput]:
    """Return the inputs of a row's next step, one for each pass."""
    if isinstance(row, FlowPrimingRow):
        return [row.model_input()]
    computed = row.computes
    inputs = [_input(row, prompt, row.step, computed) for prompt in row.passes]
    inputs = _adding(row.residuals, inputs)
    if not row.fills_step_cache:
        return inputs
    passes = zip(row.passes, inputs, strict=True)
    return [_captured(row, prompt, row_input, row.step) for prompt, row_input in passes]


def lookahead_inputs(row: Row) -> list[RowInput]:
    """Return the inputs of the lookahead's passes; empty if the next step has no lookahead."""
    step = None if isinstance(row, FlowPrimingRow) else row.lookahead_step
    if isinstance(row, FlowPrimingRow) or step is None:
        return []
    computed = ComputedSpans(unmasked=row.image.refreshes)
    inputs = [
        _captured(row, prompt, _input(row, prompt, step, computed), step) for prompt in row.passes
    ]
    return _adding(None if row.residuals is None else row.residuals.for_lookahead, inputs)


def _adding(residuals: RowResiduals | None, inputs: list[RowInput]) -> list[RowInput]:
    """Let a row's passes add the residuals of its ControlNets."""
    if residuals is None:
        return inputs
    last = len(residuals.passes) - 1
    return [
        replace(row_input, residuals=residuals.passes[min(number, last)])
        for number, row_input in enumerate(inputs)
    ]


def all_tokens(row: FlowRow, lookahead: int | None = None) -> RowInput:
    """Return the input of all tokens, the masked ones first: at the next step, or as predicted for
    the later step `lookahead`.
    """
    step = row.step if lookahead is None else lookahead
    return _input(row, replace(row.prompt, words=None), step, ComputedSpans())


def _input(row: FlowRow, prompt: PromptPass, step: int, computed: ComputedSpans) -> RowInput:
    """Return the input of one pass: masked tokens, and at their end the computed spans."""
    masked, unmasked, spans = row.image.masked, row.image.unmasked, row.image.spans(computed)
    sigma, change = row.schedule.sigmas[step], row.change_to(step)
    # Entries have the keys and values of these first text tokens, and hide the context.
    words = 0 if unmasked is None or computed.unmasked else unmasked.words
    context = masked.context if unmasked is None else unmasked.latents.context
    text, text_cis = prompt.text[words:], prompt.cis[words:]
    latents = masked.latents if step == row.step else row.moved_to(step)
    tokens = [
        model_inputs(latents, masked.condition, masked.context),
        *[span.latents.at(sigma, change) for span in spans],
    ]
    cis = [masked.cis, *[span.cis[: len(span)] for span in spans]]
    contexts = (masked.context, *[span.latents.context for span in spans])
    fixed = () if row.references is None else row.references.whole
    return RowInput(
        tokens[0] if len(tokens) == 1 else torch.cat(tokens),
        text if computed.text else text[:0],
        prompt.pooled,
        prompt.guidance,
        torch.cat((text_cis, *cis) if computed.text else cis),
        cached=_cached(row, prompt.cache, text_cis, step, computed),
        context=0 if context is None or words else len(context),
        still=sum(len(tokens) for tokens in contexts if tokens is not None),
        timeless=prompt.timeless,
        varies=prompt.varies,
        fixed=fixed if prompt.words is None else (*fixed, prompt.words),
        back=None if prompt.words is None else prompt.words.back,
        pads=prompt.pads,
        picture=prompt.picture,
    )


def _cached(
    row: FlowRow, cache: StepCache | None, text_cis: Tensor, step: int, computed: ComputedSpans
) -> tuple[CachedTokens, ...]:
    """Return the tokens of one pass that are not computed, by the cache that has them."""
    ring, unmasked = row.image.ring, row.image.unmasked
    if unmasked is None or computed.unmasked:
        return ()
    cached: list[CachedTokens] = []
    if not computed.ring:
        assert cache is not None, "without a step cache the ring is computed"
        cis = [] if computed.text else [text_cis]
        cis += [] if ring is None else [ring.cis]
        cis += [unmasked.cis] if unmasked.refreshes else []
        cached.append(RefreshedTokens(cache, row.walk_sigma, torch.cat(cis)))
    if not unmasked.refreshes:
        lifts = cache is not None and cache.schedule.corrects_residuals
        at = None if step == row.step else step
        cached.append(EntryTokens(row, unmasked, cache if lifts else None, at))
    return tuple(cached)


def _captured(row: FlowRow, prompt: PromptPass, row_input: RowInput, step: int) -> RowInput:
    """Let the pass's step cache capture the pass `row_input` at `step`."""
    cache = prompt.cache
    assert cache is not None, "both passes fill a step cache"
    sigma, ahead, masked = row.schedule.walk[step].sigma, step != row.step, len(row.image.masked)
    if row.image.refreshes:
        cache.begin_refresh(row.step, sigma, masked, len(row_input.tokens), reads=ahead)
    else:
        end = masked + row.image.ring_tokens
        cached_count = len(row_input.tokens) - end if row.entry is None else 0
        text, ring = len(row_input.text), slice(masked, end)
        cache.begin_with_template(row.step, text, ring, cached_count, sigma, reads=ahead)
    return replace(row_input, capture=cache)


@dataclass(frozen=True, slots=True)
class EntryTokens:
    """`packing.CachedTokens` that a row reads from its template, at the row's present step."""

    row: FlowRow
    span: TokenSpan
    step_cache: StepCache | None = None
    """Step cache of the pass, if it adds a residual correction to the entries."""
    lookahead: int | None = None
    """Refresh step of a lookahead pass; None: the pass belongs to the row's next step."""

    def __len__(self) -> int:
        return len(self.span.cis)

    @property
    def cis(self) -> Tensor:
        return self.span.cis

    def tokens(self) -> Tensor:
        assert not self.span.words, "of text tokens there are keys and values alone"
        assert self.lookahead is None, "a lookahead pass reads only keys and values"
        return self.span.latents.at(self.row.sigma)

    def source(self, block: int, part: str = "kv") -> KvSource:
        entry = self.row.entry
        assert isinstance(entry, Handle), "packed for a step that reads no entry"
        kv_source = KvSource(*entry.wait_whole(block, part))
        if self.step_cache is None or part != "kv":
            return kv_source
        return self.step_cache.correction.added_to(block, kv_source, self._sigma)

    @property
    def entry(self) -> object:
        """A different object at each step if entries get a residual correction."""
        is_corrected = self.step_cache is not None and len(self.step_cache.correction) > 0
        return self._sigma if is_corrected else self.row.entry

    @property
    def _sigma(self) -> float:
        row = self.row
        return row.schedule.walk[row.step if self.lookahead is None else self.lookahead].sigma
