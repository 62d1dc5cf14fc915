"""Plans of nodes in virtual time: what is conserved, and who does better, at small size."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_studies.workflow_plans import simulation
from maskserve_studies.workflow_plans import systems as plan_systems
from maskserve_studies.workflow_plans.figures import (
    ASSUMPTIONS,
    alone,
    assumed,
    chained,
    control_plane,
    decisions,
    degrees,
    loading,
    overload,
    passed_mib,
    sharing,
    summary,
)
from maskserve_studies.workflow_plans.simulation import Device, Node, PlanRequest, PlanRun, Rules
from maskserve_studies.workflow_plans.systems import (
    SETTINGS,
    SYSTEMS,
    Flow,
    Load,
    draw_requests,
    in_time,
    most,
    rate,
)
from maskserve_workflows.scheduling import admits
from tests.support.examples import examples


def run_of(system, load):
    run, requests = SYSTEMS[system](load, draw_requests(load))
    run.run(requests)  # which raises where anything is lost or made
    return run, requests


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_conserves_requests_device_seconds_and_bytes(system):
    for setting in ("S1", "S6"):
        run, requests = run_of(system, Load(setting, 1.5, 8, 60, 3, cv=2.0))
        assert run.refused
        assert 0.0 < run.in_time(requests) < 1.0


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda run: run.refused.append(999), "each request ends once"),
        (lambda run: run.plans[0].finished.clear(), "all nodes of what ended ran"),
        (lambda run: setattr(run.devices["d1"], "busy_s", 1e6), "device seconds"),
        (lambda run: setattr(run.devices["d1"], "loaded", 5), "bytes are what was loaded"),
        (lambda run: setattr(run.devices["d1"], "room", 0), "bytes are what was loaded"),
    ],
)
def test_what_is_lost_or_made_is_told(harm, message):
    run, requests = run_of("ours", Load("S1", 0.5, 4, 20, 3))
    harm(run)
    with pytest.raises(RuntimeError, match=message):
        run._check(requests)


@given(st.integers(0, 2**32))
@examples(20)
def test_random_plans_on_few_devices_end_and_conserve_all(seed):
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 3) for name in "abc"}
    requests = []
    for number in range(12):
        nodes = []
        for n in range(rng.randint(1, 4)):
            run_s = rng.uniform(0.1, 2.0)
            parents = tuple(b for b in range(n) if rng.random() < 0.5)
            degrees = (run_s, run_s / 1.9)[: rng.randint(1, 2)]
            nodes.append(Node(frozenset(rng.choice("abc")), degrees, parents, rng.randint(1, 3)))
        at = rng.uniform(0, 8)
        requests.append(PlanRequest(number, at, at + rng.uniform(0.5, 9.0), tuple(nodes)))
    requests.sort(key=lambda request: request.arrival)
    for rules in (
        Rules(), Rules("fcfs"), Rules("fcfs", printed=True), Rules(sees_plan=False),
        Rules("fcfs", sees_plan=False), Rules("fcfs", admission=False), Rules("fcfs", swaps=True),
    ):  # fmt: skip
        devices = {f"d{n}": Device(rng.randint(3, 9)) for n in range(rng.randint(1, 4))}
        PlanRun(rules, devices, sizes, 2.0).run(requests)


def _served(rules: Rules, *requests: PlanRequest) -> PlanRun:
    """Nodes take a second each, on devices of their own."""
    run = PlanRun(rules, {name: Device(0) for name in "abc"}, {}, 1.0)
    run.run(requests)
    return run


def _node(device: str, *after: int, run_s: float = 1.0) -> Node:
    return Node(frozenset(), (run_s,), after, only=frozenset({device}))


def test_edit_by_edit_no_plan_is_refused_as_it_comes():
    """It was, by the seconds of all its edits."""
    busy = PlanRequest(0, 0.0, 9.0, (_node("b", run_s=2.5),))
    late = PlanRequest(1, 0.0, 4.0, (_node("b"), _node("b", 0)))
    assert _served(Rules("fcfs"), busy, late).refused == [1]
    run = _served(Rules("fcfs", sees_plan=False), busy, late)
    assert not run.refused
    assert [plan.given_up for plan in run.plans] == [False, True]
    assert run.devices["b"].busy_s == 3.5  # its first node


def test_edit_by_edit_nodes_go_in_the_order_in_which_they_are_ready():
    """They went in that in which their plans came."""
    first = PlanRequest(0, 0.0, 9.0, (_node("a", run_s=2.0), _node("b", 0)))
    second = PlanRequest(1, 0.5, 9.0, (_node("b", run_s=2.0),))
    third = PlanRequest(2, 1.0, 9.0, (_node("b"),))
    run = _served(Rules("fcfs", sees_plan=False), first, second, third)
    assert [plan.ended for plan in run.plans] == [4.5, 2.5, 3.5]
    assert [plan.ended for plan in _served(Rules("fcfs"), first, second, third).plans] == [
        3.5, 2.5, 4.5,
    ]  # fmt: skip


def test_edit_by_edit_a_plan_ends_as_a_node_of_it_would_be_late_behind_others():
    """It ended when that node could not be in time any more, and kept its devices until then."""
    busy = PlanRequest(0, 0.0, 9.0, (_node("b", run_s=2.5),))
    next_ = PlanRequest(1, 0.0, 9.0, (_node("b"),))
    late = PlanRequest(2, 0.0, 4.0, (_node("a", run_s=3.0), _node("b")))
    behind = PlanRequest(3, 0.5, 9.0, (_node("a"),))
    run = _served(Rules("fcfs", sees_plan=False), busy, next_, late, behind)
    assert [plan.given_up for plan in run.plans] == [False, False, True, False]
    assert run.plans[3].ended == 1.5


def test_what_runs_of_a_plan_that_ends_is_withdrawn():
    """It kept its device to its end."""
    busy = PlanRequest(0, 0.0, 9.0, (_node("b", run_s=2.5),))
    late = PlanRequest(1, 0.0, 3.2, (_node("a", run_s=3.2), _node("b", 2), _node("c", run_s=0.5)))
    behind = PlanRequest(2, 0.6, 9.0, (_node("a"),))
    run = _served(Rules("fcfs", sees_plan=False), busy, late, behind)
    assert run.plans[1].given_up
    assert run.plans[2].ended == 1.6
    assert run.devices["a"].busy_s == 1.5


def test_a_step_of_algorithm_1_has_its_net_beside_it_and_its_base_on_two_devices():
    run, requests = run_of("lego", Load("S1", 1e-6, 3, 1, 1))
    flow = draw_requests(Load("S1", 1e-6, 3, 1, 1))[0].flow
    base = plan_systems.BASES["sd3"]
    calls = 2 + base.steps * (1 + bool(flow.net))
    assert run.calls == calls
    expected = base.text[1] + base.vae[1] + base.steps * base.step[1] / 1.9
    assert run.plans[0].ended - requests[0].arrival == pytest.approx(
        expected + (2 + base.steps) * plan_systems.OVERHEAD_S
    )


def test_requests_of_two_loads_are_the_same_in_other_gaps():
    slow, fast = draw_requests(Load("S5", 0.5, 8, 50, 1)), draw_requests(Load("S5", 1.0, 8, 50, 1))
    assert [w.flow for w in slow] == [w.flow for w in fast]
    assert [w.arrival for w in slow] == pytest.approx([2 * w.arrival for w in fast])
    by_turns = draw_requests(Load("S1", 0.5, 8, 400, 1, turns=4))
    turn = plan_systems.TURN * sum(s * f.solo_s for f, s in Load("S1", 1, 8, 1, 1).mix.items())
    for want in by_turns:
        assert int(want.arrival / turn) % 4 == want.flow.net


@pytest.mark.parametrize("setting", SETTINGS)
def test_ours_is_not_behind_monoliths_or_algorithm_1(setting):
    load = Load(setting, 1.05, 8, 60, 1)
    best = in_time("ours", load)
    assert all(in_time(other_system, load) <= best + 1e-9 for other_system in SYSTEMS), setting


def test_masks_turns_and_overload():
    masked = Load("S4", 2.5, 8, 80, 1, masked=True)
    assert in_time("ours", masked) > 0.9 > 0.6 > in_time("planned", masked)
    turns = Load("S1", 0.45, 8, 120, 1, turns=4)
    assert in_time("ours", turns) > 0.9 > 0.7 > in_time("static", turns)
    full = overload("S1", 120, (1,))
    assert full["admission"] > 0.95
    assert full["without"] < 0.3  # of few requests; of many it goes to nothing
    by_slack = chained(1.6, 300, (1,))
    assert by_slack["slack"] > 0.05 + by_slack["fcfs"]


def test_what_the_paper_says_of_loading_and_of_devices_comes_out():
    assert loading("sd3")["base_s"] == pytest.approx(0.43, abs=0.01)
    one_device, two_devices, three = alone("sd3")
    assert one_device > two_devices > three
    assert Flow("sd3", 1).solo_s > Flow("sd3", 0).solo_s
    assert sum(Flow("dev", 2).parts.values()) < 80


def test_shared_models_and_as_many_devices_as_are_idle_take_less_time():
    figures = sharing("sd3", 60, (1,))
    pairs = zip(figures["shared"]["mean_s"], figures["apart"]["mean_s"], strict=True)
    assert all(shared < separate_s for shared, separate_s in pairs)
    figures = degrees(60, (1,))
    for one_s, two_s, adaptive in zip(
        figures["one"], figures["two"], figures["adaptive"], strict=True
    ):
        assert adaptive < min(one_s, 1.05 * two_s)


def test_what_passes_between_nodes_is_counted():
    figures = passed_mib("dev")
    assert figures["residual"] == 24.0
    # Prompt to both, each of 50 steps' latents and two residuals, the last latents, two pictures.
    assert figures["lego"] == 2 * 4 + 50 * (2 * 0.5 + 2 * 24) + 0.5 + 2 * 3


def test_decisions_cost_next_to_nothing_at_their_committed_medians():
    assert all(row["share"] <= 0.01 for row in control_plane().values())
    assert all(row["cores_in_groups"] <= 1.0 for row in control_plane().values())
    figures = decisions(16, 20, count=3)
    assert figures.keys() == {"decide_s", "admit_s"}


def test_a_monolith_that_has_its_card_by_itself_is_as_if_it_were_bound_to_it():
    load = Load("S4", 0.8, 8, 60, 1)
    whole = assumed(load, ASSUMPTIONS["whole cards"])
    assert in_time("planned", whole) == in_time("static", whole) < in_time("planned", load)
    assert in_time("ours", whole) == in_time("ours", load)


def test_a_queue_that_is_not_seen_makes_all_late():
    load = Load("S4", 1.5, 8, 160, 1)
    assert in_time("planned", assumed(load, ["blind"])) < 0.5 * in_time("planned", load)
    assert in_time("ours", assumed(load, ["blind"])) == in_time("ours", load)


def test_an_admission_that_expects_longer_calls_refuses_wrongly(monkeypatch):
    assert overload("S1", 80, (1,))["refused_wrongly"] == 0.0

    def careful(new, *arguments):
        return admits(replace(new, run_s=1.5 * new.run_s), *arguments)

    monkeypatch.setattr(simulation, "admits", careful)
    assert overload("S1", 80, (1,))["refused_wrongly"] > 0.05


def test_models_that_do_not_fit_have_nothing_in_time():
    load = Load("S4", 0.1, 2, 10, 1)
    assert in_time("static", load) == 0.0
    assert in_time("ours", replace(load, room=20.0)) == 0.0


def test_the_most_is_between_what_is_met_and_what_is_not():
    load = Load("S4", 1.0, 4, 40, 1)
    highest_load = rate("planned", load, (1,))
    shares = [
        in_time("planned", replace(load, load=at)) for at in (highest_load, 1.03 * highest_load)
    ]
    assert shares[0] >= 0.9 > shares[1]
    assert most("planned", lambda at: replace(load, load=at), (8.0, 16.0), (1,)) == 0.0
    assert most("planned", lambda at: replace(load, load=at), (0.01, 0.05), (1,)) == 0.05


def test_the_committed_figures_come_out_anew_and_hold_the_bars():
    """A part of `simulate_cluster --workflows`, which takes minutes."""
    file = CHECKOUT / "docs" / "benchmarks" / "workflows-simulated.json"
    report = json.loads(file.read_text())
    assert report["summary"] == summary(report)
    first, *_ = report["seeds"]
    for setting, system in (("S1", "planned"), ("S4", "ours")):
        devices = plan_systems.DEVICES[setting]
        load = Load(setting, 1.0, devices, report["requests_per_device"] * devices, first)
        assert report["rates"][setting][system][0] == round(rate(system, load, (first,)), 3)
    report_summary = report["summary"]
    assert report_summary["vs_best_monolith"] >= 1.0
    assert report_summary["vs_lego"] >= 1.0
    assert report_summary["vs_static_by_turns"] >= 2.0
    assert report_summary["twice_capacity"] >= 0.95
    assert report_summary["twice_without"] <= 0.15
    assert report_summary["refused_wrongly"] <= 0.05
    assert report_summary["masks_vs_monolith"] >= 2.5
    assert report_summary["control_plane_share"] <= 0.01
