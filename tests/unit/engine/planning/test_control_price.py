"""Work that ControlNets add to an edit: for the scheduler, the fit of costs, and routers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.pricing import Pricing, RowPrice
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.settings import acting, scale_at, shares
from maskserve_common.contracts.status_record import RowStatus, WorkerStatus
from maskserve_common.line_fit import Line
from maskserve_common.routing.predict import predicted_seconds
from maskserve_common.routing.view import Edit, WorkerView
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import control_work, counted_work, load_spec
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.requests.execution_plan import ControlWork
from maskserve_engine.spec.estimate import pricing_of
from maskserve_engine.spec.model_spec import NetShares
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of
from tests.support.engines import job

PLAIN = Pricing(step=0.01, dense_row=0.4, cached_row=0.01, active_token=1e-4, tokens=1000)
WITH_NET = replace(PLAIN, controls={"outline": RowPrice(0.2, 0.03, 5e-5)})


def view(pricing: Pricing, *rows: RowStatus) -> WorkerView:
    status = WorkerStatus("w", "m", "ready", 8, 8, running=rows, templates={"device": ("t",)})
    return WorkerView.from_status(status, pricing, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_shares_are_of_the_steps_in_which_a_control_acts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 30))
    start, end = sorted(rng.random(2))
    controls = [
        ResolvedControl(name="a", scale=1.0, start=start, end=end),
        ResolvedControl(name="off", scale=0.0),
        ResolvedControl(name="b", scale=-0.5),
    ]
    counted = sum(start <= n / steps and (n + 1) / steps <= end for n in range(steps)) / steps
    expected = [("a", counted)] if counted else []
    assert shares(controls, steps) == (*expected, ("b", 1.0))
    assert [control.name for control in acting(controls, steps)] == [
        name for name, _ in shares(controls, steps)
    ]


@pytest.mark.parametrize("refresh", [1, 4])
def test_prices_are_the_counted_work_at_the_cost_of_a_flop(tiny_fill: Path, refresh: int) -> None:
    spec, config = load_spec(tiny_fill), dict(random_net(1, 1, 2).config)
    work, net = counted_work(spec, 16, 16), control_work(spec, config, 16, 16)
    costs = CostModel("cpu", Line(0.0, 1e-9))
    pricing = pricing_of(
        work,
        costs,
        FORMATS["float32"],
        text=7,
        anchors=1,
        controls={"outline": net},
        net_shares=NetShares(1 / refresh, 1 - 1 / refresh),
    )
    tokens = work.tokens[0]
    for ratio in (0.0, 0.25, 1.0):
        active = ratio * tokens
        dense = pricing.control_seconds([("outline", 1.0)], active, tokens, cached=False)
        cached = pricing.control_seconds([("outline", 0.5)], active, tokens, cached=True)
        whole = net.step_flops([net.row_at(1.0, 7)], "dense")
        part = net.step_flops([net.row_at(ratio, 7)], "kv")
        assert dense == pytest.approx(1e-9 * whole)
        mean = whole / refresh + part * (1 - 1 / refresh)
        assert cached == pytest.approx(0.5 * 1e-9 * mean)


def test_an_edit_s_work_is_that_of_the_steps_in_which_its_nets_run(tiny_fill: Path) -> None:
    """At so many of its steps a net beside a cached row computes all tokens
    (tests/unit/engine/families/flux/test_flux_control_cached.py), at the others the active ones.
    """
    adapter, encoder = load_adapter(config_of(tiny_fill)), load_encoder(config_of(tiny_fill))
    plain = job(encoder, 5, "edit", num_inference_steps=10)
    controls = (
        ResolvedControl(name="a", scale=1.0, start=0.25, version="a"),
        ResolvedControl(name="b", scale=0.5, version="b"),
        ResolvedControl(name="off", scale=0.0, version="off"),
    )
    edit = replace(plain, request=replace(plain.request, controls=controls))
    nets = {"a": random_net(1, 1, 1), "b": random_net(2, 1, 2)}

    class Nets:
        def config(self, control: ResolvedControl) -> dict[str, Any]:
            return dict(nets[control.version].config)

    counted = adapter.totals(edit)
    schedule = RefreshSchedule(frozenset({0, 4, 8}), "int8", text=True)
    work = ControlWork.of(edit, adapter.spec, counted, 10, Nets(), schedule)  # type: ignore[arg-type]
    whole, part = [], []
    for name in nets:
        net = control_work(adapter.spec, nets[name].config, *edit.moments.shape[1:])
        whole.append(net.batch_flops(None, (), counted))
        part.append(net.batch_flops(counted, ("kv",) * len(net.blocks), None))
    assert part < whole
    # 4 is computed ahead at step 1, before the first net begins to act, and 8 at step 4.
    from_third = [0, 0, 0, whole[0], *[part[0]] * 6]
    always = [whole[1], *[part[1]] * 9]
    ahead = [(step in (1, 4)) * sum(whole) for step in range(10)]
    expected = [sum(shares) for shares in zip(from_third, always, ahead, strict=True)]
    assert [scale_at(controls[0], step, 10) > 0 for step in range(10)] == [
        n > 0 for n in from_third
    ]
    assert [work.at(step, cached=True) for step in range(10)] == pytest.approx(expected)
    assert work.mean(cached=True) == pytest.approx(np.mean(expected))
    assert work.mean(cached=False) == pytest.approx(0.7 * whole[0] + whole[1])
    # With refresh steps {0, 5, 8}: step 1 looks ahead to 5, before the first net begins to
    # act, and 8 at step 5.
    plan = RefreshSchedule(frozenset({0, 5, 8}), "int8", text=True)
    edit_work, between = work.with_schedule(plan, adapter.totals(edit, plan)), []
    for name, all_text in zip(nets, part, strict=True):
        net = control_work(adapter.spec, nets[name].config, *edit.moments.shape[1:])
        kinds = ("kv",) * len(net.blocks)
        between.append(net.batch_flops(adapter.totals(edit, plan), kinds, None))
        assert between[-1] < all_text  # a net leaves its text out, too
    read = [edit_work.at(step, cached=step > 0, looked_ahead=step in (1, 5)) for step in range(10)]
    steps = [0, 0, 0, whole[0], *[between[0]] * 6], [whole[1], *[between[1]] * 9]
    ahead = [(step in (1, 5)) * sum(whole) for step in range(10)]
    assert read == pytest.approx([sum(flops) for flops in zip(*steps, ahead, strict=True)])
    assert edit_work.mean(cached=True) == pytest.approx(np.mean(read))


def test_routers_price_edits_and_rows_with_control() -> None:
    edit = Edit(10, 100, 1000, template_id="t", controls=(("outline", 0.5),))
    plain = replace(edit, controls=())
    worker = view(WITH_NET)
    added = worker.price(edit)[0] - worker.price(plain)[0]
    assert added == pytest.approx(0.5 * (0.03 + 100 * 5e-5))
    dense = worker.price(replace(edit, cache=False))[0]
    assert dense == pytest.approx(0.4 + 0.5 * 0.2)
    assert worker.row(edit).tokens == worker.row(plain).tokens
    apart = predicted_seconds(edit, worker, 0.0) - predicted_seconds(plain, worker, 0.0)
    assert apart == pytest.approx(10 * added)
    running = RowStatus("r", "cached", 100, 1000, 5, "t", controls=(("outline", 1.0),))
    row_status = RowStatus("r", "cached", 100, 1000, 5, "t")
    later = predicted_seconds(plain, view(WITH_NET, running), 0.0)
    assert later - predicted_seconds(plain, view(WITH_NET, row_status), 0.0) == pytest.approx(
        5 * (0.03 + 100 * 5e-5)
    )
    assert view(PLAIN).price(edit) == view(PLAIN).price(plain)  # of a net that it has not


def test_a_price_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pricing: controls\.outline\.active_token is nan"):
        replace(PLAIN, controls={"outline": RowPrice(0.1, 0.1, float("nan"))})
