"""The kernels that add rows' LoRAs, interpreted, against the grouped products."""

from __future__ import annotations

import pytest

from tests.support.interpreted import run_interpreted

pytest.importorskip("triton")

PROGRAM = """
import sys
import torch
from maskserve_engine.batch.row_updates import FusedLowRank, MovingRows, Tiles, update_tables
from maskserve_engine.batch.padding import Sizes, padded_packing
from maskserve_engine.layers.linear import PlainLinear
from maskserve_engine.layers.low_rank import LowRankSet, Update, low_rank
from maskserve_engine.layers.shrink_expand import Part, slices_of
from tests.support.draws import fresh_seed

torch.manual_seed(fresh_seed("program"))
dtype = getattr(torch, sys.argv[1])
draw = lambda low, high: int(torch.randint(low, high, ()))
host = torch.device("cpu")

def normal(*shape):
    return torch.randn(*shape).to(dtype)

def sizes(lengths):
    return Sizes.of([0] * len(lengths), lengths, sum(lengths))

def adapter(inner, outputs):
    # of some of three layers that are joined, each with ranks of its own
    chosen = [n for n in range(3) if draw(0, 3)] or [draw(0, 3)]
    ranks = [draw(1, 40) for _ in chosen]
    begins = [sum(ranks[:n]) for n in range(len(ranks))]
    parts = tuple(
        Part(normal(outputs, rank), n * outputs, begin)
        for n, rank, begin in zip(chosen, ranks, begins)
    )
    update = Update(normal(sum(ranks), inner) / inner ** 0.5, parts)
    slices = slices_of({"place": (update.down, update.parts)})
    return LowRankSet({"place": update}, {}, 0, slices)

def assert_close(one, other):
    # float32 differs in the order of sums; half precision also in what is rounded between adapters
    assert one.shape == other.shape
    if not one.numel():
        return  # of a row without tokens
    limit = 1e-4 if dtype == torch.float32 else 2 ** -5
    bound = limit * (1 + other.float().abs().max())
    assert (one.float() - other.float()).abs().max() <= bound

for _ in range(3):
    inner, outputs, count = draw(3, 300), draw(5, 200), draw(1, 6)
    known = [adapter(inner, outputs) for _ in range(3)]
    rows = [
        tuple((known[draw(0, 3)], draw(1, 30) / 10 - 1.53) for _ in range(draw(0, 4)))
        for _ in range(count)
    ]
    rows[draw(0, count)] = ((known[0], 0.7),)
    lengths = [draw(0, 80) for _ in range(count)]
    ends = [sum(lengths[: n + 1]) for n in range(count)]
    spans = [(end - length, end) for end, length in zip(ends, lengths)]
    base = PlainLinear(normal(3 * outputs, inner) / inner ** 0.5, normal(3 * outputs))
    plain = low_rank("place", base, rows)

    def fused_of(rows):
        table = update_tables(rows, host).at("place")
        return FusedLowRank(base, table, table.rows, Tiles(host))

    fused, x = fused_of(rows), normal(ends[-1], inner)
    found, expected, unchanged = fused(x, spans), plain(x, spans), base(x)
    assert_close(found, expected)

    # Behind these rows a padded step has pads; in its tables each row may have updates.
    layout = padded_packing((0,) * count, tuple(lengths), (0,) * count, sizes(lengths), host)
    stream, copied = layout.image_stream, update_tables(rows, host).copied(torch.clone)
    tiles = Tiles(host, (MovingRows(stream.spans, stream.tiles),))
    moving = FusedLowRank(base, copied.at("place"), (), tiles)
    pads = normal(len(stream.row_of) - len(x), inner)
    padded, below = moving(torch.cat((x, pads)), stream.spans), base(torch.cat((x, pads)))
    assert_close(padded[: len(x)], found)
    assert torch.equal(padded[len(x) :], below[len(x) :])
    for row, (begin, end) in zip(rows, spans):
        if not row:
            assert torch.equal(found[begin:end], unchanged[begin:end])
        else:  # whatever is beside it
            alone = fused_of([row])
            changes = alone(x[begin:end], [(0, end - begin)]) - base(x[begin:end])
            assert_close(found[begin:end], base(x[begin:end]) + changes)

    none = [(0, 0)] * count
    assert fused(x[:0], none).shape == (0, 3 * outputs)

    begin = draw(0, 3 * outputs - 1)
    end = draw(begin + 1, 3 * outputs + 1)
    assert_close(fused.columns(begin, end)(x, spans), plain.columns(begin, end)(x, spans))
    inner_end = draw(1, end - begin + 1)
    twice = fused.columns(begin, end).columns(0, inner_end)
    assert_close(twice(x, spans), plain.columns(begin, begin + inner_end)(x, spans))

    chosen = [n for n in range(count) if draw(0, 2)] or [0]
    parts = torch.cat([x[slice(*spans[n])] for n in chosen])
    stops = [sum(lengths[n] for n in chosen[: m + 1]) for m in range(len(chosen))]
    own = [(stop - lengths[n], stop) for n, stop in zip(chosen, stops)]
    some = low_rank("place", base, [rows[n] for n in chosen])
    assert_close(fused.take(chosen)(parts, own), some(parts, own))

    steps = normal(4, count, inner)  # a vector of each row at each of some steps
    each = [(n, n + 1) for n in range(count)]
    assert_close(fused(steps, each), plain(steps, each))
"""

MAPS = """
import sys
import torch
from torch import nn
from maskserve_engine.batch.row_updates import FusedLowRankConv, Tiles, update_tables
from maskserve_engine.layers.low_rank import Factors, LowRankConv, Place, low_rank_conv
from maskserve_engine.layers.low_rank import LowRankSet, low_rank_set
from maskserve_engine.layers.shrink_expand import slices_of
from tests.support.draws import fresh_seed

torch.manual_seed(fresh_seed("program"))
dtype = getattr(torch, sys.argv[1])
draw = lambda low, high: int(torch.randint(low, high, ()))
host = torch.device("cpu")

def adapter(inner, outputs, side):
    rank = draw(1, 40)
    down = torch.randn(rank, inner, side, side) / (inner * side * side) ** 0.5
    factors = {"conv": Factors(down, torch.randn(outputs, rank, 1, 1))}
    shape = outputs, inner, side, side
    own = low_rank_set(factors, {"conv": Place("place", 0, shape, True)}, host, dtype)
    made = slices_of({place: conv.flat() for place, conv in own.convolutions.items()})
    return LowRankSet(own.updates, own.convolutions, own.nbytes, made)

def assert_close(one, other):
    assert one.shape == other.shape
    limit = 1e-4 if dtype == torch.float32 else 2 ** -5
    bound = limit * (1 + other.float().abs().max())
    assert (one.float() - other.float()).abs().max() <= bound

for side, stride in ((3, 1), (3, 2), (1, 1)):
    inner, outputs, count = draw(3, 150), draw(5, 150), draw(1, 5)
    known = [adapter(inner, outputs, side) for _ in range(3)]
    passes = [
        tuple((known[draw(0, 3)], draw(1, 30) / 10 - 1.53) for _ in range(draw(0, 3)))
        for _ in range(count)
    ]
    passes[draw(0, count)] = ((known[0], 0.7),)
    base = nn.Conv2d(inner, outputs, side, stride, side // 2).to(dtype).requires_grad_(False)
    x = torch.randn(count, inner, draw(side, 12), draw(side, 12)).to(dtype)
    if draw(0, 2):
        x = x.contiguous(memory_format=torch.channels_last)
    plain = low_rank_conv("place", base, passes)
    table = update_tables(passes, host).at("place")
    fused = FusedLowRankConv(base, table, table.rows, Tiles(host))
    assert isinstance(plain, LowRankConv)

    found, unchanged = fused(x), base(x)
    assert_close(found, plain(x))
    assert_close(fused.valid(x), plain.valid(x))
    for number, updates in enumerate(passes):
        one = slice(number, number + 1)
        if not updates:
            assert torch.equal(found[one], unchanged[one])
            assert fused.take(one) is None and plain.take(one) is None
        else:
            assert_close(fused.take(one)(x[one]), plain.take(one)(x[one]))
            assert not torch.equal(found[one], unchanged[one])
    begin = draw(0, count)
    some = slice(begin, draw(begin + 1, count + 1))
    if any(passes[some]):
        assert_close(fused.take(some)(x[some]), plain.take(some)(x[some]))
"""


# Each is interpreted, in a process of its own.
DTYPES = [pytest.param("float32", marks=pytest.mark.slow), "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_add_what_convolutions_of_each_pass_add(dtype: str) -> None:
    run_interpreted(MAPS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_add_what_grouped_products_add(dtype: str) -> None:
    """(The interpreter multiplies bfloat16 as if its bits were integers.)"""
    run_interpreted(PROGRAM, dtype)
