"""What all rows of a step give the model, packed without padding (`packing`): tokens, what enters
from outside of the model as a ControlNet's output does, and keys and values that stay in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from typing import Protocol

import torch
from torch import Tensor

from maskserve_engine.batch.packing import SparseLayout, sparse_layout
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.layers.scatter_kv import KvSource


class ResidentKV:
    """Of one batch. As long as its rows read the same entries, their inactive tokens' keys and
    values are the same at every step: only those of the computed tokens are written anew.
    """

    def __init__(self) -> None:
        self._entries: tuple[object, ...] = ()
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def keep_for(self, entries: Sequence[object]) -> None:
        """Forget all, unless the rows read these still.

        Args:
            entries: what each cached row reads at this step; held until the next one.
        """
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._blocks.clear()
        self._entries = tuple(entries)

    def get(self, block: int) -> tuple[Tensor, Tensor] | None:
        """[keys, heads, head_dim] keys and values of all rows; None: not kept."""
        return self._blocks.get(block)

    def keep(self, block: int, both: tuple[Tensor, Tensor], room: int) -> None:
        """Keep a block's keys and values, unless they take more than `room` bytes."""
        if sum(each.nbytes for each in both) <= room:
            self._blocks[block] = both


class Residuals(Protocol):
    """Of one row, for as long as it is in the batch; asked anew at every step."""

    def after(self, number: int) -> Tensor | None:
        """What is added at a place of the model; None: nothing, which costs nothing.

        FLUX: to the image tokens that the row computes, [n, width], behind block `number`, double
        blocks first.

        UNets: to a feature map of the whole picture, [C, h, w] of its level: to what the skip
        connection `number` carries to the way up, in the order these begin; behind the last one's
        number, to what leaves the middle block.
        """
        ...


class InactiveTokens(Protocol):
    """A cached row's inactive tokens: what of them the plan's blocks may need."""

    @property
    def cis(self) -> Tensor:
        """[m, head_dim / 2] complex rotary factors."""
        ...

    def tokens(self) -> Tensor:
        """[m, in_channels] their model inputs: the template noised to this timestep."""
        ...

    @property
    def entry(self) -> object:
        """What this step reads; another object where it is not what the last one read."""
        ...

    def source(self, block: int, part: str) -> KvSource:
        """Where their cached hidden states at the block's input (`h`) or keys and values (`kv`)
        lie.
        """
        ...


class Capture(Protocol):
    """Sees what the model has between its blocks of a row's image tokens."""

    def hidden(self, block: int, hidden: Tensor, /) -> None:
        """[tokens, width] at the block's input; only valid during the call."""
        ...

    def keys_values(self, block: int, keys: Tensor, values: Tensor, /) -> None:
        """[tokens, heads, head_dim]; only valid during the call."""
        ...


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row's part of a model call: what is packed with the other rows'."""

    tokens: Tensor
    """[n, in_channels] computed image tokens."""
    text: Tensor
    """[T, width] prompt embedding after context_embedder."""
    pooled: Tensor
    """[pooled width]"""
    guidance: float | None
    """Embedded guidance; None for models without it."""
    cis: Tensor
    """[T + n, head_dim / 2] complex rotary factors of text and computed tokens."""
    rest: InactiveTokens | None = None
    """A cached row's inactive tokens; None where all are computed."""
    capture: Capture | None = None
    """Of a priming row, or of one whose ControlNet computes all tokens."""
    residuals: Residuals | None = None
    """What is added to its hidden states; None: nothing."""


class Packed:
    """The inputs of all rows, without padding (`packing`)."""

    def __init__(self, rows: Sequence[RowInput]) -> None:
        self.rows = tuple(rows)
        self.rests = tuple(row.rest for row in rows)
        self.captures = tuple(row.capture for row in rows)
        self.residuals = {i: row.residuals for i, row in enumerate(rows) if row.residuals}
        """Of the rows that have some, by their number."""
        self.primes = any(capture is not None for capture in self.captures)
        self.resident_kv = ResidentKV()
        rest_cis = [rest.cis for rest in self.rests if rest is not None]
        self.layout: SparseLayout = sparse_layout(
            tuple(len(row.text) for row in rows),
            tuple(len(row.tokens) for row in rows),
            tuple(0 if rest is None else len(rest.cis) for rest in self.rests),
            rows[0].tokens.device,
        )
        self.tokens = torch.cat([row.tokens for row in rows])
        self.text = torch.cat([row.text for row in rows])
        self.pooled = torch.stack([row.pooled for row in rows])
        self.cis = torch.cat([row.cis for row in rows])
        """[N, head_dim / 2] in row order."""
        self.rest_cis = torch.cat(rest_cis) if rest_cis else None
        """[M, head_dim / 2]; None without cached rows."""
        self.guidance: Tensor | None = None
        if rows[0].guidance is not None:
            values = torch.tensor([row.guidance for row in rows])
            [guidance] = to_device([values], self.tokens.device)
            self.guidance = guidance.to(self.tokens.dtype) * 1000

    @cached_property
    def wide_cis(self) -> Tensor:
        """[N + M, head_dim / 2] in row order, inactive tokens among the others."""
        assert self.rest_cis is not None
        both = self.cis.new_empty(len(self.cis) + len(self.rest_cis), self.cis.shape[1])
        both[self.layout.core_in_rows] = self.cis
        both[self.layout.rest_in_rows] = self.rest_cis
        return both
