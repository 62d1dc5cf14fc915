"""Bytes of cached entries, per block and storage format (design §2 "entry", §4 "Formats")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maskserve_engine.planning.flops import Floats, ModelWork


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How one activation is stored."""

    name: str
    bits: float
    """Bits per value, scales of single tokens included."""
    scale_bytes: int = 0
    """Bytes of a channel's scale; 0: no scales."""

    def bytes_of(self, tokens: float, channels: int) -> float:
        scales = self.scale_bytes if tokens else 0
        return channels * (tokens * self.bits / 8 + scales)


FORMATS = {
    "float32": EntryFormat("float32", 32),
    "bfloat16": EntryFormat("bfloat16", 16),
    "float16": EntryFormat("float16", 16),
    "int8": EntryFormat("int8", 8, scale_bytes=4),
    "float8": EntryFormat("float8", 8, scale_bytes=4),
    # A byte holds two values; each token has a 16-bit scale per 32 channels.
    "int4": EntryFormat("int4", 4.5, scale_bytes=4),
}
"""Formats by name; `model` in the configuration stands for the model's data type."""


def block_bytes(
    work: ModelWork, inactive: Sequence[tuple[float, ...]], fmt: EntryFormat, *, copies: int = 1
) -> Floats:
    """Return the bytes that rows load for each block: columns `h` and `kv`, `[blocks, 2]`.

    Args:
        work: the model at the image's size.
        inactive: cached tokens per level, for each row that needs its own entry (rows that share an
            entry are given once).
        fmt: storage format.
        copies: activations kept per token: 2 if both halves of a CFG pair are cached apart.
    """
    per_channel = np.array(
        [sum(fmt.bytes_of(row[level], 1) for row in inactive) for level in range(len(work.tokens))]
    )
    h = per_channel[work.levels] * work.widths * float(copies)
    return np.stack((h, 2.0 * h), axis=1)


def end_bytes(work: ModelWork, loads: Floats) -> Floats:
    """Return the bytes of the `h` entries that restore each stack's output of cached tokens,
    `[stacks]`.

    Zeros where the model needs none (FLUX: the last output of cached tokens is never used). `loads`
    is the result of `block_bytes`; a stack is as wide at its end as at its last block.
    """
    return loads[work.ends, 0] if work.restore_ends else np.zeros(len(work.ends))


def entry_bytes(work: ModelWork, kind: str, fmt: EntryFormat, *, copies: int = 1) -> float:
    """Return the bytes of one anchor's entry of one template, with all tokens and stack ends.

    A UNet's stack begins with all tokens at hand, so `h` of its first block is not kept.

    Args:
        work: the model at the image's size.
        kind: `h` or `kv`.
        fmt: storage format.
        copies: activations kept per token (see `block_bytes`).
    """
    loads = block_bytes(work, [tuple(float(n) for n in work.tokens)], fmt, copies=copies)
    block_sizes = loads[:, ("h", "kv").index(kind)].copy()
    if kind == "h" and work.restore_ends:
        block_sizes[work.starts] = 0.0
    return float(block_sizes.sum() + end_bytes(work, loads).sum()) + map_bytes(
        work, fmt, copies=copies
    )


def map_bytes(work: ModelWork, fmt: EntryFormat, *, copies: int = 1) -> float:
    """Return the bytes of the feature maps that one anchor keeps for rows that convolve tiles, with
    the means and variances of their groups (float32).

    Args:
        work: the model at the image's size.
        fmt: storage format.
        copies: activations kept per token (see `block_bytes`).
    """
    return sum(
        fmt.bytes_of(copies * work.tokens[feature_map.level], feature_map.width)
        + 8.0 * copies * feature_map.groups
        for feature_map in work.maps
    )


def still_bytes(work: ModelWork, fmt: EntryFormat) -> float:
    """Return the bytes that a template keeps once for all its anchors: keys and values of pictures
    that do not depend on a row.
    """
    return float(block_bytes(work, [(float(work.still),)], fmt)[:, 1].sum()) if work.still else 0.0


def stored_bytes(
    work: ModelWork, kinds: Sequence[frozenset[str]], fmt: EntryFormat, *, copies: int = 1
) -> float:
    """Return `entry_bytes` where block i keeps `kinds[i]`: any of "h" and "kv"."""
    loads = block_bytes(work, [tuple(float(n) for n in work.tokens)], fmt, copies=copies)
    block_sizes = [
        ("h" in kind) * h + ("kv" in kind) * kv for kind, (h, kv) in zip(kinds, loads, strict=True)
    ]
    return float(sum(block_sizes) + end_bytes(work, loads).sum()) + map_bytes(
        work, fmt, copies=copies
    )
