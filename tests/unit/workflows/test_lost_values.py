"""Values in files: each is there while something reads it, and one that is lost is made again by
the fewest calls that do it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.errors import EngineFailed
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import NODE_TYPES, edit, invert, outline
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task, WorkflowRun, seed_of
from maskserve_workflows.values import Areas, Judgement, NamedValue, map_parts, named_in
from tests.support.examples import examples
from tests.support.workflows import interpret, plans

INPUTS = {"image": "image", "mask": "mask", "name": "name"}


def node(key: str, call: NodeCall, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a node: names of all its inputs, and of a seed that follows from its key."""
    description = (
        f"{call.node}{sorted(inputs.items())}{sorted(call.settings.items())}{seed_of(7, key)}"
    )
    digest = hashlib.sha256(description.encode()).hexdigest()[:12]
    number, outputs = int(digest, 16), dict[str, Any]()
    for name, output_kind in NODE_TYPES[call.node].outputs.items():
        if output_kind == "verdict":
            outputs[name] = Judgement(number % 5 / 4, number % 5 > 2)
        elif output_kind == "regions":
            masks = tuple(f"{digest}.{i}" for i in range(number % 4))
            outputs[name] = Areas(masks, tuple(min(i, number // 7 % 2) for i in range(number % 4)))
        else:
            outputs[name] = f"{name} {digest}"
    return outputs


class Folder:
    """Files that calls read and make; `there` of some of them is taken away."""

    def __init__(self, salt: random.Random | None = None) -> None:
        self.files: set[bytes] = set()
        self._salt = salt
        """Salt of calls that do not give the same names again."""

    def holds(self, value: NamedValue) -> bool:
        return value.data is not None or value.reference in self.files

    def called(self, task: Task) -> dict[str, Any]:
        """The outputs of a call, as files; all that it takes must be there."""

        def read(part: Any) -> Any:
            if not isinstance(part, NamedValue):
                return part
            assert self.holds(part), f"{task.key} reads {part.reference!r}, which is gone"
            return part.reference.decode().partition("#")[0]

        def put(part: Any) -> Any:
            if not isinstance(part, str):
                return part
            salt = "" if self._salt is None else f"#{self._salt.random()}"
            self.files.add(name := f"{part}{salt}".encode())
            return NamedValue(name)

        inputs = {name: map_parts(value, read) for name, value in task.inputs.items()}
        outputs = node(task.key, task.call, inputs)
        return {name: map_parts(value, put) for name, value in outputs.items()}

    def content(self, value: Any) -> Any:
        def name(part: Any) -> Any:
            if not isinstance(part, NamedValue):
                return part
            assert self.holds(part)
            return part.reference.decode().partition("#")[0]

        return map_parts(value, name)


@given(plans(), st.integers(0, 2**32))
@examples(150)
def test_what_nothing_reads_any_more_may_go_and_nothing_else(plan: Any, seed: int) -> None:
    plan, rng, folder = compiled(plan), random.Random(seed), Folder()
    run, waiting = WorkflowRun(plan, INPUTS, folder.holds), list[Task]()
    while not run.ended:
        waiting += run.ready()
        task = waiting.pop(rng.randrange(len(waiting)))
        run.complete(task.key, folder.called(task))
        folder.files &= {value.reference for value in named_in(list(run.needed()))}
    output_references = {value.reference for value in named_in(list(run.outputs.values()))}
    assert folder.files == output_references
    expected = interpret(plan, INPUTS, node)
    assert {name: folder.content(value) for name, value in run.outputs.items()} == expected


@given(plans(), st.integers(0, 2**32), st.booleans())
@examples(150)
def test_a_run_whose_values_are_lost_gives_what_it_would_have_given(
    plan: Any, seed: int, salted: bool
) -> None:
    plan, rng = compiled(plan), random.Random(seed)
    folder = Folder(random.Random(seed) if salted else None)
    run, waiting = WorkflowRun(plan, INPUTS, folder.holds), list[Task]()
    losses = 6
    while True:
        while not run.ended:
            waiting += run.ready()
            assert waiting, "the run stands still"
            task = waiting.pop(rng.randrange(len(waiting)))
            if losses and folder.files and rng.random() < 0.3:
                losses -= 1
                folder.files.discard(rng.choice(sorted(folder.files)))
            if all(map(folder.holds, named_in(list(task.inputs.values())))):
                run.complete(task.key, folder.called(task))
            else:
                run.retry(task.key)
        lost_values = [v for v in named_in(list(run.outputs.values())) if not folder.holds(v)]
        if not lost_values:
            break
        run.rerun_sources_of(lost_values)
    expected = interpret(plan, INPUTS, node)
    assert {name: folder.content(value) for name, value in run.outputs.items()} == expected


def fewest(
    calls: Mapping[str, tuple[Task, Any, Any]], lost_values: Collection[Any], goals: Any
) -> int:
    """The size of the smallest set of ended calls that restores these values, by search."""
    maker: dict[Any, str] = {}
    for key, (_, _, outputs) in calls.items():
        for value in named_in(list(outputs.values())):
            maker.setdefault(value, key)

    def does(keys: Collection[str]) -> bool:
        restored_values, remaining_keys = set[Any](), set(keys)
        while remaining_keys:
            ready = {
                key
                for key in remaining_keys
                if all(
                    value not in lost_values or value in restored_values
                    for value in named_in(list(calls[key][0].inputs.values()))
                )
            }
            if not ready:
                return False
            restored_values |= {value for value in maker if maker[value] in ready}
            remaining_keys -= ready
        return all(value not in lost_values or value in restored_values for value in goals)

    for size in range(len(calls) + 1):
        if any(does(keys) for keys in combinations(calls, size)):
            return size
    raise AssertionError("nothing brings them back")


@given(plans(deep=1, rounds=2), st.integers(0, 2**32))
@examples(150)
def test_the_fewest_calls_bring_lost_values_back(plan: Any, seed: int) -> None:
    plan, rng, folder = compiled(plan), random.Random(seed), Folder()
    run = WorkflowRun(plan, INPUTS, folder.holds)
    waiting, ends = run.ready(), rng.randrange(1, 10)
    while waiting and len(run._answered) < ends:
        task = waiting.pop(rng.randrange(len(waiting)))
        run.complete(task.key, folder.called(task))
        waiting += run.ready()
    calls_before, makers = dict(run._answered), list(run._maker)
    folder.files -= {name for name in sorted(folder.files) if rng.random() < 0.5}
    lost_values = [value for value in makers if not folder.holds(value)]
    if waiting:
        needed_values = named_in(list(waiting[0].inputs.values()))
        run.retry(waiting[0].key)
    else:
        needed_values = [value for value in makers if rng.random() < 0.3]
        run.rerun_sources_of([value for value in needed_values if value in lost_values])
    ended, queue = list[str](), [task for task in run.ready() if task.key in calls_before]
    while queue:
        task = queue.pop(rng.randrange(len(queue)))
        run.complete(task.key, folder.called(task))
        ended.append(task.key)
        queue += [ready_task for ready_task in run.ready() if ready_task.key in calls_before]
    assert len(ended) == len(set(ended)) == fewest(calls_before, lost_values, needed_values)
    assert all(map(folder.holds, needed_values))


def test_what_gives_something_else_when_it_is_made_again_ends_the_run() -> None:
    with Workflow("two") as flow:
        picture = outline(flow.picture("image"))
        flow.gives(image=edit(picture, invert(flow.mask("mask")), "a star"))
    run = WorkflowRun(compiled(flow.plan), INPUTS, lambda value: value.data is not None)
    first, second = sorted(run.ready(), key=lambda task: task.call.node)
    run.complete(first.key, {"mask": NamedValue(b"m")})
    run.complete(second.key, {"picture": NamedValue(b"p")})
    [painted] = run.ready()
    run.retry(painted.key)
    ready_keys = {task.key for task in run.ready()}
    assert ready_keys == {first.key, second.key}
    run.complete(first.key, {"mask": b"it goes as bytes now"})
    assert not run.ready()
    with pytest.raises(EngineFailed, match="gave 1 values, and now 2"):
        run.complete(second.key, {"picture": (b"p", b"q")})
