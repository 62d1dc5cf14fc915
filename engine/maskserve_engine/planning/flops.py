"""Counted work of one denoising step: FLOPs per block and kind, from a model's config only.

A multiply-add counts as two FLOPs; norms, activations, softmax and rotary embeddings count as
nothing, as in torch's own counter. FlashPS Table 1 gives the leading terms; here are all of them,
text tokens included, because at small masks the text is a third of what a cached row computes.

Every block's work is linear in six sums over the rows of a batch, so a batch costs one small
product however many rows it holds:

    row      rows                           modulation, once per row
    token    image tokens computed          projections, feed-forward
    text     text tokens                    the text stream, or K and V of cross-attention
    spare    cached image tokens            K and V projected from `h` (kind `project` alone)
    pair     (query, key) pairs             self-attention scores and values
    cross    (image query, text key) pairs  cross-attention
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add, is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskserve_engine.planning.layer_table import (
    Layers,
    Products,
    Shape,
    Shapes,
    layer_flops,
    of_model,
    shape_flops,
)

Floats = NDArray[np.float64]

KINDS = ("dense", "project", "kv")
"""Kinds of a block, in the column order of every per-kind array (design §2, "plan")."""
DENSE, PROJECT, KV = range(3)

TERMS = ("row", "token", "text", "spare", "pair", "cross")
_SPARE, _PAIR = TERMS.index("spare"), TERMS.index("pair")


@dataclass(frozen=True, slots=True)
class BlockWork:
    """FLOPs of one transformer block per unit of each term, and the shape of its entry."""

    name: str
    """Dotted name of its module."""
    stack: int
    """Index of the stack the block belongs to, in the order they run."""
    level: int
    """Index into the resolutions of the model: 0 for FLUX, the down-sampling depth for UNets."""
    width: int
    """Channels of `h`; K and V are as wide each."""
    row: float = 0.0
    token: float = 0.0
    text: float = 0.0
    spare: float = 0.0
    pair: float = 0.0
    cross: float = 0.0
    launches: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Kernels that it takes on CUDA, per kind; about as many for any number of rows of a call."""
    layers: Layers = field(default_factory=dict, repr=False, compare=False)
    """Its linear layers, by name inside the block."""


@dataclass(frozen=True, slots=True)
class FixedWork:
    """FLOPs outside the blocks that every row pays, at one place of the step."""

    row: float = 0.0
    """Per row."""
    token: float = 0.0
    """Per image token computed at level 0 (FLUX embedder and final layer)."""
    text: float = 0.0
    """Per text token."""
    positions: tuple[float, ...] = ()
    """Per convolved position of each level; empty where nothing is convolved (FLUX)."""
    launches: float = 0.0
    """Kernels on CUDA, as in `BlockWork`."""
    layers: Layers = field(default_factory=dict, repr=False, compare=False)
    """Linear layers, by dotted name."""
    convolutions: tuple[Shapes, ...] = field(default=(), repr=False, compare=False)
    """Convolutions of each level, by dotted name."""

    @classmethod
    def of(
        cls,
        layers: Layers,
        convolutions: tuple[Shapes, ...] = (),
        *,
        launches: float = 0.0,
        products: Products = of_model,
    ) -> FixedWork:
        """Return the FLOPs of these layers; `products` as in `layer_flops`."""
        return cls(
            **layer_flops(layers, products),
            positions=tuple(shape_flops(shapes, products) for shapes in convolutions),
            launches=launches,
            layers=layers,
            convolutions=convolutions,
        )


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """Input of a GroupNorm or a strided convolution of a UNet. A row whose convolutions run on a
    tile reads the template's map round the tile.
    """

    level: int
    width: int
    groups: int
    """Number of groups of the model's norms."""
    strided: bool
    """Whether the convolution that reads it leads to the next level."""
    block: int
    """Number of the first transformer block after it; the number of blocks: none follows."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens of one cached row.

    Args:
        active: computed image tokens per level; floats are allowed for limits.
        text: computed text tokens.
        convolved: positions per level that its convolutions compute; None: all.
        text_read: further text tokens whose keys and values it reads.
    """

    active: tuple[float, ...]
    text: float
    convolved: tuple[float, ...] | None = None
    text_read: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraFlops:
    """FLOPs that the LoRAs of a batch's rows add to its step, by block and by place outside of the
    blocks.
    """

    blocks: Floats
    """`[blocks, len(KINDS)]`"""
    fixed: Floats
    """`[2, stacks + 1]` outside the blocks: of dense rows, and of cached ones."""

    @classmethod
    def count(cls, loras: Iterable[ModelWork], totals: Totals) -> LoraFlops:
        """Return the FLOPs that these LoRAs, at least one, add to all rows of `totals`."""
        parts = [
            cls(
                lora.block_flops(totals),
                np.stack((lora.fixed_flops(totals, dense=True), lora.fixed_flops(totals))),
            )
            for lora in loras
        ]
        return reduce(add, parts)

    def __add__(self, other: LoraFlops) -> LoraFlops:
        return LoraFlops(self.blocks + other.blocks, self.fixed + other.fixed)

    @property
    def cached(self) -> float:
        """FLOPs added to rows whose blocks all load their keys and values."""
        return float(self.blocks[:, KV].sum() + self.fixed[1].sum())


@dataclass(frozen=True, slots=True)
class Totals:
    """A batch reduced to the sums its cost depends on; arrays are `[levels, len(TERMS)]`."""

    rows: int
    dense: Floats
    cached: Floats
    active: tuple[float, ...]
    """Computed tokens of all rows, per level."""
    text: float
    convolved: tuple[float, ...]
    """Positions that all rows' convolutions compute when they run cached, per level."""
    added: LoraFlops | None = None
    """FLOPs that the rows' LoRAs add; None: there are none."""
    alone: int = 0
    """Calls of the model by rows that take one each."""
    together: bool = True
    """Whether the other rows, which share a call, are any."""

    def __add__(self, other: Totals) -> Totals:
        """Return the sums of both batches."""
        added = [part for part in (self.added, other.added) if part is not None]
        return Totals(
            self.rows + other.rows,
            self.dense + other.dense,
            self.cached + other.cached,
            tuple(a + b for a, b in zip(self.active, other.active, strict=True)),
            self.text + other.text,
            tuple(a + b for a, b in zip(self.convolved, other.convolved, strict=True)),
            reduce(add, added) if added else None,
            self.alone + other.alone,
            self.together or other.together,
        )

    def with_loras(self, loras: Sequence[ModelWork]) -> Totals:
        """Return the same rows with these LoRAs and no others (`lora_work`)."""
        bare = replace(self, added=None)
        return replace(bare, added=LoraFlops.count(loras, bare)) if loras else bare

    @staticmethod
    def sum_of(totals: Iterable[Totals]) -> Totals:
        """Return the sums of all batches, of which there is at least one."""
        return reduce(add, totals)


@dataclass(frozen=True)
class ModelWork:
    """Work of one model at one image size; `copies` evaluations per row (2 under CFG)."""

    family: str
    blocks: tuple[BlockWork, ...]
    tokens: tuple[int, ...]
    """Image tokens per level, those of reference pictures included."""
    joint: bool
    """Whether text tokens sit in self-attention (FLUX) or only in cross-attention (UNets)."""
    before: tuple[FixedWork, ...]
    """Work before each stack; as many as stacks."""
    after: FixedWork
    restore_ends: bool
    """Whether outputs of cached tokens are needed at the end of each stack (UNets)."""
    peak_row: float
    """Most numbers that one evaluation of a row holds at once, all tokens computed, without text
    and without the buffers of kernels."""
    peak_text: float
    """The same per text token."""
    peak_once: float = 0.0
    """The same of the whole batch, however many rows it has."""
    opened_row: float = 0.0
    """Numbers of one evaluation of a row, all tokens computed, in the buffers from which a recorded
    step's captures read (UNets)."""
    carried_numbers: float = 0.0
    """ControlNets: numbers that one evaluation of a row carries from step to step, those read of
    the picture and the residuals.
    """
    context: int = 0
    """Image tokens of reference pictures, which no mask covers."""
    still: int = 0
    """Fixed tokens of pictures that do not depend on the row: the row's tokens read their keys and
    values, which are computed once. They are not among `tokens`."""
    computes_text_once: bool = False
    """Whether text, too, is computed once: steps read its keys and values."""
    copies: int = 1
    heads: int = 0
    """Attention heads, which devices that share a row's tokens divide; 0: tokens cannot be shared
    (UNets).
    """
    halo: int = 0
    """Positions round a mask's box, at each level, that a cached row's convolutions compute; 0: it
    convolves the whole picture."""
    maps: tuple[FeatureMap, ...] = ()
    """Feature maps kept of a template for rows that convolve tiles, in reading order; empty without
    a halo.
    """
    coefficients: Floats = field(init=False, repr=False, compare=False)
    levels: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    widths: Floats = field(init=False, repr=False, compare=False)
    fixed: Floats = field(init=False, repr=False, compare=False)
    """FLOPs per row, token, text token and position of each level: `[stacks + 1, 3 + levels]`."""
    ends: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    starts: NDArray[np.intp] = field(init=False, repr=False, compare=False)
    launches: Floats = field(init=False, repr=False, compare=False)
    """Kernels of each block: `[blocks, len(KINDS)]`."""
    fixed_launches: float = field(init=False, repr=False, compare=False)
    """Kernels outside the blocks."""

    def __post_init__(self) -> None:
        table = [[getattr(b, term) for term in TERMS] for b in self.blocks]
        object.__setattr__(self, "coefficients", np.array(table, dtype=np.float64) * self.copies)
        object.__setattr__(self, "levels", np.array([b.level for b in self.blocks], dtype=np.intp))
        object.__setattr__(self, "widths", np.array([b.width for b in self.blocks], dtype=float))
        ends = {b.stack: i for i, b in enumerate(self.blocks)}
        object.__setattr__(self, "ends", np.array(list(ends.values()), dtype=np.intp))
        levels = len(self.tokens)
        outside = [
            (w.row, w.token, w.text, *(w.positions or (0.0,) * levels))
            for w in (*self.before, self.after)
        ]
        object.__setattr__(self, "fixed", np.array(outside, dtype=np.float64) * self.copies)
        starts = np.concatenate((np.zeros(1, np.intp), self.ends[:-1] + 1))
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "launches", np.array([b.launches for b in self.blocks]))
        fixed_launches = sum(w.launches for w in (*self.before, self.after))
        object.__setattr__(self, "fixed_launches", fixed_launches)

    def row_at(self, mask_ratio: float, text: float) -> RowTokens:
        """Return a row whose mask covers exactly `mask_ratio` of each level: a lower bound, because
        a real mask touches whole tokens and touches relatively more of them on coarser levels.
        """
        if not 0.0 <= mask_ratio <= 1.0:
            raise ValueError(f"mask_ratio: {mask_ratio} is not in 0 to 1")
        return self.square_row(tuple(mask_ratio * (n - self.context) for n in self.tokens), text)

    def square_row(self, active: tuple[float, ...], text: float) -> RowTokens:
        """Return a row whose computed tokens are a square in the middle of the picture, at each
        level.
        """
        if not self.halo:
            return RowTokens(active, text)
        convolved = [
            min(float(n), (math.sqrt(a) + 2 * self.halo) ** 2)
            for a, n in zip(active, self.tokens, strict=True)
        ]
        return RowTokens(active, text, tuple(convolved))

    def with_context(self, tokens: int) -> ModelWork:
        """Return the work with `tokens` more tokens of reference pictures."""
        [base_tokens] = self.tokens
        peak = self.peak_row * (base_tokens + tokens) / base_tokens
        context = self.context + tokens
        return replace(self, tokens=(base_tokens + tokens,), context=context, peak_row=peak)

    def with_references(self, tokens: int, *, exact: bool) -> ModelWork:
        """Return the work with `tokens` more tokens of references (`StepPicture.exact`)."""
        return replace(self, still=self.still + tokens) if exact else self.with_context(tokens)

    def totals(self, rows: Sequence[RowTokens]) -> Totals:
        """Return the sums of `rows`.

        Raises:
            ValueError: a row without one count per level, or above the level's tokens.
        """
        if self.computes_text_once:
            rows = [replace(r, text=0.0, text_read=r.text + r.text_read) for r in rows]
        dense = np.zeros((len(self.tokens), len(TERMS)))
        cached = np.zeros_like(dense)
        count, text = len(rows), float(sum(r.text for r in rows))
        sums = []
        for level, n in enumerate(self.tokens):
            active = pairs = all_pairs = cross = 0.0
            for r in rows:
                if len(r.active) != len(self.tokens) or not 0 <= r.active[level] <= n:
                    raise ValueError(f"active: {r.active} does not fit tokens {self.tokens}")
                a, joined = r.active[level], r.text if self.joint else 0.0
                active += a
                pairs += (a + joined) * (n + joined + r.text_read + self.still)
                text_keys = r.text_read if self.computes_text_once else 0.0
                all_pairs += (n + joined) * (n + joined + text_keys + self.still)
                cross += a * r.text
            cached[level] = (count, active, text, count * n - active, pairs, cross)
            dense[level] = (count, count * n, text, 0.0, all_pairs, n * text)
            sums.append(active)
        convolved = [
            sum(n if r.convolved is None else r.convolved[level] for r in rows)
            for level, n in enumerate(self.tokens)
        ]
        return Totals(count, dense, cached, tuple(sums), text, tuple(map(float, convolved)))

    @property
    def still_flops(self) -> float:
        """FLOPs of computing the keys and values of the `still` tokens, once."""
        reference_work = replace(self, tokens=(self.still,), still=0)
        return (
            reference_work.step_flops([reference_work.row_at(1.0, 0.0)], "dense")
            if self.still
            else 0.0
        )

    def block_flops(self, totals: Totals) -> Floats:
        """Return the FLOPs of every block for the whole batch, `[blocks, len(KINDS)]`."""
        cached = self.coefficients * totals.cached[self.levels]
        spare = cached[:, _SPARE]
        project = cached.sum(axis=1)
        dense = (self.coefficients * totals.dense[self.levels]).sum(axis=1)
        flops: Floats = np.stack((dense, project, project - spare), axis=1)
        if totals.added is not None:
            flops += totals.added.blocks
        return flops

    def fixed_flops(self, totals: Totals, *, dense: bool = False) -> Floats:
        """Return the FLOPs before each stack and, last, after the final one: `[stacks + 1]`."""
        if dense:
            tokens = totals.dense[0, 1]
            positions: Sequence[float] = [totals.rows * n for n in self.tokens]
        else:
            tokens, positions = totals.cached[0, 1], totals.convolved
        flops: Floats = self.fixed @ np.array((totals.rows, tokens, totals.text, *positions))
        if totals.added is not None:
            flops += totals.added.fixed[0 if dense else 1]
        return flops

    def batch_flops(
        self, cached: Totals | None, kinds: Sequence[str], dense: Totals | None
    ) -> float:
        """Return the FLOPs of one step of cached rows whose block i runs as `kinds[i]`, beside
        dense ones.
        """
        flops = 0.0
        if cached is not None:
            blocks = self.block_flops(cached)
            flops += float(blocks[np.arange(len(blocks)), [KINDS.index(k) for k in kinds]].sum())
            flops += float(self.fixed_flops(cached).sum())
        if dense is not None:
            flops += float(self.block_flops(dense)[:, DENSE].sum())
            flops += float(self.fixed_flops(dense, dense=True).sum())
        return flops

    def lora_work(self, numbers: Mapping[str, float]) -> ModelWork:
        """Return the work that a LoRA adds, by the numbers in its factors: each takes part in one
        multiply-add wherever its layer runs.

        Args:
            numbers: numbers by the layer's dotted name. Layers that run once per edit add nothing.
        """

        def products(name: str, _: Shape) -> float:
            return numbers.get(name, 0.0)

        def block_work(block: BlockWork) -> BlockWork:
            flops = layer_flops(
                block.layers, lambda name, shape: products(f"{block.name}.{name}", shape)
            )
            return BlockWork(
                block.name, block.stack, block.level, block.width,
                launches=block.launches, layers=block.layers, **flops,
            )  # fmt: skip

        def fixed_work(work: FixedWork) -> FixedWork:
            return FixedWork.of(work.layers, work.convolutions, products=products)

        return replace(
            self,
            blocks=tuple(map(block_work, self.blocks)),
            before=tuple(map(fixed_work, self.before)),
            after=fixed_work(self.after),
        )

    def typical_lora(self) -> tuple[ModelWork, int]:
        """Return the additional work of a rank-1 LoRA on every linear layer of the blocks except
        modulation, and the bytes of its file in half precision.
        """
        numbers = {
            f"{block.name}.{name}": sum(shape)
            for block in self.blocks
            for term in ("token", "text")
            for name, shape in block.layers.get(term, {}).items()
        }
        return self.lora_work(numbers), 2 * int(sum(numbers.values()))

    def batch_launches(self, kinds: Sequence[str]) -> float:
        columns = [KINDS.index(kind) for kind in kinds]
        return float(self.launches[np.arange(len(columns)), columns].sum()) + self.fixed_launches

    def step_flops(self, rows: Sequence[RowTokens], kind: str = "kv") -> float:
        """Return the FLOPs of one step of `rows` with every block run as `kind`."""
        totals = self.totals(rows)
        blocks = self.block_flops(totals)[:, KINDS.index(kind)].sum()
        return float(blocks + self.fixed_flops(totals, dense=kind == "dense").sum())

    def attention_flops(self, row: RowTokens, kind: str) -> float:
        """Return the FLOPs of self-attention's scores and values in a row's step."""
        totals = self.totals([row])
        pairs = (totals.dense if kind == "dense" else totals.cached)[self.levels, _PAIR]
        return float(self.coefficients[:, _PAIR] @ pairs)


class _Batch(NamedTuple):
    counted: Sequence[Totals]
    reads: Sequence[bool]
    kinds: Sequence[str]

    def same(self, other: _Batch) -> bool:
        return (
            self[1:] == other[1:]
            and len(self.counted) == len(other.counted)
            and all(map(is_, self.counted, other.counted))
        )


class BatchFlops:
    """Caches the FLOPs of a batch's steps while its rows and kinds are the same."""

    def __init__(self) -> None:
        self._batch, self._flops = _Batch((), (), ()), 0.0

    def of(
        self,
        work: ModelWork,
        counted: Sequence[Totals],
        reads: Sequence[bool],
        kinds: Sequence[str],
    ) -> float:
        """Return the FLOPs of one step.

        Args:
            work: work of the model at the rows' size.
            counted: sums of each row.
            reads: whether each row reads an entry.
            kinds: kind of each block, for rows that read.
        """
        batch = _Batch(counted, reads, kinds)
        if not batch.same(self._batch):
            cached, dense = (
                [
                    totals
                    for totals, reading in zip(counted, reads, strict=True)
                    if reading is is_cached
                ]
                for is_cached in (True, False)
            )
            self._batch = batch
            self._flops = work.batch_flops(
                Totals.sum_of(cached) if cached else None,
                kinds,
                Totals.sum_of(dense) if dense else None,
            )
        return self._flops
