"""Routing: the prediction against a step-by-step replay, and the rules that choose."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from maskserve_common.contracts.pricing import DegreePrice, RowPrice
from maskserve_common.contracts.status_record import AdapterStatus, LoadCost, NodeStatus
from maskserve_common.routing import (
    POLICIES,
    AdapterView,
    Edit,
    LeastRequests,
    LeastTokens,
    MaskAware,
    NoWorkerAvailable,
    Pricing,
    RoundRobin,
    RowLoad,
    WorkerView,
    assign,
    make_policy,
    predicted_seconds,
)
from maskserve_common.status import RowStatus, WorkerStatus
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from tests.support.examples import examples

FULL = 1024
PRICING = Pricing(
    step=0.01,
    dense_row=0.2,
    cached_row=0.005,
    active_token=0.0003,
    fetch={"disk": 2.0, "remote": 5.0},
)
EDIT = Edit(steps=20, active_tokens=100, total_tokens=FULL, template_id="t")


def row(steps: int, active: int = 100, priority: int = 0, pricing: Pricing = PRICING) -> RowLoad:
    compute, load = pricing.row(active, FULL, cached=True)
    return RowLoad(steps, compute, load, active, priority)


def worker(name: str, **state: object) -> WorkerView:
    return replace(WorkerView(name, PRICING, max_rows=4, max_waiting=16), **state)  # type: ignore[arg-type]


def replayed(edit: Edit, view: WorkerView) -> float:
    """The same future step by step, by the production scheduler: seconds until the edit is done.

    Those that run are submitted first and admitted before the rest.
    """
    scheduler = StepScheduler(view.max_rows, 10_000)
    rows = {f"r{i}": r for i, r in enumerate(view.running)}
    waiting = {f"w{i}": r for i, r in enumerate(view.waiting)}
    for name, r in rows.items():
        scheduler.submit(Ticket(name, r.steps, FULL, r.tokens, 0.0, r.priority, due=r.due))
    scheduler.schedule(0.0)
    for name, r in waiting.items():
        scheduler.submit(Ticket(name, r.steps, FULL, r.tokens, 1.0, r.priority, due=r.due))
    rows |= waiting | {"edit": view.row(edit)}
    ticket_work = edit.steps, FULL, edit.active_tokens
    scheduler.submit(Ticket("edit", *ticket_work, 2.0, edit.priority, due=edit.due))
    steps_left = {name: r.steps for name, r in rows.items()}
    seconds = 0.0
    while steps_left["edit"]:
        running = [t.request_id for t in scheduler.schedule(3.0).running]
        seconds += view.pricing.step + sum(rows[name].compute for name in running)
        for name in running:
            steps_left[name] -= 1
            if not steps_left[name]:
                scheduler.finish(name)
    return seconds


def test_rows_are_spread_over_a_workers_devices() -> None:
    """An edit shares its own with as many as others do."""
    rows = tuple(row(5 + n, 50 * n + 1) for n in range(7))
    for devices in (2, 4):
        several = worker("w", running=rows[:4], waiting=rows[4:], devices=devices)
        single_view = worker("w", running=rows[:4:devices], waiting=rows[4::devices])
        assert predicted_seconds(EDIT, several, 0.0) == predicted_seconds(EDIT, single_view, 0.0)
        urgent = replace(EDIT, priority=1)
        assert predicted_seconds(urgent, several, 0.0) == predicted_seconds(
            urgent, single_view, 0.0
        )


@pytest.mark.parametrize(("row_count", "degree"), [(0, 4), (1, 2), (2, 1), (3, 1), (7, 1)])
def test_an_edit_is_priced_by_the_devices_that_it_could_have(row_count: int, degree: int) -> None:
    degrees = DegreePrice(0.6, 0.8), DegreePrice(0.35, 0.7)
    view = worker(
        "w", pricing=replace(PRICING, degrees=degrees), running=(row(5),) * row_count, devices=4
    )
    plain = worker("w", running=(row(5),) * row_count, devices=4)
    for edit, kind in ((EDIT, "cached"), (replace(EDIT, cache=False), "dense")):
        share = 1.0 if degree == 1 else getattr(degrees[degree.bit_length() - 2], kind)
        assert view.price(edit)[0] == pytest.approx(share * plain.price(edit)[0])


def test_what_more_devices_do_not_gain_is_not_priced() -> None:
    degrees = DegreePrice(0.6, 0.8), DegreePrice(0.7, 1.3)
    pricing = replace(PRICING, degrees=degrees)
    assert pricing.share(4, cached=False) == 0.6
    assert pricing.share(8, cached=True) == 0.8
    with pytest.raises(ValueError, match="degree 1: cached"):
        replace(PRICING, degrees=(degrees[0], DegreePrice(0.5, -1.0)))


row_loads = st.builds(row, st.integers(1, 50), st.integers(1, FULL))


@examples(300)
@given(
    running=st.lists(row_loads, max_size=4),
    waiting=st.lists(row_loads, max_size=8),
    steps=st.integers(1, 50),
    active=st.integers(1, FULL),
)
def test_the_prediction_is_the_time_the_scheduler_takes(
    running: list[RowLoad], waiting: list[RowLoad], steps: int, active: int
):
    view = worker("w", running=tuple(running), waiting=tuple(waiting))
    edit = replace(EDIT, steps=steps, active_tokens=active)
    assert predicted_seconds(edit, view, 0.0) == pytest.approx(replayed(edit, view))


@given(
    running=st.lists(row_loads, min_size=4, max_size=4),
    waiting=st.lists(st.builds(row, st.integers(1, 50), priority=st.integers(-1, 1)), max_size=6),
    priority=st.integers(-1, 1),
)
def test_an_edit_overtakes_what_is_less_urgent(
    running: list[RowLoad], waiting: list[RowLoad], priority: int
):
    """The places are right; what starts behind the edit and runs beside it is left out, so the
    prediction may be early by that much and is never late.
    """
    waiting.sort(key=lambda r: -r.priority)
    view = worker("w", running=tuple(running), waiting=tuple(waiting))
    edit = replace(EDIT, priority=priority)
    ahead = tuple(r for r in waiting if r.priority >= priority)
    replayed_s = replayed(edit, replace(view, waiting=ahead))
    predicted = predicted_seconds(edit, view, 0.0)
    assert predicted == pytest.approx(replayed_s)
    assert predicted <= replayed(edit, view) + 1e-9


dues = st.sampled_from([math.inf, 10.0, 20.0])


@given(
    running=st.lists(row_loads, max_size=4),
    waiting=st.lists(st.builds(RowLoad._replace, row_loads, due=dues), max_size=6),
    due=dues,
)
def test_an_edit_overtakes_what_is_due_later_and_has_no_free_row(
    running: list[RowLoad], waiting: list[RowLoad], due: float
):
    waiting.sort(key=lambda r: r.due)
    view = worker("w", running=tuple(running), waiting=tuple(waiting))
    free = 4 - len(running)
    ahead = (*waiting[:free], *(r for r in waiting[free:] if r.due <= due))
    edit = replace(EDIT, due=due)
    reduced_view = replace(view, running=(*running, *waiting[:free]), waiting=ahead[free:])
    assert predicted_seconds(edit, view, 0.0) == pytest.approx(replayed(edit, reduced_view))


def test_a_worker_that_may_have_none_waiting_takes_edits_while_it_has_free_rows() -> None:
    view = worker("w", max_waiting=0, running=(row(5),) * 2, waiting=(row(5),))
    assert view.takes(EDIT)
    assert not replace(view, waiting=(row(5),) * 2).takes(EDIT)
    assert not replace(view, running=(row(5),) * 4, waiting=()).takes(EDIT)


def test_loading_bounds_the_time_where_it_is_the_slower_side():
    pricing = replace(PRICING, spare_token=0.001)
    view = replace(worker("w"), pricing=pricing)
    load = 20 * 0.001 * (FULL - 100)
    assert predicted_seconds(EDIT, view, 0.0) == pytest.approx(20 * (0.01 + 0.2))  # dense instead
    pricing = replace(PRICING, spare_token=0.0001)
    view = replace(worker("w"), pricing=pricing)
    assert predicted_seconds(EDIT, view, 0.0) == pytest.approx(load / 10)
    on_device = replace(view, templates={"device": {"t"}})
    compute = 20 * (0.01 + 0.005 + 0.03)
    assert predicted_seconds(EDIT, on_device, 0.0) == pytest.approx(compute)


def test_a_template_costs_its_fetch_or_a_dense_run_whichever_is_less():
    host, disk, none = (worker("w", templates=t) for t in ({"host": {"t"}}, {"disk": {"t"}}, {}))
    cached = 20 * (0.01 + 0.005 + 0.03)
    dense = 20 * (0.01 + 0.2)
    assert predicted_seconds(EDIT, host, 0.0) == pytest.approx(cached)
    assert predicted_seconds(EDIT, disk, 0.0) == pytest.approx(cached + 2.0)
    assert predicted_seconds(EDIT, none, 0.0) == pytest.approx(dense)
    few_steps = replace(EDIT, steps=8)  # a fetch of 2 s does not pay: dense at once
    assert predicted_seconds(few_steps, disk, 0.0) == pytest.approx(8 * (0.01 + 0.2))
    assert predicted_seconds(replace(EDIT, cache=False), host, 0.0) == pytest.approx(dense)
    refresh_edit = replace(EDIT, refresh_steps=4)
    anchored = (4 * 0.2 + 19 * (0.005 + 0.03)) + 20 * 0.01  # three of the four beside others
    assert predicted_seconds(refresh_edit, none, 0.0) == pytest.approx(anchored)
    assert predicted_seconds(refresh_edit, host, 0.0) == pytest.approx(cached)
    assert predicted_seconds(
        replace(refresh_edit, always_refreshes=True), host, 0.0
    ) == pytest.approx(anchored)
    unreachable = replace(disk, pricing=replace(PRICING, fetch={}))
    assert predicted_seconds(EDIT, unreachable, 0.0) == pytest.approx(dense)


def test_a_fetch_goes_on_while_the_edit_waits():
    rows = (row(30),) * 4
    disk = worker("w", running=rows, templates={"disk": {"t"}})
    host = replace(disk, templates={"host": {"t"}})
    waits = 30 * (0.01 + 4 * (0.005 + 0.03))
    assert waits > 2.0
    assert predicted_seconds(EDIT, disk, 0.0) == pytest.approx(predicted_seconds(EDIT, host, 0.0))


def test_a_view_that_is_old_has_worked_on_since():
    view = worker("w", running=(row(30),) * 4, as_of=10.0)
    fresh = predicted_seconds(EDIT, view, 10.0)
    assert predicted_seconds(EDIT, view, 11.5) == pytest.approx(fresh - 1.5)
    full_s = 20 * (0.01 + 0.005 + 0.03)
    assert predicted_seconds(EDIT, view, 10.0 + 3600.0) == pytest.approx(full_s)


def test_mask_aware_looks_at_masks_steps_and_templates():
    small = worker("small", running=(row(20, active=30),) * 3)
    large = worker("large", running=(row(20, active=600),))
    ending = worker("ending", running=(row(1, active=600),) * 4)
    policy = MaskAware()
    assert policy.choose(EDIT, [large, small], 0.0) == "small"
    assert LeastRequests().choose(EDIT, [large, small], 0.0) == "large"
    assert policy.choose(EDIT, [large, ending], 0.0) == "ending"
    assert LeastTokens().choose(EDIT, [large, ending], 0.0) == "large"
    holder = worker("has", running=(row(20),) * 2, templates={"host": {"t"}})
    other = worker("lacks", templates={"host": {"other"}})
    assert policy.choose(EDIT, [holder, other], 0.0) == "has"
    assert LeastRequests().choose(EDIT, [holder, other], 0.0) == "lacks"


@pytest.mark.parametrize("name", POLICIES)
def test_ties_go_to_the_lowest_id_whatever_the_order(name: str):
    workers = [worker(w) for w in ("c", "a", "b")]
    assert make_policy(name).choose(EDIT, workers, 0.0) == "a"
    assert make_policy(name).name == name


@pytest.mark.parametrize("name", POLICIES)
def test_workers_that_take_nothing_are_passed_over(name: str):
    idle = worker("a", ready=False)
    full = worker("b", waiting=(row(5),) * 16, running=(row(5),) * 4)
    flux_worker = worker("c", model="flux")
    busy = worker("d", running=(row(50, active=FULL),) * 4, waiting=(row(50),) * 8, model="sdxl")
    edit = replace(EDIT, model="sdxl")
    assert make_policy(name).choose(edit, [idle, full, flux_worker, busy], 0.0) == "d"


@pytest.mark.parametrize(
    ("workers", "message", "full"),
    [
        ([], "none of 0 workers is ready", False),
        ([worker("a", ready=False)], "none of 1 workers is ready", False),
        ([worker("a", model="x")], "none of the 1 ready workers serves model 'sdxl'", False),
        ([worker("a", model="sdxl", waiting=(row(1),) * 16)], "queues of all 1 workers", True),
    ],
)
@pytest.mark.parametrize("name", POLICIES)
def test_no_worker_says_why(name: str, workers: list[WorkerView], message: str, full: bool):
    with pytest.raises(NoWorkerAvailable, match=message) as caught:
        make_policy(name).choose(replace(EDIT, model="sdxl"), workers, 0.0)
    assert caught.value.full is full
    assert caught.value.code == "OVERLOADED"


def test_round_robin_goes_round_as_workers_come_and_go():
    policy = RoundRobin()
    a, b, c = (worker(w) for w in "abc")
    assert [policy.choose(EDIT, [c, b, a], 0.0) for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(EDIT, [a, c], 0.0) == "c"
    assert policy.choose(EDIT, [a, b, c], 0.0) == "a"


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="mask_aware, round_robin"):
        make_policy("random")


def test_sent_edits_count_until_the_status_shows_them():
    view = worker("w", templates={"host": {"t"}})
    loaded_view = view.with_sent([EDIT, replace(EDIT, template_id="elsewhere")])
    assert loaded_view.waiting == (row(20), RowLoad(20, 0.2, 0.0, FULL, 0))
    assert view.waiting == ()
    assert LeastTokens().choose(EDIT, [loaded_view, worker("x", running=(row(9),))], 0.0) == "x"


def test_a_view_of_a_status_record():
    pricing = replace(PRICING, spare_token=0.00001)
    status = WorkerStatus(
        "w",
        "demo",
        "ready",
        max_rows=4,
        max_waiting=9,
        running=(
            RowStatus("a", "cached", 100, FULL, 7, "host-one"),
            RowStatus("b", "cached", 100, FULL, 8, "device-one"),
            RowStatus("c", "dense", FULL, FULL, 9),
            RowStatus("d", "prime", FULL, FULL, 9),
        ),
        waiting=(RowStatus("e", "cached", 50, FULL, 20, priority=2),),
        templates={"host": ("host-one",), "device": ("device-one",)},
    )
    view = WorkerView.from_status(status, pricing, as_of=3.0)
    assert view.running == (
        RowLoad(7, 0.005 + 0.03, 0.00001 * 924, 100, 0),
        RowLoad(8, 0.005 + 0.03, 0.0, 100, 0),
        RowLoad(9, 0.2, 0.0, FULL, 0),
    )
    assert view.waiting == (RowLoad(20, 0.005 + 0.0003 * 50, 0.00001 * 974, 50, 2),)
    assert (view.worker, view.model, view.max_rows, view.max_waiting) == ("w", "demo", 4, 9)
    assert [view.tier_of(t) for t in ("host-one", "device-one", "c")] == ["host", "device", None]
    assert view.ready
    assert not WorkerView.from_status(changed(status, state="draining"), pricing, 3.0).ready
    loading_nodes = (
        NodeStatus("denoiser", "demo", "ready"),
        NodeStatus("upscaler", "big", "loading"),
    )
    assert not WorkerView.from_status(changed(status, nodes=loading_nodes), pricing, 3.0).ready


def test_pricing_and_its_limits():
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="active_token"):
            replace(PRICING, active_token=bad)
    assert PRICING.row(FULL, FULL, cached=True) == (0.2, 0.0)  # above dense_above_ratio


def test_a_dense_row_of_a_smaller_image_costs_in_proportion():
    priced = replace(PRICING, tokens=float(FULL))
    assert priced.row(FULL, FULL / 4, cached=False) == (PRICING.dense_row / 4, 0.0)
    view = replace(worker("w"), pricing=priced)
    small = replace(EDIT, total_tokens=FULL // 4, cache=False)
    assert view.price(small) == (PRICING.dense_row / 4, 0.0, 0.0)
    assert view.row(small).tokens == FULL // 4


# LoRAs.

LOADS = {"host": LoadCost(0.1, 1e-9), "storage": LoadCost(1.0, 1e-8)}


def having(**tiers: str) -> AdapterView:
    statuses = {name: AdapterStatus(name, tier, 10**8) for name, tier in tiers.items()}  # type: ignore[arg-type]
    return AdapterView(statuses, LOADS, 1e8)


def test_a_lora_is_priced_by_where_it_is() -> None:
    view = having(here="device", near="host", soon="coming")
    assert view.seconds(()) == 0.0
    assert view.seconds(["here"]) == 0.0
    assert view.seconds(["near"]) == pytest.approx(0.2)
    assert view.seconds(["far"]) == pytest.approx(2.0)  # taken to be as large as the others
    assert view.seconds(["soon"]) == pytest.approx(1.0)
    assert view.seconds(["here", "near", "far"]) == pytest.approx(2.0)
    assert view.with_requested(["far"]).seconds(["far"]) == pytest.approx(1.0)


def test_an_edit_goes_where_its_lora_is_unless_the_queue_there_is_longer_than_the_load() -> None:
    edit = replace(EDIT, adapters=("x",))
    without = worker("a", adapters=having())
    with_it = worker("b", adapters=having(x="device"))
    assert MaskAware().choose(EDIT, [without, with_it], 0.0) == "a"
    assert MaskAware().choose(edit, [without, with_it], 0.0) == "b"
    silent = worker("a")  # says nothing of adapters: as it was before there were any
    assert predicted_seconds(edit, silent, 0.0) == predicted_seconds(EDIT, silent, 0.0)
    gap = predicted_seconds(edit, without, 0.0) - predicted_seconds(edit, with_it, 0.0)
    assert gap == pytest.approx(2.0)
    busy = replace(with_it, running=tuple([row(400)] * 4))
    assert MaskAware().choose(edit, [without, busy], 0.0) == "a"


def test_a_load_goes_on_while_the_edit_waits_for_its_place() -> None:
    edit = replace(EDIT, adapters=("x",))
    full = worker("a", running=tuple([row(400)] * 4))
    assert predicted_seconds(edit, replace(full, adapters=having()), 0.0) == pytest.approx(
        predicted_seconds(EDIT, full, 0.0)
    )


def test_a_record_says_where_loras_are() -> None:
    status = WorkerStatus("w", "m", "ready", 4, 16)
    assert WorkerView.from_status(status, PRICING, 0.0).adapters is None
    adapter = AdapterStatus("x", "device", 5, "sha")
    record = changed(status, adapter_loads=LOADS, adapters=(adapter,), typical_adapter_bytes=2e8)
    view = WorkerView.from_status(WorkerStatus.from_json(record.to_json()), PRICING, 0.0)
    assert view.adapter_seconds(replace(EDIT, adapters=("x",))) == 0.0
    far = replace(EDIT, adapters=("far",))
    assert view.adapter_seconds(far) == pytest.approx(3.0)  # 1 s and 10 ns per byte
    assert view.with_sent([far]).adapter_seconds(far) == pytest.approx(1.5)


def test_an_edit_goes_where_its_controlnets_are_as_records_say() -> None:
    nets = (AdapterStatus("outline", "device", 3), AdapterStatus("depth", "coming", 10**8))
    record = WorkerStatus(
        "b",
        "m",
        "ready",
        4,
        16,
        controlnets=nets,
        controlnet_loads={"storage": LOADS["storage"]},
        typical_controlnet_bytes=2e8,
    )
    read = WorkerStatus.from_json(record.to_json())
    with_it = WorkerView.from_status(read, PRICING, 0.0)
    read.controlnets = ()
    without = WorkerView.from_status(read, PRICING, 0.0)

    def edit(*names: str) -> Edit:
        return replace(EDIT, controls=tuple((name, 1.0) for name in names))

    assert with_it.adapter_seconds(edit("outline")) == 0.0
    assert with_it.adapter_seconds(edit("depth")) == pytest.approx(1.0)  # half of 2 s
    assert with_it.adapter_seconds(edit("pose")) == pytest.approx(3.0)
    assert with_it.with_sent([edit("pose")]).adapter_seconds(edit("pose")) == pytest.approx(1.5)
    views = [replace(without, worker="a"), with_it]
    assert MaskAware().choose(EDIT, views, 0.0) == "a"
    assert MaskAware().choose(edit("outline"), views, 0.0) == "b"
    gap = predicted_seconds(edit("outline"), without, 0.0)
    assert gap - predicted_seconds(edit("outline"), with_it, 0.0) == pytest.approx(3.0)
    silent = worker("a")  # says nothing of ControlNets
    assert silent.adapter_seconds(edit("outline")) == 0.0


def test_what_a_worker_knows_of_its_storage_prices_the_first_lora() -> None:
    """It has none yet, and says how large they are."""
    none = WorkerStatus("w", "m", "ready", 4, 16, adapter_loads=LOADS, typical_adapter_bytes=5e7)
    view = WorkerView.from_status(none, PRICING, 0.0)
    assert view.adapter_seconds(replace(EDIT, adapters=("x",))) == pytest.approx(1.5)


def test_rows_are_priced_by_their_steps_that_compute_all_tokens() -> None:
    """A row with refresh steps loads nothing, and leaves its text out between them."""
    price = RowPrice(0.0, 0.004, PRICING.active_token)
    pricing = replace(PRICING, between=price, spare_token=1e-5)
    row = RowStatus("r", "cached", 100, FULL, 10)
    first = changed(row, dense_share=0.25)
    refresh_row = changed(first, own=True)

    def loads(of: RowStatus, *, begun: bool = True) -> RowLoad:
        running, waiting = ((of,), ()) if begun else ((), (of,))
        status = WorkerStatus("w", "m", "ready", 4, 16, running=running, waiting=waiting)
        view = WorkerView.from_status(status, pricing, 0.0)
        return (view.running if begun else view.waiting)[0]

    plain, dense = loads(row), pricing.dense(FULL)
    assert loads(first).compute == pytest.approx(0.25 * dense + 0.75 * plain.compute)
    assert plain.load > 0
    assert loads(first).load == pytest.approx(0.75 * plain.load)
    between = 0.004 + 100 * pricing.active_token
    # All anchors but the first step lie beside a step that reads.
    assert loads(refresh_row).compute == pytest.approx(0.25 * dense + between)
    assert loads(refresh_row, begun=False).compute == pytest.approx(0.25 * dense + 0.9 * between)
    assert loads(refresh_row).load == 0
    view = replace(worker("a"), pricing=pricing)
    edit = replace(EDIT, active_tokens=100, always_refreshes=True, refresh_steps=EDIT.steps // 4)
    assert view.row(edit).compute == pytest.approx(
        pricing.refreshing_row(100, FULL, (EDIT.steps // 4) / EDIT.steps, 1 / EDIT.steps)
    )


def test_the_steps_of_rows_with_loras_are_priced_by_bytes() -> None:
    pricing = replace(PRICING, lora_byte=RowPrice(4e-12, 1e-12, 1e-15))
    row = RowStatus("r", "cached", 100, FULL, 10)
    with_loras = changed(row, adapter_bytes=3 * 10**8)
    dense = changed(with_loras, kind="dense")

    def compute(row_status: RowStatus) -> float:
        status = WorkerStatus("w", "m", "ready", 4, 16, running=(row_status,))
        return WorkerView.from_status(status, pricing, 0.0).running[0].compute

    added = 3e8 * (1e-12 + 100 * 1e-15)
    assert compute(with_loras) - compute(row) == pytest.approx(added)
    assert compute(dense) - compute(changed(dense, adapter_bytes=0)) == pytest.approx(1.2e-3)

    view = replace(worker("a"), pricing=pricing, adapters=having(x="host"))
    one_lora, two_loras = (replace(EDIT, adapters=names) for names in (("x",), ("x", "far")))
    base, dear, dearer = (view.price(priced_edit)[0] for priced_edit in (EDIT, one_lora, two_loras))
    # Of those that it does not have it knows the usual size.
    assert dearer - base == pytest.approx(2 * (dear - base))
    assert dear > base
    assert view.row(one_lora).compute == dear


def test_edits_that_wait_before_all_workers_are_dealt_to_whichever_has_a_place_first() -> None:
    """As if each were sent by itself, for a fraction of what so many predictions take."""
    busy, idle = (
        worker("busy", running=(row(40),) * 4, max_rows=4),
        worker("idle", running=(row(8),) * 4, max_rows=4),
    )
    waiting = [replace(EDIT, active_tokens=10 * n) for n in range(1, 13)]
    edits_by_worker = assign(waiting, [busy, idle]).edits
    assert (
        sorted([*edits_by_worker["busy"], *edits_by_worker["idle"]], key=lambda e: e.active_tokens)
        == waiting
    )
    assert len(edits_by_worker["idle"]) > len(edits_by_worker["busy"]) > 0
    views = {"busy": busy, "idle": idle}
    for edit in waiting:
        chosen = MaskAware().choose(edit, list(views.values()), 0.0)
        views[chosen] = views[chosen].with_sent([edit])
    exact = min(predicted_seconds(EDIT, view, 0.0) for view in views.values())
    dealt_s = min(
        predicted_seconds(EDIT, view.with_sent(edits_by_worker[view.worker]), 0.0)
        for view in (busy, idle)
    )
    assert dealt_s == pytest.approx(exact, rel=0.15)
    assert assign([], [busy]).edits == {"busy": []}
