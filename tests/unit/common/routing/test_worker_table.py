"""Decisions by columns are those of views looked at one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.contracts.pricing import DegreePrice, Pricing, RingShares, RowPrice
from maskserve_common.contracts.status_record import AdapterStatus, LoadCost
from maskserve_common.contracts.tiers import TIERS
from maskserve_common.routing import (
    AdapterView,
    Edit,
    MaskAware,
    NoWorkerAvailable,
    RowLoad,
    WorkerTable,
    WorkerView,
    predicted_seconds,
)
from tests.support.examples import examples

NAMES = [f"{number:032x}" for number in range(6)]
TOTAL = 1024


def of_tier(rng: random.Random) -> dict[str, frozenset[str]]:
    return {tier: frozenset(rng.sample(NAMES, rng.randrange(4))) for tier in TIERS}


def priced(rng: random.Random) -> Pricing:
    def some(most: float) -> float:
        return rng.choice((0.0, most / 2, most * rng.random()))

    def row() -> RowPrice | None:
        return rng.choice((None, RowPrice(some(0.2), some(0.01), some(3e-4))))

    return Pricing(
        step=some(0.02),
        dense_row=some(0.3),
        cached_row=some(0.01),
        active_token=some(3e-4),
        spare_token=some(1e-4),
        fetch=rng.choice(({}, {"disk": some(2.0)}, {"disk": some(1.0), "remote": some(9.0)})),
        tokens=rng.choice((0.0, float(TOTAL), 4096.0)),
        controls={} if rng.random() < 0.5 else {"canny": RowPrice(0.1, 0.05, 1e-4)},
        between=row(),
        whole=row(),
        lora_byte=row(),
        rings=RingShares(
            rng.choice((None, rng.random())), rng.choice((None, rng.random())), some(0.5)
        ),
        degrees=rng.choice(((), (), (DegreePrice(0.6, 0.8), DegreePrice(0.4, 0.7)))),
    )


def load(rng: random.Random, now: float) -> RowLoad:
    due_s = rng.choice((math.inf, math.inf, now + 20 * rng.random()))
    steps, priority = rng.randrange(1, 30), rng.choice((0, 0, 0, 1, 3))
    return RowLoad(steps, rng.random() / 10, rng.random() / 50, 100, priority, due_s)


def adapters(rng: random.Random) -> AdapterView | None:
    adapter_statuses = [AdapterStatus("a", "device", 10**6), AdapterStatus("b", "coming", 10**7)]
    costs = {"host": LoadCost(0.1, 1e-9), "storage": LoadCost(1.0, 1e-8)}
    adapters_by_name = {adapter.name: adapter for adapter in adapter_statuses if rng.random() < 0.7}
    return rng.choice((None, AdapterView(adapters_by_name, costs, 1e6)))


def view(rng: random.Random, name: str, now: float, pricing: Pricing, busy: float) -> WorkerView:
    rows, devices = rng.choice((1, 4, 8)), rng.choice((1, 1, 2))
    running = [load(rng, now) for _ in range(rng.randrange(devices * rows + 1))]
    waiting = [load(rng, now) for _ in range(rng.randrange(8))]
    if rng.random() > busy:
        running, waiting = [], []
    return WorkerView(
        name,
        pricing,
        rows,
        rng.choice((0, 3, 8)),
        tuple(running),
        tuple(waiting),
        rng.choice((None, of_tier(rng), of_tier(rng))),
        adapters(rng),
        adapters(rng),
        model=rng.choice(("m", "m", "n")),
        devices=devices,
        ready=rng.random() < 0.9,
        as_of=now - rng.choice((0.0, 0.05, 3 * rng.random())),
    )


def edit(rng: random.Random, now: float) -> Edit:
    inner = rng.randrange(1, 500)
    steps = rng.randrange(1, 40)
    return Edit(
        steps,
        inner + rng.randrange(100),
        rng.choice((TOTAL, 2048)),
        rng.choice(("", *NAMES)),
        priority=rng.choice((0, 0, 1, 2)),
        model=rng.choice(("m", "m", "")),
        cache=rng.random() < 0.9,
        dense_steps=rng.choice((0, 1, steps)),
        refresh_steps=rng.choice((0, rng.randrange(steps) + 1)),
        always_refreshes=rng.random() < 0.2,
        inner_tokens=inner,
        ring_tokens=rng.randrange(100),
        adapters=rng.choice(((), (), ("a", "c"), ("b",))),
        controls=rng.choice(((), (), (("canny", 0.5),))),
        due=rng.choice((math.inf, math.inf, now + 20 * rng.random())),
    )


def table_of(views: list[WorkerView]) -> WorkerTable:
    tiers_by_worker: list[Mapping[str, frozenset[str]]] = [dict(v.templates or {}) for v in views]  # type: ignore[arg-type]

    def holders(tier: str, template: str, count: int) -> np.ndarray:
        return np.array(
            [template in tiers.get(tier, ()) for tiers in tiers_by_worker[:count]], np.bool_
        )

    table = WorkerTable(holders)
    for number, worker_view in enumerate(views):
        table.put(number, worker_view)
    return table


@examples(150)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 90), alike=st.booleans())
def test_a_board_chooses_as_the_rule_does(seed: int, count: int, alike: bool) -> None:
    rng = random.Random(seed)
    now_s, pricing = 100.0, priced(rng)
    busy = rng.choice((0.0, 0.5, 1.0))
    views = [
        view(rng, f"w{rng.randrange(1000)}-{n}", now_s, pricing if alike else priced(rng), busy)
        for n in range(count)
    ]
    table = table_of(views)
    for number in rng.sample(range(count), count // 3):  # rows are written over
        changed = view(rng, views[number].worker, now_s, priced(rng), busy)
        views[number] = replace(changed, templates=views[number].templates)
        table.put(number, views[number])
    for number in rng.sample(range(count), count // 10):
        table.drop(number)
        views[number] = replace(views[number], ready=False)
    for _ in range(8):
        request = edit(rng, now_s)
        without = set(rng.sample(range(count), rng.choice((0, 0, count // 4))))
        candidates = [candidate for number, candidate in enumerate(views) if number not in without]
        try:
            expected = MaskAware().choose(request, candidates, now_s)
        except NoWorkerAvailable:
            expected = None
        chosen = table.choose(request, now_s, without)
        assert (None if chosen is None else views[chosen].worker) == expected


@examples(60)
@given(seed=st.integers(0, 2**32), count=st.integers(13, 70), alone=st.booleans())
def test_the_least_time_of_a_board_is_that_of_its_workers(
    seed: int, count: int, alone: bool
) -> None:
    rng = random.Random(seed)
    now_s = 100.0
    views = [view(rng, f"w{n}", now_s, priced(rng), 0.7) for n in range(count)]
    table = table_of(views)
    learned = [(1.0 + rng.random(), rng.random() / 1000) for _ in views]
    for number, (slowdown, token_s) in enumerate(learned):
        table.put(number, views[number], slowdown, token_s)
    for primed in (False, True):
        request = edit(rng, now_s)

        def ask(number: int, request: Edit = request, primed: bool = primed) -> float:
            worker_view, (slowdown, token_s) = views[number], learned[number]
            if alone:
                worker_view = replace(worker_view, running=(), waiting=())
            if primed:
                worker_view = replace(worker_view, templates=None)
            seconds = predicted_seconds(request, worker_view, worker_view.as_of if alone else now_s)
            return slowdown * seconds + token_s * request.total_tokens

        rows = table.serving(request)
        least = table.least_s(request, now_s, rows, ask, alone=alone, primed=primed)
        expected = min(map(ask, rows.tolist()), default=None)
        assert least == (None if expected is None else pytest.approx(expected, rel=1e-9))


def test_of_a_thousand_workers_that_are_alike_the_lowest_id_is_chosen() -> None:
    pricing = Pricing(0.01, 0.2, 0.005, 0.0003)
    views = [WorkerView(f"w{n:04}", pricing, 4, 4, templates={}) for n in range(1000)]
    table = table_of(views)
    request = Edit(20, 100, TOTAL, "t")
    assert table.choose(request, 0.0) == 0
    assert table.choose(request, 0.0, {0, 1, 2, 4}) == 3
    assert table.earliest(table.taking(request), 3) == [0, 1, 2]


@examples(80)
@given(seed=st.integers(0, 2**32))
def test_each_score_is_the_prediction_or_a_bound_below_it(seed: int) -> None:
    rng = random.Random(seed)
    now_s = 100.0
    views = [view(rng, f"w{n}", now_s, priced(rng), 0.8) for n in range(40)]
    table = table_of(views)
    for _ in range(4):
        request = edit(rng, now_s)
        rows = table.taking(request)
        scores, exact = table._scores(request, now_s, rows)
        for number, score, is_exact in zip(rows.tolist(), scores, exact, strict=True):
            predicted = predicted_seconds(request, views[number], now_s)
            if is_exact:
                # A table adds up in another order.
                assert score == pytest.approx(predicted, rel=1e-12)
            else:
                assert score <= predicted * (1 + 1e-9)
