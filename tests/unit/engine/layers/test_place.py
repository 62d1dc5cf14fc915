"""The kernel that places cached activations, interpreted, against the plain path."""

from __future__ import annotations

import pytest

from tests.support.interpreted import run_interpreted

pytest.importorskip("triton")

PROGRAM = """
import sys
from itertools import product
import torch
from maskserve_engine.cache.entries import encode
from maskserve_engine.layers import scatter_kv_kernel as module
from maskserve_engine.layers.scatter_kv import (
    Change,
    KvSlots,
    KvSource,
    scatter_by_kernels,
    scatter_kv,
)

kernel, counts = module.scatter_kv_kernel, set()


class Watched:
    def __getitem__(self, grid):
        def launch(*args, rows, terms, **sizes):
            assert {len(each) for each in args if isinstance(each, tuple)} == {rows * terms}
            *addresses, _ = (each for each in args if isinstance(each, tuple))
            # Of one type: Triton makes it anew for each pattern of short and long numbers.
            assert all(at >= 2**32 for each in addresses for at in each)
            counts.add(rows)
            kernel[grid](*args, rows=rows, terms=terms, **sizes)
        return launch


module.scatter_kv_kernel = Watched()
for seed, format in product(range(8), sys.argv[1:]):
    torch.manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, ()))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    heads, head_dim, rows, parts = draw(1, 4), 32, 1 + seed % 7, 1 + seed % 2
    sources, spans, end = [], [], 0
    for row in range(rows):
        computed, tokens = draw(1, 5), draw(1, 12)
        inactive = draw(0, tokens + 1)
        ids = torch.randperm(tokens)[:inactive]
        keys, values = (encode(torch.randn(tokens, heads * head_dim).to(dtype), format)
                        for _ in range(2))
        if row % 3 == 2:  # gathered before
            keys, values, ids = keys.take(ids), values.take(ids), None
        # Changes are of the same tokens as the entry, or of just those that the row reads.
        slope_ids, along = (ids, len(keys.data)) if row % 4 == 1 else (None, inactive)
        of_change = "int8" if row > 3 else format  # what lifts a template's entry
        # The first of a row's changes may weigh nothing beside one that does.
        weights = [(0.25 * row - 0.5 - number) * (row != 5 or number) for number in range(2)]
        changes = tuple(
            Change(tuple(encode(torch.randn(along, heads * head_dim).to(dtype), of_change)
                         for _ in range(parts)), weights[number], slope_ids)
            for number in range(row % 3 if seed % 2 else 0))
        dense = rows > 1 and row == draw(0, rows)
        inactive = 0 if dense else inactive
        source = KvSource((keys, values)[:parts], ids, changes)
        sources.append(None if dense else source)
        spans.append((end + computed, end + computed + inactive))
        end += computed + inactive
    if not any(sources) or not sum(e - b for b, e in spans):
        continue
    places = KvSlots(
        tuple(spans),
        torch.cat([torch.full((e - b,), row) for row, (b, e) in enumerate(spans)]),
        torch.cat([torch.arange(e - b) for b, e in spans]),
        torch.cat([torch.arange(b, e) for b, e in spans]),
        torch.arange(sum(e - b for b, e in spans)),
    )
    if seed % 3:
        rooms = [torch.randn(end, heads, head_dim).to(dtype) for _ in range(parts)]
        result = [each.clone() for each in rooms]
        expected = rooms
    else:  # beside the queries
        room = torch.randn(end, 3, heads, head_dim).to(dtype)
        expected = room.clone().unbind(1)[3 - parts:]
        result = room.unbind(1)[3 - parts:]
    scatter_kv(sources, expected, places)
    scatter_by_kernels(sources, result, places)
    for one, other in zip(expected, result):
        # The interpreter cuts bfloat16 off where hardware and torch round.
        ulps = 2 ** -6 if dtype == torch.bfloat16 and format != "model" else 0.0
        # With a change the kernel rounds once where operations round their product, too.
        atol = 2 ** -6 * one.abs().max() if seed % 2 and dtype != torch.float32 else 1e-6
        assert torch.allclose(one, other, rtol=ulps, atol=float(atol)), (format, seed, dtype)
# It is compiled for each count, and has been for few.
assert counts <= {1, 2, 4, 8} and 8 in counts, counts
"""


def test_the_kernel_writes_what_the_plain_path_writes() -> None:
    run_interpreted(PROGRAM, "model", "int8", "float8", "int4")
