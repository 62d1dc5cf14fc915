"""A row's own anchors: what its own dense steps leave for the steps between them.

At an anchor the row computes all tokens, as a dense row does, and keeps what each block's attention
had of the tokens that the steps between do not compute: the inactive ones and, if it is to leave
that out, too, the text. Until the next anchor their keys and values lie on a line through those of
the last two anchors, over sigma; so does what a UNet's stacks make of them. So the edit needs no
template, no store, and no entries that know its adapters. (FlashPS §3.1 primes templates;
TaylorSeer foretells a whole model's features so.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from maskserve_core.planning.flops import Floats
from maskserve_core.planning.own_anchors import OwnRule, clock_steps
from maskserve_engine.batch.packing import InactiveTokens, RowInput
from maskserve_engine.cache.entries import PARTS, Coded, encode
from maskserve_engine.cache.store import Handle
from maskserve_engine.layers.scatter_kv import KvSource

_HIDDEN = PARTS.index("h")


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """At which steps of a row what is its own is renewed, and how it is kept between them."""

    anchors: frozenset[int]
    """Steps that compute all tokens, of a row that reads no template or in its ControlNets."""
    format: str
    """Storage format of what they leave."""
    text: bool
    """Whether the other steps leave the text out, too."""
    extrapolates: bool = True
    """Whether keys and values follow the line; else the last anchor's hold."""

    @classmethod
    def of(cls, rule: OwnRule, steps: int) -> OwnPlan:
        """Of a row of so many steps that reads a template."""
        return cls(clock_steps(steps, rule.stride), rule.format, rule.text)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A part of one block."""

    step: int
    """Of the row, that has left it."""
    parts: tuple[Coded, ...]
    """[T + m, width] each; of `kv` keys and values."""
    slopes: tuple[Coded, ...] = ()
    """Their change since the anchor before; none after the first."""


class OwnAnchors:
    """Of one pass of a row: what its anchors leave (`packing.Capture`).

    Args:
        plan: of the edit.
    """

    def __init__(self, plan: OwnPlan) -> None:
        self.plan = plan
        self.text = plan.text
        """Whether it sees the text's keys and values, ahead of the image's."""
        self._step = self._computed = self._total = 0
        self._kept: dict[tuple[int, str], _Kept] = {}
        """By block and part."""
        self._sigmas: tuple[float, ...] = ()
        """Of the last two anchors, the later one last."""

    @property
    def whole(self) -> bool:
        """Whether every block has something to go on with."""
        return bool(self._sigmas)

    @property
    def nbytes(self) -> int:
        kept = self._kept.values()
        return sum(coded.nbytes for each in kept for coded in (*each.parts, *each.slopes))

    def anchor(self, step: int, computed: int, total: int) -> OwnAnchors:
        """Itself, about to see an anchor.

        Args:
            step: of the row.
            computed: image tokens that other steps compute, the first ones.
            total: image tokens.
        """
        self._step, self._computed, self._total = step, computed, total
        return self

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nobody reads it."""

    def keys_values(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Keep a block's.

        Args:
            block: its number.
            keys: [T + N, heads, head_dim], or of the image tokens alone where the text is computed.
            values: likewise.
        """
        self._keep(block, "kv", (keys.flatten(1), values.flatten(1)))

    def _keep(self, block: int, part: str, tensors: Sequence[Tensor]) -> None:
        """Keep [tokens, width] each of a part of a block.

        A step that is tried again, as one of a batch that failed is, finds what it has found: what
        it has left stays.
        """
        kept = self._kept.get((block, part))
        if kept is not None and kept.step == self._step:
            return
        new = [self._others(block, each) for each in tensors]
        slopes = []
        if kept is not None and self.plan.extrapolates:
            for coded, now in zip(kept.parts, new, strict=True):
                before = torch.empty_like(now)
                coded.into(before)
                slopes.append(encode(now - before, self.plan.format))
        parts = tuple([encode(each, self.plan.format) for each in new])
        self._kept[block, part] = _Kept(self._step, parts, tuple(slopes))

    def _others(self, block: int, x: Tensor) -> Tensor:
        """[T + m, width] of the tokens that other steps do not compute."""
        text = len(x) - self._total
        return torch.cat((x[:text], x[text + self._computed :]))

    def passed(self, sigma: float) -> None:
        """An anchor at `sigma` is whole; told once more of a step that is tried again."""
        if self._sigmas[-1:] != (sigma,):
            self._sigmas = (*self._sigmas[-1:], sigma)

    def weight(self, sigma: float) -> float:
        """How many times the change between the last two anchors has come since, at `sigma`."""
        if len(self._sigmas) < 2 or not self.plan.extrapolates:
            return 0.0
        before, last = self._sigmas
        return (last - sigma) / (before - last) if before != last else 0.0

    def standing(self, sigma: float) -> object:
        """Stands for what `source` says at `sigma`; the same object where that is the same."""
        return sigma if self.weight(sigma) else self._sigmas

    def source(self, block: int, sigma: float, part: str = "kv") -> KvSource:
        """A part of a block, of the tokens that a step at `sigma` does not compute."""
        kept, weight = self._kept[block, part], self.weight(sigma)
        return KvSource(kept.parts, None, kept.slopes if weight else (), weight)


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
    """`packing.InactiveTokens` of a pass that leaves its text out and reads a template."""

    parts: tuple[AnchoredTokens, InactiveTokens]
    """The text, and the template's."""

    @property
    def cis(self) -> Tensor:
        text, others = self.parts
        return torch.cat((text.cis, others.cis))

    def tokens(self) -> Tensor:
        raise AssertionError("a step that leaves the text out runs no block that needs it")

    @property
    def entry(self) -> object:
        raise AssertionError("its parts have one each")

    def source(self, block: int, part: str) -> KvSource:
        raise AssertionError("its parts have one each")


def without_text(row: RowInput, own: OwnAnchors, sigma: Callable[[], float]) -> RowInput:
    """A pass that reads a template, without its text; arguments as of `foretold`."""
    assert row.rest is not None, "a pass that computes all tokens computes its text, too"
    of_text, computed = row.cis.split((len(row.text), len(row.tokens)))
    rest = TextBeside((AnchoredTokens(own, sigma, of_text), row.rest))
    return replace(row, text=row.text[:0], cis=computed, rest=rest)


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
    rest = AnchoredTokens(own, sigma, torch.cat((of_text, cis)))
    return replace(row, text=row.text[:0], cis=computed, rest=rest)


class AnchoredRow(Protocol):
    """A row with anchors of its own, as far as a reader knows it."""

    @property
    def own(self) -> OwnAnchors | None: ...


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

    def turn_to(self, step: int, *, whole: bool = False, heads: Any = None) -> OwnEntry | None:
        """What `step` reads, which was not to be an anchor; None: it has to be one."""
        assert self._row.own is not None
        self.now = self._entry if self._row.own.whole else None
        return self.now

    def look_ahead(self, step: int) -> None:
        """Nothing has to be brought in."""

    def lose(self) -> None:
        """Nothing of it can be lost on the way."""

    def release(self) -> None:
        """The row has ended."""
        self.now = None
