"""Entries with random numbers in them."""

from __future__ import annotations

import numpy as np
import torch

from maskserve_common.contracts.keys import Anchor
from maskserve_engine.cache.entries import PARTS, AnchorEntry, BlockEntry, Coded, encode
from maskserve_engine.cache.tier import Note

ANCHORS = tuple(Anchor(s, 1000 * s) for s in (0.9, 0.1 + 0.2, 1 / 3))
NOTE = Note("0123456789abcdef", len(ANCHORS), 2.0)


def random_entry(
    seed: int,
    anchor: Anchor = ANCHORS[0],
    *,
    blocks: int = 3,
    tokens: int = 24,
    width: int = 32,
    format: str = "model",
    dtype: torch.dtype = torch.float32,
    parts: tuple[str, ...] = ("h", "kv", "end"),
) -> AnchorEntry:
    """One anchor's entry; equal seeds give equal entries."""
    rng = np.random.default_rng(seed)

    def coded() -> Coded:
        values = rng.standard_normal((tokens, width)).astype(np.float32)
        return encode(torch.from_numpy(values).to(dtype), format)

    def block(last: bool) -> BlockEntry:
        hidden = coded() if "h" in parts else None
        keys, values = (coded(), coded()) if "kv" in parts else (None, None)
        return BlockEntry(hidden, keys, values, coded() if last and "end" in parts else None)

    return AnchorEntry(anchor, tuple(block(n == blocks - 1) for n in range(blocks)))


def same(a: AnchorEntry | None, b: AnchorEntry | None) -> bool:
    """Whether two entries hold the same bits."""
    if a is None or b is None or a.anchor != b.anchor or len(a.blocks) != len(b.blocks):
        return False
    return all(
        len(x.part(part)) == len(y.part(part))
        and all(_equal(m, n) for m, n in zip(x.part(part), y.part(part), strict=True))
        for x, y in zip(a.blocks, b.blocks, strict=True)
        for part in PARTS
    )


def _equal(a: Coded, b: Coded) -> bool:
    return a.format == b.format and all(
        x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y))
        for x, y in zip(a.tensors(), b.tensors(), strict=True)
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
