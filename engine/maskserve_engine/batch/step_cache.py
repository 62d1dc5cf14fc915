"""A row's step cache: keys and values from its refresh steps, for the steps between them.

At a refresh step the row computes all tokens, as a dense row does. It keeps each block's keys and
values of the tokens that other steps do not compute: the cached image tokens and, by the schedule,
the text. The first step is a refresh step. Later ones are computed by lookahead: when the row
arrives at a refresh step, its step runs a second pass for the next refresh step, with all tokens as
the model's last answer predicts them. Keys and values of the steps between are interpolated over
sigma, linearly or to second order.

Steps after the last refresh step extrapolate from the last two. A UNet's row reads the ends of
stacks in the same way. So the edit needs no template, no store, and no entries made with its
adapters. (FlashPS §3.1 primes templates; TaylorSeer extrapolates a whole model's features from
earlier steps.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from maskserve_common.contracts.tiers import DEVICE, HOST
from maskserve_engine.batch.cache_parts import CacheParts
from maskserve_engine.batch.lookahead_errors import LookaheadErrors
from maskserve_engine.batch.packing import RowInput
from maskserve_engine.batch.residual_correction import ResidualCorrection
from maskserve_engine.cache.entries import PARTS, Coded
from maskserve_engine.cache.host_cache import HostCache
from maskserve_engine.cache.loader import Part
from maskserve_engine.cache.reader import Heads
from maskserve_engine.cache.store import Handle, Store
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.keep_tokens import KeptTokens, keep_tokens
from maskserve_engine.layers.scatter_kv import Change, KvSource
from maskserve_engine.planning.flops import Floats
from maskserve_engine.planning.refresh_control import RefreshControl, Remainder
from maskserve_engine.planning.refresh_steps import (
    RefreshRule,
    count_with_controls,
    lookahead_steps_of,
    refresh_steps,
)
from maskserve_engine.spec.model_spec import ModelSpec

_log = logging.getLogger(__name__)
_HIDDEN = PARTS.index("h")
Share = Span | Literal["here", "elsewhere"] | None
"""Share of a refresh step's tensors that a rank keeps: all heads (None), a span of heads if ranks
divide them, or, if ranks deal passes, whether this rank has the pass."""


@dataclass(frozen=True, slots=True)
class RefreshSchedule:
    """The steps at which a row refreshes, and how it keeps the result. All refresh steps but the
    first are computed ahead, at the refresh step before.
    """

    refresh_steps: frozenset[int]
    """Refresh steps: they compute all tokens of a row without a template, or of a row's
    ControlNets. With a template they compute the text and the ring."""
    format: str
    text: bool
    """Whether other steps do not compute the text."""
    ring: bool = False
    """Whether other steps do not compute the ring round the mask either."""
    power: float = 1.0
    """Exponent of sigma over which keys and values are linear."""
    corrects_residuals: bool = False
    """For a row with a template: whether its dense first steps correct the entries that later steps
    read."""
    second_order: bool = False
    """Whether to use the parabola through the last three refresh steps; it counts less the longer
    the last interval is against the one before."""
    control: RefreshControl | None = None
    """Places refresh steps by the errors of the row's lookaheads: later `refresh_steps` are
    expected ones, and a lookahead is computed one step after its refresh step. None: places are
    fixed."""
    dense_from: int | None = None
    """Step from which the row computes all tokens: no lookahead is near enough, or there is no mask
    (docs/adr/0091). These steps are among the refresh steps. None: there is none."""

    @property
    def dense(self) -> frozenset[int]:
        """Refresh steps whose steps compute all of their tokens: the first, and those at the end
        without lookahead.
        """
        return frozenset(sorted(self.refresh_steps)[:1]) | self._at_end

    @property
    def _at_end(self) -> frozenset[int]:
        begin = self.dense_from
        return frozenset(step for step in self.refresh_steps if begin is not None and step >= begin)

    @property
    def lookahead_steps(self) -> frozenset[int]:
        """Steps that compute a later refresh step beside their own tokens."""
        return self.computed_at - self.dense

    @property
    def computed_at(self) -> frozenset[int]:
        """Steps that compute a refresh step: their own, or a later one by lookahead."""
        if not self.refresh_steps:
            return self.refresh_steps
        at_end, delayed = self._at_end, self.control is not None
        return lookahead_steps_of(self.refresh_steps - at_end, delayed=delayed) | at_end

    @property
    def repacking_steps(self) -> frozenset[int]:
        """Steps that pack other tokens than the step before, or may do so."""
        after = (
            {step + 1 for step in self.refresh_steps} if self.control is not None else set[int]()
        )
        return self.computed_at | after

    def shares(self, steps: int, done: int = 0) -> tuple[float, float]:
        """Return the share of the steps left, of `steps`, that compute all tokens, and of those
        that compute nothing else.
        """
        left = range(done, steps)
        return (
            len(self.computed_at.intersection(left)) / len(left),
            len(self.dense.intersection(left)) / len(left),
        )

    def begun_at(self, begin: int, steps: int, last: int) -> RefreshSchedule:
        """Return the schedule, made for the last `steps` of an edit, as that of the edit from step
        `begin` on, whose `last` steps compute all tokens.
        """
        end = begin + steps - last
        places = {begin + step for step in self.refresh_steps if begin + step < end}
        last_steps = frozenset(range(end, begin + steps))
        return replace(self, refresh_steps=last_steps.union(places), dense_from=end)

    def controlled(self, step: int, remainder: Remainder) -> RefreshSchedule:
        """Return the schedule with this remainder after refresh step `step`."""
        so_far = {refresh for refresh in self.refresh_steps if refresh <= step}
        return replace(
            self, refresh_steps=remainder.refresh_steps | so_far, dense_from=remainder.dense_from
        )

    def next_refresh(self, step: int) -> int | None:
        """Return the first refresh step after `step` that is computed ahead; None: there is
        none.
        """
        ahead = [refresh for refresh in self.refresh_steps - self._at_end if refresh > step]
        return min(ahead, default=None)

    def lookahead_at(self, step: int) -> int | None:
        """Return the refresh step that a step computes ahead; None: it computes none."""
        return self.next_refresh(step) if step in self.lookahead_steps else None

    @classmethod
    def of(
        cls, spec: ModelSpec, rule: RefreshRule, count: int, sigmas: Sequence[float]
    ) -> RefreshSchedule:
        """Return the schedule of a model's edit with this number of refresh steps; `sigmas` are
        those of the edit's steps.
        """
        power = spec.refresh.evenly_over
        return cls(
            refresh_steps(count, sigmas, power, spec.refresh.growth),
            rule.format,
            rule.text,
            rule.ring,
            power,
            second_order=spec.refresh.second_order,
        )

    @classmethod
    def with_controls(
        cls,
        spec: ModelSpec,
        rule: RefreshRule,
        sigmas: Sequence[float],
        acting: slice = slice(None),
    ) -> RefreshSchedule:
        """Return the schedule of an edit that reads a template, for its text and, if `acting` are
        the steps in which they act, for its ControlNets. All steps compute the ring, since
        residuals are added to it.
        """
        act = range(len(sigmas))[acting]
        count = count_with_controls(len(act), rule.stride)
        schedule = cls.of(spec, rule._replace(ring=False), count, sigmas[acting])
        placed = frozenset({act.start + step for step in schedule.refresh_steps})
        return replace(schedule, refresh_steps=placed)


@dataclass(frozen=True, slots=True)
class RefreshLine:
    """Line through the last two refresh steps, over a power of sigma."""

    sigmas: tuple[float, ...]
    """Sigmas of the last two refresh steps, the later one last; fewer before the second."""
    power: float

    def to(self, sigma: float) -> RefreshLine:
        return RefreshLine((*self.sigmas[-1:], sigma), self.power)

    def weight(self, sigma: float) -> float:
        """Return the distance from the last refresh step to `sigma`, in intervals between the two:
        negative between them, positive beyond.
        """
        return _weight(self.sigmas, self.power, sigma)


@lru_cache(maxsize=256)  # each block of each row calls it at each step
def _weight(sigmas: tuple[float, ...], power: float, sigma: float) -> float:
    if len(sigmas) < 2:
        return 0.0
    earlier, last, current = (value**power for value in (*sigmas, sigma))
    return (last - current) / (earlier - last) if earlier != last else 0.0


@dataclass(frozen=True, slots=True)
class _Refreshed:
    step: int
    line: RefreshLine
    tokens: KeptTokens
    """[T + m, width] each; keys and values for `kv`. The bends are added `weight` · (1 + `weight`)
    times; there are none before the third refresh step."""

    def tensors(self) -> tuple[Coded, ...]:
        return tuple(chain(*self.tokens))

    def with_tensors(self, tensors: tuple[Coded, ...]) -> _Refreshed:
        rest = iter(tensors)
        return replace(
            self, tokens=KeptTokens(*(tuple(islice(rest, len(of))) for of in self.tokens))
        )


class StepCache:
    """The step cache of one pass; captures its refresh steps (`packing.Capture`)."""

    def __init__(self, schedule: RefreshSchedule) -> None:
        self.schedule = schedule
        self.text = schedule.text
        self._step = self._total = 0
        self._cached_tokens = slice(0, 0)
        self._kept_ids: tuple[object, Tensor] | None = None
        """Tokens that are kept, and what they follow from."""
        self._words: int | None = None
        """Number of text tokens of a row with a template, whose text and ring are kept; None: the
        row has no template."""
        self._refreshed = CacheParts[_Refreshed]()
        self.correction = ResidualCorrection(schedule.format)
        """Residual correction of the entries that a row with a template reads."""
        self._is_out_of_memory = False
        self.errors = LookaheadErrors()
        """Errors of the lookaheads; those of a row are in the step cache of its first pass."""
        self._line = RefreshLine((), schedule.power)
        """Line through the complete refresh steps."""
        self._at = 0.0
        """Sigma of the refresh step to be captured next."""
        self._reads = False
        """Whether the step to be captured also reads this cache."""
        self._has: Share = None
        self._share: Share = None
        self._lost: int | None = None
        """Step whose refresh step found no memory."""

    def whole(self, heads: Span | None = None, *, by_rank: bool = False) -> bool:
        """Return whether all blocks are cached for a rank with `heads`, for one with all heads
        (None) or, if `by_rank`, for ranks that deal passes.
        """
        enough: tuple[Share, ...] = ("here", "elsewhere") if by_rank else (None, heads)
        return bool(self._line.sigmas) and self._has in enough

    @property
    def nbytes(self) -> int:
        return self._refreshed.nbytes + self.correction.parts.nbytes

    @property
    def out_of_memory(self) -> bool:
        """Whether something of it was dropped for lack of memory."""
        return self._is_out_of_memory or self.correction.out_of_memory

    def may_move(self, hosts: Callable[[], HostCache], *, on_host: bool = False) -> None:
        """Let the cache move to host memory.

        Args:
            hosts: makes a place there.
            on_host: whether it lies there from the start.
        """
        for parts in (self._refreshed, self.correction.parts):
            parts.host, parts.on_host = hosts(), on_host

    def take_place_of(self, before: StepCache) -> None:
        """Lie where another cache lay, which ends."""
        before.release()
        for parts, parts_before in (
            (self._refreshed, before._refreshed),
            (self.correction.parts, before.correction.parts),
        ):
            parts.host, parts.on_host = parts_before.host, parts_before.on_host
        self._is_out_of_memory = before.out_of_memory
        self.errors = before.errors.for_new_cache()

    def hosts(self, *, reads: bool = True) -> list[HostCache]:
        """Return the places in host memory from which a step reads.

        Args:
            reads: whether it reads refresh steps; otherwise the residual correction alone.
        """
        groups = ((self._refreshed, reads), (self.correction.parts, len(self.correction) > 0))
        return [
            parts.host
            for parts, is_read in groups
            if is_read and parts.on_host and parts.host is not None
        ]

    def begin_loads(self, step: int) -> None:
        """Start the loads from host memory of a step's first blocks."""
        for host in self.hosts():
            host.begin(step)

    @property
    def moved_bytes(self) -> int:
        """Bytes that steps have read from host memory."""
        hosts = (self._refreshed.host, self.correction.parts.host)
        return sum(host.moved for host in hosts if host is not None)

    def begin_refresh(
        self, step: int, sigma: float, computed: int, total: int, *, reads: bool = False
    ) -> StepCache:
        """Prepare to capture a refresh step, and return itself.

        Args:
            step: number of the row's step.
            sigma: sigma of the refresh step.
            computed: number of image tokens that other steps compute; they come first.
            total: number of image tokens.
            reads: whether this is a lookahead, in a step that reads the cache.
        """
        self._step, self._at, self._total = step, sigma, total
        self._cached_tokens = slice(computed, total)
        self._reads, self._words, self._share = reads, None, None
        return self

    @property
    def last_sigma(self) -> float:
        """Sigma of the last complete refresh step."""
        return self._line.sigmas[-1]

    def begin_with_template(
        self,
        step: int,
        words: int,
        ring: slice,
        cached_count: int,
        sigma: float,
        *,
        reads: bool = False,
    ) -> StepCache:
        """Prepare to capture a step of a row with a template, and return itself.

        Args:
            step: number of the row's step.
            words: number of text tokens.
            ring: place of the ring among the image tokens; it is left out with the text.
            cached_count: number of image tokens that other steps do not compute; they come
                last. 0: this step does not compute them either.
            sigma: sigma of the step.
            reads: whether this is a lookahead, in a step that reads the cache.
        """
        if self.schedule.corrects_residuals:
            self.correction.begin(step, cached_count, sigma)
        self.begin_refresh(step, sigma, 0, 0, reads=reads)
        self._words, self._cached_tokens = words, ring
        return self

    def set_share(self, share: Share) -> None:
        self._share = share

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Ignore hidden states."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Keep a block's keys and values.

        Args:
            block: the block's number.
            keys: [T + N, heads, head_dim], or the image tokens only where the text is computed.
            values: tensor of the shape of `keys`.
        """
        kv = keys.flatten(1), values.flatten(1)
        self.correction.keep(block, kv)
        if not self.schedule.corrects_residuals or self.text:
            self._keep(block, "kv", kv)

    def _keep(self, block: int, part: str, tensors: Sequence[Tensor]) -> None:
        """Keep [tokens, width] tensors of a part of a block.

        A step that is retried after a failed batch keeps the tensors of its first attempt.
        """
        if self._reads and self._share != self._has:
            self._lost = self._step  # the step itself still reads the cached share
        self._rotate()
        name = (block, part)
        previous = self._refreshed.peek(name)
        if self._lost == self._step or (previous is not None and previous.step == self._step):
            return
        if not self._refreshed.put(name, lambda: self._refresh(name, tensors)):
            _log.warning("no memory for what an edit's step %d leaves", self._step)
            self._lose()

    def release(self) -> None:
        """Drop the cache; its row has ended."""
        self._clear()
        self.correction.clear()

    def _refresh(self, name: Part, tensors: Sequence[Tensor]) -> _Refreshed:
        """Return the next refresh step of a part."""
        last = self._refreshed.get(name) if name in self._refreshed else None
        ids, format = self._cached_ids(name[0], tensors[0]), self.schedule.format
        if last is None:
            line = RefreshLine((), self.schedule.power).to(self._at)
            return _Refreshed(self._step, line, keep_tokens(tensors, ids, format))
        # Error of the line through the last two refresh steps at this one. (The exact parabola
        # multiplies it by `reach`, which amplifies noise.)
        reach = last.line.weight(self._at)
        bends = self.schedule.second_order and reach > 0 and len(last.tokens.slopes) > 0
        tokens = keep_tokens(tensors, ids, format, last.tokens, reach if bends else None)
        return _Refreshed(self._step, last.line.to(self._at), tokens)

    def _lose(self) -> None:
        """Drop the cache for lack of memory: steps compute all tokens until a refresh step finds
        room. A lookahead's step still reads the cache until it is done.
        """
        self._lost, self._is_out_of_memory = self._step, True
        if not self._reads:
            self._clear()

    def _rotate(self) -> None:
        """Clear the cache if the captured share differs from the cached one: no line connects
        them.
        """
        if self._share != self._has and not self._reads:
            self._clear()
            self._has = self._share

    def _clear(self) -> None:
        self._refreshed.clear()
        self._line = RefreshLine((), self.schedule.power)

    def _cached_ids(self, block: int, x: Tensor) -> Tensor:
        """Return [T + m] tokens of `x`, [tokens, width], that other steps do not compute."""
        # In a row with a template, a dense block's `x` has the cached tokens after the ring.
        text = len(x) - self._total if self._words is None else self._words
        image = self._cached_tokens
        key = text, image.start, image.stop, x.device
        if self._kept_ids is None or self._kept_ids[0] != key:
            spans = (0, text), (text + image.start, text + image.stop)
            ids = torch.cat([torch.arange(*span, device=x.device) for span in spans])
            self._kept_ids = key, ids
        return self._kept_ids[1]

    def complete_refresh(self, sigma: float) -> None:
        """Record that the refresh step at `sigma` is complete. Idempotent, for retried steps."""
        self._rotate()
        if self._lost == self._step:
            self._clear()
        elif self._line.sigmas[-1:] != (sigma,):
            self._line = self._line.to(sigma)

    def weight(self, sigma: float) -> float:
        """Return the position of `sigma` relative to the last two refresh steps
        (`RefreshLine.weight`).
        """
        return self._line.weight(sigma)

    def identity_at(self, sigma: float) -> object:
        """Return an object that identifies the result of `source` at `sigma`."""
        return sigma if self.weight(sigma) else self._line

    def source(self, block: int, sigma: float, part: str = "kv") -> KvSource:
        """Return a part of a block at `sigma`, for the tokens that the step does not compute."""
        cached_part = self._refreshed.get((block, part))
        tokens, weight = cached_part.tokens, cached_part.line.weight(sigma)
        along = (Change(tokens.slopes, weight),) if weight else ()
        across = (Change(tokens.bends, weight * (1.0 + weight)),) if along and tokens.bends else ()
        return KvSource(tokens.parts, None, along + across)


@dataclass(frozen=True, slots=True)
class RefreshedTokens:
    """`packing.CachedTokens` that a pass reads from its step cache, the text first if it is one of
    them.
    """

    cache: StepCache
    sigma: Callable[[], float]
    cis: Tensor

    def __len__(self) -> int:
        return len(self.cis)

    def tokens(self) -> Tensor:
        raise AssertionError("a step cache has only keys and values")

    @property
    def entry(self) -> object:
        """A different object at each step where keys and values change along their line."""
        return self.cache.identity_at(self.sigma())

    def source(self, block: int, part: str = "kv") -> KvSource:
        assert part == "kv", "a step cache has only keys and values"
        return self.cache.source(block, self.sigma())


def input_between_refreshes(
    row: RowInput, cis: Tensor, cache: StepCache, sigma: Callable[[], float]
) -> RowInput:
    """Return the input of a pass that reads its step cache, and its text from there if the cache
    has it.

    Args:
        row: input of the pass with its text; it reads no other cache.
        cis: [m, head_dim / 2] rotary factors of the image tokens in the cache.
        cache: step cache of the pass.
        sigma: returns the sigma of the present step.
    """
    if not cache.text:
        return replace(row, cached=(RefreshedTokens(cache, sigma, cis),))
    of_text, computed = row.cis.split((len(row.text), len(row.tokens)))
    cached_tokens = RefreshedTokens(cache, sigma, torch.cat((of_text, cis)))
    return replace(row, text=row.text[:0], cis=computed, cached=(cached_tokens,))


class RefreshingRow(Protocol):
    @property
    def step_caches(self) -> Sequence[StepCache]: ...


@dataclass(slots=True)
class StepCacheLoad:
    """`executor.LoadState` of step caches: a step loads the tensors that lie in host memory."""

    sizes: Floats
    tier: str
    hosts: tuple[HostCache, ...]
    """Host memory of the caches that lie there."""

    @property
    def missing(self) -> Floats:
        return self.sizes

    @property
    def lost(self) -> BaseException | None:
        return next((host.lost for host in self.hosts if host.lost is not None), None)


@dataclass(slots=True)
class StepCacheEntry:
    """Stands for the step caches between refresh steps, in place of a `cache.store.Handle`."""

    load: StepCacheLoad
    stalls: list[Any]
    """Spans in which steps waited for tensors in host memory."""

    def want(self, parts: Iterable[Part], step: int) -> None:
        """Start the loads of a step."""
        for host in self.load.hosts:
            host.begin(step)


Entry = Handle | StepCacheEntry


class _RowCaches:
    """Step caches of one row (`executor.RowLoads`).

    Args:
        store: its host memory may receive the caches; None: they stay on the device.
        on_host: whether the caches lie in host memory from the start.
    """

    def __init__(self, store: Store | None, *, on_host: bool) -> None:
        self._store, self._is_on_host = store, on_host
        self._caches: tuple[StepCache, ...] = ()
        self._stalls: list[Any] = []

    def _place(self, cache: StepCache, blocks: int) -> None:
        """Let a new cache of so many blocks move to host memory, if rows may have any."""
        store = self._store
        if store is None or not store.rows.budget_bytes:
            return
        rows, loader = store.rows, store.loader
        cache.may_move(
            lambda: HostCache(rows, loader, blocks, self._stalls), on_host=self._is_on_host
        )

    @property
    def loaded(self) -> Mapping[str, int]:
        """Bytes that steps have read from the host."""
        moved = sum(step_cache.moved_bytes for step_cache in self._caches)
        return {HOST.name: moved} if moved else {}

    @property
    def stalled(self) -> float:
        return sum(stall.seconds() or 0.0 for stall in self._stalls)

    @property
    def out_of_memory(self) -> bool:
        """Whether the row has computed all tokens because a cache found no memory."""
        return any(step_cache.out_of_memory for step_cache in self._caches)

    @property
    def refresh_errors(self) -> Mapping[int, float]:
        """Errors of the row's lookaheads (`LookaheadErrors`)."""
        errors: dict[int, float] = {}
        for step_cache in self._caches:
            errors.update(step_cache.errors.by_step())
        return errors

    def lose(self) -> None:
        """Give up the caches, which do not arrive from host memory."""
        for step_cache in self._caches:
            step_cache.release()

    def release(self) -> None:
        self.lose()


class NetStepCaches(_RowCaches):
    """Step caches of a row's ControlNets, which have blocks of their own."""

    def add(self, cache: StepCache, blocks: int) -> None:
        """Take a new step cache of a net of so many blocks."""
        self._caches = (*self._caches, cache)
        self._place(cache, blocks)

    @property
    def lost(self) -> bool:
        """Whether tensors do not arrive from host memory."""
        return any(host.lost is not None for cache in self._caches for host in cache.hosts())


class StepCacheReader(_RowCaches):
    """Reads a row's step caches, in place of a `cache.reader.EntryReader`.

    Args:
        row: row with step caches.
        blocks: number of the model's blocks, with feature maps.
        store: its host memory may receive the caches; None: they stay on the device.
        on_host: whether the caches lie in host memory from the start.
    """

    def __init__(
        self, row: RefreshingRow, blocks: int, store: Store | None = None, *, on_host: bool = False
    ) -> None:
        super().__init__(store, on_host=on_host)
        self._row, self._blocks = row, blocks
        self._caches = tuple(row.step_caches)
        for step_cache in self._caches:
            self._place(step_cache, blocks)
        self._on_device = StepCacheEntry(StepCacheLoad(self._sizes(()), DEVICE.name, ()), [])
        self.entry: StepCacheEntry | None = None

    def entry_at(
        self, step: int, *, heads: Heads | None = None, by_rank: bool = False
    ) -> StepCacheEntry | None:
        """Return the entry that `step` reads between refresh steps. None: the step has to compute
        all tokens, because the cache was lost with a rank or has another share.
        """
        self._follow_row()
        share = None if heads is None else heads[:2]
        complete = [
            step_cache.whole(share, by_rank=by_rank) for step_cache in self._row.step_caches
        ]
        self.entry = self._entry() or self._on_device if all(complete) else None
        return self.entry

    def entry_beside_template(self, *, reads: bool) -> StepCacheEntry | None:
        """Return what a step reads from host memory beside its template; None: nothing.

        Args:
            reads: whether the step reads refresh steps, too, and not only a residual correction.
        """
        self._follow_row()
        self.entry = self._entry(reads=reads)
        return self.entry

    def _follow_row(self) -> None:
        """Let caches that the row has begun anew, after a LoRA came late or it moved here, lie
        where those before did.
        """
        caches = tuple(self._row.step_caches)
        if caches == self._caches:
            return
        for before, step_cache in zip(self._caches, caches, strict=True):
            step_cache.take_place_of(before)
        self._caches = caches

    def look_ahead(self, step: int) -> None:
        """Do nothing: a step cache has one entry."""

    def controlling_error(self, step: int) -> float | None:
        """Return the lookahead error at a step just taken, if the row's next refresh step depends
        on it; None: it does not, or the step was none. Waits until the device has computed it.
        """
        [first, *_] = self._row.step_caches
        return None if first.schedule.control is None else first.errors.by_step().get(step)

    def refresh_at(self, schedule: RefreshSchedule) -> None:
        """Follow another schedule from the next step on."""
        for step_cache in self._row.step_caches:
            step_cache.schedule = schedule

    def lose(self) -> None:
        super().lose()
        self.entry = None

    def _entry(self, *, reads: bool = True) -> StepCacheEntry | None:
        """Return what a step reads from host memory; None: nothing."""
        hosts = tuple(
            [host for cache in self._row.step_caches for host in cache.hosts(reads=reads)]
        )
        if not hosts:
            return None
        return StepCacheEntry(StepCacheLoad(self._sizes(hosts), HOST.name, hosts), self._stalls)

    def _sizes(self, hosts: Sequence[HostCache]) -> Floats:
        sizes = sum((host.sizes() for host in hosts), np.zeros((self._blocks, len(PARTS))))
        sizes[:, _HIDDEN] = np.inf
        return sizes
