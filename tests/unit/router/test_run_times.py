"""What runs still take, and which of them are taken."""

from __future__ import annotations

import math
import time

import pytest

from maskserve_core.errors import DeadlineExceeded
from maskserve_core.workflows.definition import Workflow, each
from maskserve_core.workflows.nodes import best, edit, enlarge, shows
from maskserve_core.workflows.run import WorkflowRun
from maskserve_router.config import RouterConfig
from maskserve_router.failures import RetryLater
from maskserve_router.run_times import RunTime, RunTimes

with Workflow("pair", "The better of two, enlarged.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    with each(2) as one:
        made = edit(image, mask, prompt)
        pictures, verdicts = one.all(made), one.all(shows(made, mask, prompt))
    chosen = best(pictures, verdicts)
    flow.gives(image=enlarge(chosen.picture), verdict=chosen.verdict)
PLAN = flow.plan


def a_run(seconds: float = math.inf) -> RunTime:
    now = time.monotonic()
    machine = WorkflowRun(PLAN, {"image": b"i", "mask": b"m", "prompt": "p"})
    return RunTime(PLAN, machine, now, now + seconds, now + seconds)


def times(workers: int = 1, edit_s: float | None = 100.0) -> RunTimes:
    """Nodes have taken a second."""
    made = RunTimes(RouterConfig(), lambda node: 1.0, lambda: workers)
    if edit_s is not None:
        run = a_run()
        made.learn(run, run.machine.ready()[0], {"timings_ms": {"queue": 5e3}}, edit_s + 5.0)
    return made


def test_a_node_is_due_before_what_lies_behind_it() -> None:
    run = a_run(1000.0)
    task = run.machine.ready()[0]
    assert times().due_of(run, task) == run.due - 3.0


def test_runs_are_taken_while_all_can_be_in_time() -> None:
    one = times()
    first, beside, free = a_run(200.0), a_run(200.0), a_run()
    one.begin(first)  # 203 s on one worker, and 300 are allowed
    with pytest.raises(RetryLater, match=r"pair would take about 40\d\.\d s beside those"):
        one.begin(beside)
    one.begin(free)  # due at no time: it is behind all that are
    one.end(first)
    one.begin(beside)
    with pytest.raises(DeadlineExceeded, match=r"60\.0 s are too short for pair, .* 103\.0 s"):
        one.begin(a_run(60.0))
    two = times(workers=2)
    two.begin(a_run(200.0))
    two.begin(a_run(200.0))
    unknown = times(edit_s=None)
    unknown.begin(a_run(2.5))  # what was never measured counts as nothing
    unknown.begin(a_run(2.5))


def test_a_late_run_ends_before_its_next_node() -> None:
    late, early = a_run(10.0), a_run(1000.0)
    known = times()
    known.check_next(early, early.machine.ready()[0])
    with pytest.raises(DeadlineExceeded, match=r"each-1\[0\]/edit-1 and what lies behind it take "
                       r"about 103\.0 s, and \d+\.\d s are left for pair"):  # fmt: skip
        known.check_next(late, late.machine.ready()[0])
    endless = a_run()
    known.check_next(endless, endless.machine.ready()[0])
