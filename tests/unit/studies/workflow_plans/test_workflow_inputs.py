"""The inputs of the simulated workflows and their ranges."""

from __future__ import annotations

import json
from dataclasses import replace

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_studies.workflow_plans.figures import rates
from maskserve_studies.workflow_plans.inputs import LOADS_S, TWOS, base_load, inputs
from maskserve_studies.workflow_plans.systems import (
    LOAD_S,
    SYSTEMS,
    TWO,
    Flow,
    FlowRequest,
    Load,
)


def test_the_ranges_hold_the_defaults_and_each_input_has_a_source() -> None:
    assert TWO in TWOS
    assert LOAD_S in LOADS_S
    assert all(value.source for value in inputs())


def test_two_devices_speed_up_a_lone_request_by_their_input() -> None:
    seconds = []
    for two in (1.0, 2.0):
        load = Load("S4", 1.0, 2, 1, 1, scale=1e6, two=two)
        run, requests = SYSTEMS["lego"](load, [FlowRequest(0.0, Flow("dev", 0))])
        run.run(requests)
        seconds.append(run.plans[0].ended)
    assert 1.9 < seconds[0] / seconds[1] <= 2.0


def test_a_committed_point_comes_out_anew() -> None:
    """A part of `simulate_cluster --workflow-inputs`."""
    report = json.loads(
        (CHECKOUT / "docs" / "benchmarks" / "workflow-inputs.json").read_text(encoding="utf-8")
    )
    for name, value in (("two", 1.0), ("load_s", 1.0)):
        load = replace(base_load("S1"), **{name: value})
        committed = report[name][f"{value:.2f}"]["S1"]
        assert committed == rates(load, report["seeds"], ("planned", "ours", "lego"))
