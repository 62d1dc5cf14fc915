"""Bytes of cached entries, per block and storage format (design §2 "entry", §4 "Formats")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maskserve_core.flops import Floats, ModelWork


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How one activation is stored."""

    name: str
    bits: int
    """Bits per value."""
    scale_bytes: int = 0
    """Bytes of a channel's scale; 0: no scales."""
    group: int = 0
    """Tokens that share a scale; 0: all tokens of the entry."""

    def bytes_of(self, tokens: float, channels: int) -> float:
        """Bytes of `[tokens, channels]`; a byte holds two 4-bit values of one token."""
        values = tokens * channels * self.bits / 8
        groups = 1 if not self.group else -(-tokens // self.group)
        return values + (self.scale_bytes * channels * groups if tokens else 0)


FORMATS = {
    "float32": EntryFormat("float32", 32),
    "bfloat16": EntryFormat("bfloat16", 16),
    "float16": EntryFormat("float16", 16),
    "int8": EntryFormat("int8", 8, scale_bytes=4),
    "float8": EntryFormat("float8", 8, scale_bytes=4),
    "int4": EntryFormat("int4", 4, scale_bytes=2, group=64),
}
"""`model` in the configuration stands for the model's dtype."""


def block_bytes(
    work: ModelWork, inactive: tuple[float, ...], fmt: EntryFormat, *, copies: int = 1
) -> Floats:
    """Bytes that one row loads for each block: columns `h` and `kv`, `[blocks, 2]`.

    Args:
        work: the model at the image's size.
        fmt: storage format.
        inactive: inactive tokens per level; `work.tokens` gives the bytes of a whole entry.
        copies: activations kept per token: 2 if both halves of a CFG pair are cached apart.
    """
    sizes = {
        (b.level, b.width): (
            fmt.bytes_of(inactive[b.level], b.width),
            fmt.bytes_of(inactive[b.level], 2 * b.width),
        )
        for b in work.blocks
    }
    return np.array([sizes[b.level, b.width] for b in work.blocks]) * float(copies)


def end_bytes(
    work: ModelWork, inactive: tuple[float, ...], fmt: EntryFormat, *, copies: int = 1
) -> Floats:
    """Bytes of the `h` entry that restores each stack's inactive output, `[stacks]`.

    Zeros where the model needs none (FLUX: the last inactive output is never used).
    """
    last = {b.stack: b for b in work.blocks}
    if not work.restore_ends:
        return np.zeros(len(last))
    ends = [fmt.bytes_of(inactive[b.level], b.width) for b in last.values()]
    return np.array(ends) * float(copies)


def entry_bytes(work: ModelWork, kind: str, fmt: EntryFormat, *, copies: int = 1) -> float:
    """Bytes that one anchor of one template takes in the store, all tokens, stack ends included.

    Args:
        work: the model at the image's size.
        kind: `h` or `kv`.
        fmt: storage format.
        copies: as in `block_bytes`.
    """
    tokens = tuple(float(n) for n in work.tokens)
    blocks = block_bytes(work, tokens, fmt, copies=copies)[:, ("h", "kv").index(kind)]
    return float(blocks.sum() + end_bytes(work, tokens, fmt, copies=copies).sum())
