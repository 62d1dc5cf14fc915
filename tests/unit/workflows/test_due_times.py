"""Due times of nodes, against runs that are driven to their end at these prices."""

import copy
import heapq
import random

from hypothesis import given
from hypothesis import strategies as st

from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import Each, references_of
from maskserve_workflows.run import WorkflowRun
from maskserve_workflows.values import Areas, Judgement
from tests.support.examples import examples
from tests.support.workflows import plans

INPUTS = {"image": "image", "mask": "mask", "name": "name"}
PRICES = {
    "edit": 1.0,
    "generate": 2.0,
    "find": 0.25,
    "shows": 0.125,
    "enlarge": 0.5,
    "compose": 0.0625,
}


def price(call):
    return PRICES.get(call.node, 0.03125)


def answer(task):
    """One region, and a verdict that passes: what is counted on where it is not known."""
    outputs_by_node = {"encode": {"encoding": None},
            "edit": {"picture": "p"}, "find": {"mask": "m"}, "invert": {"mask": "m"},
            "shows": {"verdict": Judgement(1.0, True)}, "split": {"regions": Areas(("m",), (0,))},
            "best": {"picture": "p", "verdict": Judgement(1.0, True)}}  # fmt: skip
    return outputs_by_node.get(task.call.node, {"picture": "p"})


def drive(run, begun, price):
    """Seconds until all that can run has: each task begins when it can, on a device of its own."""
    now_s, ends, total = 0.0, [], 0.0
    while True:
        for task in [*begun, *run.ready()]:
            heapq.heappush(ends, (now_s + price(task.call), task.key, task))
            total += price(task.call)
        begun = []
        if not ends:
            return now_s, total
        now_s, _, task = heapq.heappop(ends)
        run.complete(task.key, answer(task))


def longest_behind(run, other_runs, task):
    """The run without the task as far as it goes, for nothing; then the task, and all the rest."""
    run_copy = copy.deepcopy(run)
    drive(run_copy, other_runs, lambda call: 0.0)
    run_copy.complete(task.key, answer(task))
    return drive(run_copy, [], price)[0]


def begins(plan, ended, key):
    """Whether all loops over this task's regions wait for nothing else."""
    loops = [x for x in plan.steps if isinstance(x, Each) and x.over == f"{key}.regions"]
    owners = {ref.partition(".")[0] for loop in loops for ref in references_of(loop)}
    return bool(loops) and owners - ended <= {key, "inputs"}


@given(plans(deep=1), st.integers(0, 2**32), st.sets(st.sampled_from(sorted(PASSES))))
@examples(60)
def test_a_node_is_due_as_long_before_its_plan_as_what_lies_behind_it_takes(plan, seed, passes):
    plan, rng = compiled(plan, passes), random.Random(seed)
    run, under_way, ended = WorkflowRun(plan, INPUTS), [], set()
    while not run.ended:
        under_way += run.ready()
        if len(run.tries) <= 6:
            for task in under_way:
                other_tasks = [other_task for other_task in under_way if other_task is not task]
                assert run.chain_s(task.key, price) == longest_behind(run, other_tasks, task)
            assert run.remaining_s(price) == drive(copy.deepcopy(run), list(under_way), price)
            assert run.remaining_s(price, lambda task: price(task.call)) == run.remaining_s(price)
        task = under_way.pop(rng.randrange(len(under_way)))
        outputs = answer(task)
        if begins(plan, ended, task.key):  # from now on it is known how many there are
            count = rng.randrange(4)
            outputs = {
                "regions": Areas(("m",) * count, tuple(rng.randrange(2) for _ in range(count)))
            }
        run.complete(task.key, outputs)
        ended.add(task.key)
    assert run.remaining_s(price) == (0.0, 0.0)
