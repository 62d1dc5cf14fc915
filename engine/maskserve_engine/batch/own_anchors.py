"""A row's own anchors: what its own dense steps leave for the steps between them.

At an anchor the row computes all tokens, as a dense row does, and keeps what each block's attention
had of the tokens that the steps between do not compute: the inactive ones and, if it is to leave
that out, too, the text. The row's first step is one. The others are *foreseen*: when a row arrives
at an anchor, its step computes all tokens once more, beside its own, as they will be at the next
one, if the model goes on as it has answered last. So keys and values of the steps between lie on a
line over sigma from one anchor to the next, which may bend as three of them show. Where a row
foresees nothing its anchors are steps of its own, and the steps behind the last two go on along the
line through these; so does what a UNet's stacks make of its tokens. So the edit needs no template,
no store, and no entries that know its adapters. (FlashPS §3.1 primes templates; TaylorSeer
foretells a whole model's features along a line through earlier steps.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.batch.packing import InactiveTokens, RowInput
from maskserve_engine.cache.entries import PARTS, Coded, encode
from maskserve_engine.cache.reader import Heads
from maskserve_engine.cache.store import Handle
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.scatter_kv import Change, KvSource
from maskserve_engine.planning.flops import Floats
from maskserve_engine.planning.own_anchors import OwnRule, clock_steps, foreseen_at

_log = logging.getLogger(__name__)
_HIDDEN = PARTS.index("h")
Share = Span | Literal["here", "elsewhere"] | None
"""Of a pass, what a rank has of an anchor: the keys and values of all heads (None) or, where ranks
have shared it, of some; where they have dealt its passes, whether this one is here."""


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """At which steps of a row what is its own is renewed, and how it is kept between them."""

    anchors: frozenset[int]
    """Steps of which all tokens are computed, of a row that reads no template or in its
    ControlNets; beside a template the text and the ring."""
    format: str
    """Storage format of what they leave."""
    text: bool
    """Whether the other steps leave the text out, too."""
    ring: bool = False
    """Whether these leave out the ring round the mask besides."""
    power: float = 1.0
    """Of sigma: keys and values follow a line over that; 0: the last anchor's hold."""
    lifts: bool = False
    """Of a row that reads a template: whether its dense first steps lift the entries that the
    others read."""
    bends: bool = False
    """Whether the line bends as the last three anchors show: as the parabola through them, but the
    less, the longer the way between the last two is than that before."""
    foresees: bool = False
    """Whether all anchors but the first are computed ahead, where the one before them lies."""

    @property
    def dense(self) -> frozenset[int]:
        """Steps that leave nothing out: they are anchors themselves."""
        return frozenset({0}) if self.foresees else self.anchors

    @property
    def ahead(self) -> frozenset[int]:
        """Steps that compute an anchor beside their own tokens."""
        return self.computed_at - self.dense

    @property
    def computed_at(self) -> frozenset[int]:
        """Steps that compute an anchor: their own, or one that they foresee."""
        return foreseen_at(self.anchors) if self.foresees else self.anchors

    def behind(self, step: int) -> int | None:
        """The anchor next behind a step; None: there is none."""
        return min(
            (refresh_step for refresh_step in self.anchors if refresh_step > step), default=None
        )

    @classmethod
    def of(cls, rule: OwnRule, steps: int) -> OwnPlan:
        """Of ControlNets beside a row of so many steps that reads a template."""
        return cls(clock_steps(steps, rule.stride), rule.format, rule.text, power=rule.power)


@dataclass(frozen=True, slots=True)
class AnchorLine:
    """Through the last two anchors, over a power of sigma."""

    sigmas: tuple[float, ...]
    """Theirs, the later one last; one after the first, none before."""
    power: float

    def to(self, sigma: float) -> AnchorLine:
        return AnchorLine((*self.sigmas[-1:], sigma), self.power)

    def weight(self, sigma: float) -> float:
        """How many times the change from one to the other lies between the last one and `sigma`:
        below 0 from one to the other, above 0 behind both.
        """
        return _weight(self.sigmas, self.power, sigma)


@lru_cache(maxsize=256)  # each block of each row asks at each step
def _weight(sigmas: tuple[float, ...], power: float, sigma: float) -> float:
    if len(sigmas) < 2 or not power:
        return 0.0
    earlier, last, current = (value**power for value in (*sigmas, sigma))
    return (last - current) / (earlier - last) if earlier != last else 0.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A part of one block."""

    step: int
    """Of the row, that has left it."""
    line: AnchorLine
    parts: tuple[Coded, ...]
    """[T + m, width] each; of `kv` keys and values."""
    slopes: tuple[Coded, ...] = ()
    """Their change since the anchor before; none after the first."""
    bends: tuple[Coded, ...] = ()
    """How they leave that line, `weight` · (1 + `weight`) times; none before the third."""


class OwnAnchors:
    """Of one pass of a row: what its anchors leave (`packing.Capture`).

    Args:
        plan: of the edit.
    """

    def __init__(self, plan: OwnPlan) -> None:
        self.plan = plan
        self.text = plan.text
        """Whether it sees the text's keys and values, ahead of the image's."""
        self._step = self._total = 0
        self._kept_tokens = slice(0)
        """Of the image's."""
        self._words: int | None = None
        """Text tokens, of a row that reads a template: these it keeps, and the ring."""
        self._kept: dict[tuple[int, str], _Kept] = {}
        """By block and part."""
        self._line = AnchorLine((), plan.power)
        """Through the anchors that are whole."""
        self._at = 0.0
        """Sigma of the anchor that it is about to see."""
        self._reads = False
        """Whether the row reads what it has in the step that it is about to see."""
        self._first: tuple[int, float] = (0, 0.0)
        """Of a row that reads a template, in the step that it is about to see: inactive tokens,
        the last ones, and sigma; of steps that compute all tokens."""
        self._found: dict[int, tuple[Coded, ...]] = {}
        """[m, width] each, by block: keys and values of these tokens."""
        self._lacked: dict[int, tuple[Coded, ...]] = {}
        """The same, less what the template's entry had of them."""
        self._dtype = torch.float32
        self._has: Share = None
        self._seen: Share = None
        """The same of what it sees now."""
        self._lost: int | None = None
        """The last step that there was no memory for."""

    def whole(self, heads: Span | None = None, *, dealt: bool = False) -> bool:
        """Whether every block has something to go on with, for a rank of these heads or all, or for
        ranks that deal passes.
        """
        enough: tuple[Share, ...] = ("here", "elsewhere") if dealt else (None, heads)
        return bool(self._line.sigmas) and self._has in enough

    @property
    def nbytes(self) -> int:
        groups = [(*group.parts, *group.slopes, *group.bends) for group in self._kept.values()]
        groups += [*self._found.values(), *self._lacked.values()]
        return sum(coded.nbytes for group in groups for coded in group)

    def anchor(
        self, step: int, sigma: float, computed: int, total: int, *, reads: bool = False
    ) -> OwnAnchors:
        """Itself, about to see an anchor.

        Args:
            step: of the row.
            sigma: of the anchor.
            computed: image tokens that other steps compute, the first ones.
            total: image tokens.
            reads: whether the anchor is foreseen, and the step reads what the ones before left.
        """
        self._step, self._at, self._total = step, sigma, total
        self._kept_tokens = slice(computed, total)
        self._reads, self._words, self._seen = reads, None, None
        return self

    @property
    def reaches(self) -> float:
        """Sigma of the last anchor that is whole."""
        return self._line.sigmas[-1]

    def beside(
        self,
        step: int,
        words: int,
        ring: slice,
        others: int,
        sigma: float,
        *,
        reads: bool = False,
    ) -> OwnAnchors:
        """Itself, about to see a step of a row that reads a template.

        Args:
            step: of the row.
            words: text tokens.
            ring: of the image tokens, those that are left out with the text.
            others: image tokens that other steps do not compute, the last ones; 0: this one does
                not, either.
            sigma: of the step.
            reads: as of `anchor`.
        """
        if self.plan.lifts:
            self._first = (others, sigma) if others else (0, self._first[1])
        self.anchor(step, sigma, 0, 0, reads=reads)
        self._words, self._kept_tokens = words, ring
        return self

    def lifted(self, block: int, entry: KvSource, sigma: float) -> KvSource:
        """A template's entry of a block, with what the row's own first step found there that the
        entry lacked. The noisier a step, the more of it: template(s) + s / s0 (own(s0) - template).

        Args:
            block: its number.
            entry: as the step reads it.
            sigma: of the step.
        """
        first_kv = self._found.pop(block, None)
        if first_kv is not None:
            self._lacked[block] = tuple(map(self._less, first_kv, entry.taken()))
        if block not in self._lacked:
            return entry
        return replace(entry, changes=(Change(self._lacked[block], sigma / self._first[1]),))

    def _less(self, found: Coded, entry: Coded) -> Coded:
        """The first less the second."""
        decoded = torch.empty(
            2, len(found.data), found.channels, dtype=self._dtype, device=found.data.device
        )
        found.into(decoded[0])
        entry.into(decoded[1])
        return encode(decoded[0] - decoded[1], self.plan.format)

    def sees(self, share: Share) -> None:
        """Of the next anchor, which ranks share, it sees this alone."""
        self._seen = share

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nobody reads it."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Keep a block's.

        Args:
            block: its number.
            keys: [T + N, heads, head_dim], or of the image tokens alone where the text is computed.
            values: likewise.
        """
        kv = keys.flatten(1), values.flatten(1)
        cached_count = self._first[0]
        if cached_count:
            self._dtype = keys.dtype
            encoded = [encode(tensor[-cached_count:], self.plan.format) for tensor in kv]
            self._found[block] = tuple(encoded)
        if not self.plan.lifts or self.text:
            self._keep(block, "kv", kv)

    def _keep(self, block: int, part: str, tensors: Sequence[Tensor]) -> None:
        """Keep [tokens, width] each of a part of a block.

        A step that is tried again, as one of a batch that failed is, finds what it has found: what
        it has left stays.
        """
        if self._reads and self._seen != self._has:
            self._lost = self._step  # it reads the share that it has, until the step is taken
        self._turn()
        previous = self._kept.get((block, part))
        if self._lost == self._step or (previous is not None and previous.step == self._step):
            return
        try:
            self._kept[block, part] = self._made(
                previous, [self._others(block, x) for x in tensors]
            )
        except torch.OutOfMemoryError:
            _log.warning("no memory for what an edit's step %d leaves", self._step)
            self._lose()

    def _made(self, kept: _Kept | None, new: Sequence[Tensor]) -> _Kept:
        """Of a part of a block, behind what was kept of it."""
        plan, slopes, bends = self.plan, [], []
        line = AnchorLine((), plan.power) if kept is None else kept.line
        if kept is not None and plan.power:
            pairs = zip(kept.parts, new, strict=True)
            changes = [new_tensor - self._decoded(coded, new_tensor) for coded, new_tensor in pairs]
            slopes = [encode(tensor, plan.format) for tensor in changes]
            reach = line.weight(self._at)
            bent = kept.slopes if plan.bends and reach > 0 else ()
            for coded, change in zip(bent, changes, strict=False):
                # What the line through the last two has missed of this one. (A parabola adds it
                # `reach` times that often: too much of what noise has done before.)
                missed = torch.sub(change, self._decoded(coded, change), alpha=reach)
                bends.append(encode(missed.div_(1.0 + reach), plan.format))
        parts = tuple([encode(tensor, plan.format) for tensor in new])
        return _Kept(self._step, line.to(self._at), parts, tuple(slopes), tuple(bends))

    @staticmethod
    def _decoded(coded: Coded, like: Tensor) -> Tensor:
        out = torch.empty_like(like)
        coded.into(out)
        return out

    def _lose(self) -> None:
        """Keep nothing of a step: others compute all tokens until one finds room. What it reads
        itself stays until it is taken.
        """
        self._lost = self._step
        if not self._reads:
            self._clear()

    def _turn(self) -> None:
        """Begin anew with what it sees, if that is of another share: no line leads there."""
        if self._seen != self._has and not self._reads:
            self._clear()
            self._has = self._seen

    def _clear(self) -> None:
        self._kept.clear()
        self._line = AnchorLine((), self.plan.power)

    def _others(self, block: int, x: Tensor) -> Tensor:
        """[T + m, width] of the tokens that other steps do not compute."""
        # Of a row that reads a template, blocks that compute the others show them, too.
        text = len(x) - self._total if self._words is None else self._words
        return torch.cat((x[:text], x[text:][self._kept_tokens]))

    def passed(self, sigma: float) -> None:
        """An anchor at `sigma` is whole; told once more of a step that is tried again."""
        self._turn()
        if self._lost == self._step:
            self._clear()
        elif self._line.sigmas[-1:] != (sigma,):
            self._line = self._line.to(sigma)

    def weight(self, sigma: float) -> float:
        """How many times the change between the last two anchors lies between the last one and
        `sigma`.
        """
        return self._line.weight(sigma)

    def standing(self, sigma: float) -> object:
        """Stands for what `source` says at `sigma`; the same object where that is the same."""
        return sigma if self.weight(sigma) else self._line

    @property
    def lifts(self) -> bool:
        """Whether `lifted` changes anything."""
        return bool(self._found or self._lacked)

    def source(self, block: int, sigma: float, part: str = "kv") -> KvSource:
        """A part of a block, of the tokens that a step at `sigma` does not compute."""
        cached_part = self._kept[block, part]
        weight = cached_part.line.weight(sigma)
        along = (Change(cached_part.slopes, weight),) if weight else ()
        across = (
            (Change(cached_part.bends, weight * (1.0 + weight)),)
            if along and cached_part.bends
            else ()
        )
        return KvSource(cached_part.parts, None, along + across)


@dataclass(frozen=True, slots=True)
class AnchoredTokens:
    """`packing.InactiveTokens` of a pass between anchors: with its text, if that is left out."""

    own: OwnAnchors
    sigma: Callable[[], float]
    """Of the step that is taken now."""
    cis: Tensor

    @property
    def parts(self) -> Sequence[InactiveTokens]:
        return (self,)

    def tokens(self) -> Tensor:
        raise AssertionError("between its anchors a row runs no block that needs hidden states")

    @property
    def entry(self) -> object:
        """Another one at each step where keys and values go on along their line."""
        return self.own.standing(self.sigma())

    def source(self, block: int, part: str) -> KvSource:
        assert part == "kv", "anchors leave keys and values alone"
        return self.own.source(block, self.sigma())


@dataclass(frozen=True, slots=True)
class TextBeside:
    """`packing.InactiveTokens` of a pass that leaves its text and its ring out and reads a
    template.
    """

    parts: tuple[AnchoredTokens, InactiveTokens]
    """The text with the ring, and the template's."""

    @property
    def cis(self) -> Tensor:
        text_tokens, template_tokens = self.parts
        return torch.cat((text_tokens.cis, template_tokens.cis))

    def tokens(self) -> Tensor:
        raise AssertionError("a step that leaves the text out runs no block that needs it")

    @property
    def entry(self) -> object:
        raise AssertionError("its parts have one each")

    def source(self, block: int, part: str) -> KvSource:
        raise AssertionError("its parts have one each")


def without_text(
    row: RowInput, ring: Tensor, own: OwnAnchors, sigma: Callable[[], float]
) -> RowInput:
    """A pass that reads a template, without its text.

    Args:
        row: its text and the computed tokens, without the ring.
        ring: [r, head_dim / 2] of that.
        own: what its anchors have left.
        sigma: of the step that is taken now.
    """
    assert row.rest is not None, "a pass that computes all tokens computes its text, too"
    of_text, computed = row.cis.split((len(row.text), len(row.tokens)))
    cached_tokens = TextBeside((AnchoredTokens(own, sigma, torch.cat((of_text, ring))), row.rest))
    return replace(row, text=row.text[:0], cis=computed, rest=cached_tokens)


def foretold(row: RowInput, cis: Tensor, own: OwnAnchors, sigma: Callable[[], float]) -> RowInput:
    """A pass between its anchors, from one that computes its text.

    Args:
        row: its text and the computed tokens.
        cis: [m, head_dim / 2] of the other tokens.
        own: what its anchors have left.
        sigma: of the step that is taken now.
    """
    if not own.text:
        return replace(row, rest=AnchoredTokens(own, sigma, cis))
    of_text, computed = row.cis.split((len(row.text), len(row.tokens)))
    cached_tokens = AnchoredTokens(own, sigma, torch.cat((of_text, cis)))
    return replace(row, text=row.text[:0], cis=computed, rest=cached_tokens)


class AnchoredRow(Protocol):
    """A row with anchors of its own, as far as a reader knows it."""

    @property
    def anchors(self) -> Sequence[OwnAnchors]:
        """Of each of its passes."""
        ...


@dataclass(slots=True)
class OwnLoad:
    """`executor.LoadState` of what is there already: all parts but hidden states."""

    sizes: Floats
    missing: Floats
    tier: str = "device"
    lost: None = None


@dataclass(slots=True)
class OwnEntry:
    """What a row reads between its anchors; in the place of a `cache.store.Handle`."""

    load: OwnLoad
    stalls: list[Any] = field(default_factory=list)
    """Nobody waits for it."""

    def want(self, wants: Iterable[tuple[int, str]], turn: int) -> None:
        """It is there."""


Entry = Handle | OwnEntry
"""What a row's step may read."""


class OwnReader:
    """In the place of a `cache.reader.EntryReader`: a row's way to what its anchors have left.

    Args:
        row: with anchors of its own.
        blocks: that an entry has, what lies behind the model's own among them.
    """

    loaded: Mapping[str, int] = MappingProxyType({})
    """Bytes that travelled: none."""
    stalled = 0.0

    def __init__(self, row: AnchoredRow, blocks: int) -> None:
        self._row = row
        sizes = np.zeros((blocks, len(PARTS)))
        sizes[:, _HIDDEN] = np.inf
        self._entry = OwnEntry(OwnLoad(sizes, sizes))
        self.now: OwnEntry | None = None

    def turn_to(
        self, step: int, *, heads: Heads | None = None, dealt: bool = False
    ) -> OwnEntry | None:
        """What `step` reads, which was not to be an anchor; None: it has to be one, as where a rank
        was lost with what it kept, or others share the row.

        Args:
            step: of the row.
            heads: as of `EntryReader.turn_to`.
            dealt: whether ranks deal the passes of the step.
        """
        share = None if heads is None else heads[:2]
        complete = [step_cache.whole(share, dealt=dealt) for step_cache in self._row.anchors]
        self.now = self._entry if all(complete) else None
        return self.now

    def look_ahead(self, step: int) -> None:
        """Nothing has to be brought in."""

    def lose(self) -> None:
        """Nothing of it can be lost on the way."""

    def release(self) -> None:
        """The row has ended."""
        self.now = None
