"""The time that runs still need, and which of them a router accepts."""

from __future__ import annotations

import math
import time

import pytest

from maskserve_common.errors import DeadlineExceeded
from maskserve_router.config import RouterConfig
from maskserve_router.messages.failures import RetryLater
from maskserve_router.workflows.run_times import RunTime, RunTimes
from maskserve_workflows.definition import Workflow, each
from maskserve_workflows.nodes import best, edit, enlarge, shows
from maskserve_workflows.run import WorkflowRun

with Workflow("pair", "The better of two, enlarged.") as flow:
    image, mask, prompt = flow.picture("image"), flow.mask("mask"), flow.text("prompt")
    with each(2) as one:
        edits = edit(image, mask, prompt)
        pictures, verdicts = one.all(edits), one.all(shows(edits, mask, prompt))
    chosen = best(pictures, verdicts)
    flow.gives(image=enlarge(chosen.picture), verdict=chosen.verdict)
PLAN = flow.plan


def a_run(seconds: float = math.inf, edit_s: float | None = 100.0) -> RunTime:
    """A run whose edit takes `edit_s` with this mask; None: it is not known yet."""
    now_s = time.monotonic()
    machine = WorkflowRun(PLAN, {"image": b"i", "mask": b"m", "prompt": "p"})
    edit_times = {} if edit_s is None else {"edit-1": edit_s}
    return RunTime(PLAN, machine, now_s, now_s + seconds, now_s + seconds, edit_times)


def times(workers: int = 1) -> RunTimes:
    """Nodes have taken a second."""
    return RunTimes(RouterConfig(), lambda node: 1.0, lambda: workers * [0.0])


def test_a_node_is_due_before_what_lies_behind_it() -> None:
    run = a_run(1000.0)
    task = run.machine.ready()[0]
    assert times().due_of(run, task) == run.due - 3.0


def test_nobody_wants_a_node_whose_run_could_not_be_in_time_behind_it() -> None:
    run = a_run(1000.0)
    task = run.machine.ready()[0]
    assert times().deadline_of(run, task) == run.until - 3.0 / 1.5
    endless = a_run()
    assert times().deadline_of(endless, endless.machine.ready()[0]) == math.inf


def test_runs_are_taken_while_all_can_be_in_time() -> None:
    run_times = times()
    first, second_run, free = a_run(200.0), a_run(200.0), a_run()
    run_times.begin(first)  # 203 s on one worker, and 300 are allowed
    with pytest.raises(RetryLater, match=r"pair would take about 40\d\.\d s while earlier runs"):
        run_times.begin(second_run)
    run_times.begin(free)  # due at no time: it is behind all that are
    run_times.end(first)
    run_times.begin(second_run)
    with pytest.raises(DeadlineExceeded, match=r"60\.0 s are too short for pair, .* 103\.0 s"):
        run_times.begin(a_run(60.0))
    two_workers = times(workers=2)
    two_workers.begin(a_run(200.0))
    two_workers.begin(a_run(200.0))
    unknown = times()
    unknown.begin(a_run(2.5, edit_s=None))  # edits whose masks are not known count as nothing
    unknown.begin(a_run(2.5, edit_s=None))


def test_edits_whose_masks_are_not_known_take_what_their_like_took_of_late() -> None:
    run_times, edit_s = times(), 40.0
    run = a_run(1000.0, edit_s=None)
    task = run.machine.ready()[0]
    run_times.learn(run, task, {"timings_ms": {"queue": 5e3}}, edit_s + 5.0)
    assert run_times._price(run)(task.call) == edit_s
    assert run_times._price(run, guess=False)(task.call) == 0.0


def test_edits_that_have_rows_hold_their_workers_and_count_by_what_is_left_of_them() -> None:
    shares: dict[str, float | None] = {"0": None, "1": None}
    busy_s = [0.0]
    run_times = RunTimes(RouterConfig(), lambda node: 1.0, lambda: busy_s, shares.__getitem__)
    first = a_run(200.0)
    run_times.begin(first)
    first.sent |= {task.key: str(n) for n, task in enumerate(first.machine.ready())}
    with pytest.raises(RetryLater):  # 100 + 100 + 2 * 40 s, and 240 are allowed
        run_times.begin(a_run(160.0, edit_s=40.0))
    shares["0"], busy_s[0] = 0.5, 50.0
    run_times.begin(a_run(160.0, edit_s=40.0))
    with pytest.raises(RetryLater):
        run_times.begin(a_run(160.0, edit_s=40.0))


def test_a_task_counts_by_its_own_mask() -> None:
    run = a_run(60.0, edit_s=None)
    small, large = run.machine.ready()
    run.edit_s |= {small.key: 1.0, large.key: 100.0}
    times().check_next(run, small)
    with pytest.raises(DeadlineExceeded, match=r"take about 103\.0 s"):
        times().check_next(run, large)


def test_a_late_run_ends_before_its_next_node() -> None:
    late, early = a_run(10.0), a_run(1000.0)
    run_times = times()
    run_times.check_next(early, early.machine.ready()[0])
    with pytest.raises(DeadlineExceeded, match=r"each-1\[0\]/edit-1 and the nodes after it take "
                       r"about 103\.0 s, and \d+\.\d s are left for pair"):  # fmt: skip
        run_times.check_next(late, late.machine.ready()[0])
    endless = a_run()
    run_times.check_next(endless, endless.machine.ready()[0])
