"""Tokens by mode against labels that are drawn with the rows, one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from maskserve_engine.batch.packing import CONTEXT, IMAGE, TEXT, Packing, sparse_layout
from maskserve_engine.layers.attention import attention
from tests.support.draws import fresh_rng
from tests.support.examples import number

HEADS, WIDTH = 2, 8
Labels = list[tuple[int, int]]
"""Row and mode of each token."""


def check(packing: Packing, queries: Labels, keys: Labels) -> None:
    modes = packing.modes
    assert modes is not None
    rows = len(packing.text)
    assert modes.mode_of.tolist() == [mode for _, mode in queries]
    assert modes.vector_of.tolist() == [mode * rows + row for row, mode in queries]
    q = torch.randn(len(queries), HEADS, WIDTH)
    k, v = torch.randn(2, len(keys), HEADS, WIDTH).unbind()
    mask = torch.tensor([[key == query for key in keys] for query in queries])
    heads = (x.transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)
    segments = modes.computed if queries == keys else modes.all_keys
    torch.testing.assert_close(attention(q, k, v, segments), expected)
    parts = modes.split(q)
    assert [len(part) for part in parts] == [
        sum(mode == of for _, mode in queries) for of in (IMAGE, CONTEXT, TEXT)
    ]
    for part, spans, of in zip(parts, modes.spans, (IMAGE, CONTEXT, TEXT), strict=True):
        for row, (begin, end) in enumerate(spans):
            at = [i for i, label in enumerate(queries) if label == (row, of)]
            assert torch.equal(part[begin:end], q[at])
    assert torch.equal(modes.join(parts), q)


def test_tokens_attend_to_those_of_their_mode_alone() -> None:
    """Dense and cached rows of any mix, with the cached tokens computed or not."""
    for _ in range(number(50)):
        rng = fresh_rng()
        rows = int(rng.integers(1, 4))
        text, image, context = (rng.integers(least, 6, rows).tolist() for least in (0, 1, 0))
        cached = (rng.integers(1, 6, rows) * (rng.random(rows) < 0.6)).tolist()
        computed, keys, wide = [], [], []
        for row, (t, i, c, m) in enumerate(zip(text, image, context, cached, strict=True)):
            front = [(row, TEXT)] * t + [(row, IMAGE)] * i
            behind = [(row, IMAGE)] * m + [(row, CONTEXT)] * c
            computed += front if m else front + behind
            keys += front + behind
            wide += front + behind
        layout = sparse_layout(
            tuple(text),
            tuple(i + (0 if m else c) for i, c, m in zip(image, context, cached, strict=True)),
            tuple((m + c if m else 0,) for c, m in zip(context, cached, strict=True)),
            ((0,),) * rows,
            torch.device("cpu"),
            tuple(context),
            timeless=True,
        )
        check(layout.narrow, computed, keys)
        check(layout.wide, wide, wide)
