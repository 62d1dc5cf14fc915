"""Time of a step on several devices, by their number."""

from __future__ import annotations

import numpy as np
import pytest

from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_common.line_fit import Line
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.planning.degree_costs import (
    DEGREES,
    ExchangeCosts,
    busiest,
    calls,
    most_heads,
    seconds_by_degree,
    sent_bytes,
    uneven_flops,
)
from maskserve_engine.planning.flops import ModelWork, RowTokens

pytestmark = pytest.mark.each_value

H100 = Line(5e-3, 1 / 495e12)


def work_of(heads: int = 24, width: int = 128) -> ModelWork:
    sizes = {"num_attention_heads": heads, "attention_head_dim": width}
    return flux_work({**FLUX_DEV, **sizes}, 128, 128)


@pytest.mark.parametrize(
    ("kind", "ratio", "sent", "ms"),
    [
        ("dense", 1.0, (0, 1.61, 1.21, 0.71), (155, 86, 48, 28)),
        ("kv", 0.1, (0, 0.32, 0.24, 0.14), (35, 23, 15, 11)),
    ],
)
def test_one_row_of_flux_at_1024(
    kind: str, ratio: float, sent: tuple[float, ...], ms: tuple[int, ...]
) -> None:
    """The table of docs/decisions/devices.md."""
    work = work_of()
    row = work.row_at(ratio, 512.0)
    gigabytes = [sent_bytes(work, row, degree) / 1e9 for degree in DEGREES]
    assert gigabytes == pytest.approx(sent, abs=0.006)
    seconds = seconds_by_degree(work, row, kind, H100, ExchangeCosts())
    assert [round(1e3 * second) for second in seconds] == list(ms)


@pytest.mark.parametrize("heads", [3, 5, 6, 10, 20, 24, 38])
@pytest.mark.parametrize("degree", DEGREES)
def test_uneven_heads_by_counting_every_number(heads: int, degree: int) -> None:
    """Each rank's tokens and heads, one by one."""
    if degree > heads:
        return
    tokens = np.arange(64 * degree) % degree
    of_heads = np.arange(heads) % degree
    bincount = np.bincount(of_heads, minlength=degree)
    tensor, got = np.zeros(degree), np.zeros(degree)
    for rank in range(degree):
        total = (tokens == rank).sum()
        for other in set(range(degree)) - {rank}:
            first, second = 3 * total * bincount[other], (tokens == other).sum() * bincount[rank]
            tensor[rank] += first + second
            got[other] += first + second
    even = 4 * len(tokens) * heads * (degree - 1) / degree**2
    assert tensor.mean() == pytest.approx(even)
    if degree > 1:
        assert busiest(heads, degree) == pytest.approx(max(tensor.max(), got.max()) / even)
    assert most_heads(heads, degree) == bincount.max() / heads


def test_what_uneven_heads_cost() -> None:
    """Attention alone lasts longer, and exchanges; a step of 10 heads over 4 as one of 12 would."""
    line, exchange = Line(0.0, 1e-12), ExchangeCosts(bytes_per_second=1e30, call_seconds=0.0)
    work = work_of(10)
    row = work.row_at(1.0, 512.0)
    pairs = (4096 + 512) ** 2
    attention = 4 * 10 * 128 * pairs * len(work.blocks)
    assert work.attention_flops(row, "dense") == pytest.approx(attention)
    assert uneven_flops(work, row, "dense", 4) == pytest.approx(attention * (3 / 10 - 1 / 4))
    assert uneven_flops(work, row, "dense", 2) == 0.0
    one, two, four = seconds_by_degree(work, row, "dense", line, exchange, (1, 2, 4))
    assert two == pytest.approx(one / 2)
    assert four == pytest.approx(one / 4 + attention * (3 / 10 - 1 / 4) * 1e-12)
    cached = work.row_at(0.1, 512.0)
    of_cached = work.attention_flops(cached, "kv")
    assert of_cached == pytest.approx(attention * (409.6 + 512) / (4096 + 512))


@pytest.mark.parametrize(
    ("degree", "heads", "attention", "dense", "kv"),
    [
        (2, 24, 1.0, (1.61, 0.90), (0.32, 0.76)),
        (2, 3, 1.33, (1.88, 0.85), (0.38, 0.73)),
        (4, 24, 1.0, (1.21, 0.82), (0.24, 0.57)),
        (4, 6, 1.33, (1.48, 0.77), (0.30, 0.55)),
        (8, 24, 1.0, (0.71, 0.70), (0.14, 0.39)),
        (8, 12, 1.33, (0.87, 0.66), (0.17, 0.38)),
        (8, 9, 1.78, (1.10, 0.62), (0.22, 0.36)),
    ],
)
def test_efficiency_where_heads_do_not_divide(
    degree: int,
    heads: int,
    attention: float,
    dense: tuple[float, float],
    kv: tuple[float, float],
) -> None:
    """FLUX's width in so many heads."""
    work = work_of(heads, 3072 // heads)
    assert most_heads(heads, degree) * degree == pytest.approx(attention, abs=0.005)
    for kind, ratio, expected in (("dense", 1.0, dense), ("kv", 0.1, kv)):
        row = work.row_at(ratio, 512.0)
        one, several = seconds_by_degree(work, row, kind, H100, ExchangeCosts(), (1, degree))
        gigabytes = sent_bytes(work, row, degree) * busiest(heads, degree) / 1e9
        assert (gigabytes, one / several / degree) == pytest.approx(expected, abs=0.006)


def test_calls_are_two_for_each_block_whatever_the_rows() -> None:
    work = work_of()
    none = RowTokens((0.0,), 0.0)
    assert calls(work, 1) == 0
    assert ExchangeCosts().seconds(work, none, 1) == 0.0
    assert calls(work, 8) == 2 * 57
    assert ExchangeCosts(call_seconds=1e-3).seconds(work, none, 8) == pytest.approx(0.114)
