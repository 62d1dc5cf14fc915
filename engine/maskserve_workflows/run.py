"""A run of a plan, as a state machine over tasks that are ready, running and complete.

    run = WorkflowRun(plan, {"image": …})
    while not run.ended:
        for task in run.ready(): …        # start them, in any way and order
        run.complete(task.key, outputs)   # or run.retry(task.key): it is ready again

It calls no node itself. The only values that it reads are regions, verdicts, and references to
files (`NamedValue`). A task's key has its place in the plan and the numbers of its rounds. The
task's seed follows from the key (`seed_of`), so a task that runs again gives equal outputs. If a
file is lost and its value still needed, the task that made it runs again, and before it the tasks
of its own lost inputs. No other task runs again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maskserve_common.errors import EngineFailed
from maskserve_workflows.lengths import COMPOSE, Price, length, tails, work
from maskserve_workflows.plan import (
    INPUTS,
    Each,
    NodeCall,
    Refs,
    Repeat,
    Step,
    WorkflowPlan,
    all_kinds,
    references_of,
)
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.values import Areas, Judgement, NamedValue, named_in, parts_of


@dataclass(frozen=True, slots=True)
class Task:
    """A node to call."""

    key: str
    call: NodeCall
    inputs: Mapping[str, Any]
    """Input name -> value, literal texts included."""


def seed_of(seed: int, key: str) -> int:
    """Return the 32-bit seed of a task in a run of this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:4], "big")


@dataclass(slots=True, eq=False)
class _Scope:
    """Scope of values: the plan's steps, or a round of a loop."""

    path: str
    steps: Sequence[Step]
    values: dict[str, Any]
    outer: _Scope | None = None
    loop: _Rounds | None = None
    begun: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def knows(self, ref: str) -> bool:
        return ref in self.values or (self.outer is not None and self.outer.knows(ref))

    def value(self, ref: str) -> Any:
        if ref in self.values or self.outer is None:
            return self.values[ref]
        return self.outer.value(ref)

    def read(self, further: Iterable[str]) -> Iterator[Any]:
        """Yield the known values that unfinished steps take, and those of `further` references."""
        step_refs = (
            ref for step in self.steps if step.id not in self.ended for ref in references_of(step)
        )
        return (self.value(ref) for ref in (*step_refs, *further) if self.knows(ref))

    def unbegun_s(self, price: Price) -> float:
        """Return the seconds of all calls of the steps that have not begun."""
        return sum(work(step, price) for step in self.steps if step.id not in self.begun)


@dataclass(slots=True, eq=False)
class _Rounds:
    """State of a loop that has begun."""

    step: Each | Repeat
    scope: _Scope
    """Scope that contains the loop."""
    key: str
    areas: Areas | None = None
    waves: list[list[int]] = field(default_factory=list)
    """Rounds of `each` that are still to begin, by number; rounds of one wave run together."""
    current: Any = None
    """Picture that rounds pass on."""
    running: list[int] = field(default_factory=list)
    rounds: dict[int, _Scope] = field(default_factory=dict)
    unended: int = 0
    """Number of running rounds that have not ended."""

    def remaining_s(self, price: Price) -> float:
        """Return the seconds of the rounds that have not begun, one wave after the other."""
        body = length(self.step.body, price)
        return sum(body + self.composing(wave, price) for wave in self.waves)

    def unbegun_s(self, price: Price) -> float:
        """Return the seconds of all calls of the rounds that have not begun."""
        body = sum(work(step, price) for step in self.step.body)
        waves = (self.running, *self.waves)
        composes = sum(self.composing(wave, price) for wave in waves)
        return composes + body * sum(map(len, self.waves))

    def composing(self, wave: Sequence[int], price: Price) -> float:
        """Return the seconds to compose one picture from a wave's pictures."""
        carries = isinstance(self.step, Each) and self.step.carried is not None
        return price(COMPOSE) if carries and len(wave) > 1 else 0.0


class WorkflowRun:
    """One run.

    Args:
        plan: a plan that passed `check_plan`.
        inputs: inputs of the workflow, name → value.
        exists: returns whether a value's file still exists; always True for the workflow's own
            inputs.
    """

    def __init__(
        self,
        plan: WorkflowPlan,
        inputs: Mapping[str, Any],
        exists: Callable[[NamedValue], bool] = lambda value: True,
    ) -> None:
        self._plan, self._exists = plan, exists
        self._kinds = all_kinds(plan)
        self._ready: list[Task] = []
        self._running: dict[str, tuple[Task, _Scope | _Rounds]] = {}
        self.tries: dict[str, int] = {}
        """Number of tries of each task."""
        self._answered: dict[str, tuple[Task, _Scope | _Rounds, Mapping[str, Any]]] = {}
        """Answered tasks, with their scopes and outputs."""
        self._maker: dict[NamedValue, str] = {}
        """Value -> key of the task that made it."""
        self._blocked: dict[str, Task] = {}
        """Tasks that wait until their inputs are made again."""
        self._loops: list[_Rounds] = []
        """Loops that have begun and not ended."""
        values = {f"{INPUTS}.{name}": value for name, value in inputs.items()}
        self._top = _Scope("", plan.steps, values)
        self._advance(self._top)

    def ready(self) -> list[Task]:
        """Return the tasks to start now; each is returned once, and again if it was lost."""
        tasks, self._ready = self._ready, []
        for task in tasks:
            self.tries[task.key] = self.tries.get(task.key, 0) + 1
        return tasks

    def retry(self, key: str) -> None:
        """Make a task whose call was lost ready again, once all of its inputs exist."""
        self._begin(self._running[key][0])

    def rerun_sources_of(self, values: Iterable[NamedValue]) -> None:
        """Run the tasks again that made these lost values."""
        for value in values:
            key = self._maker[value]
            if key not in self._running:  # otherwise it is being made
                task, place, _ = self._answered[key]
                self._running[key] = (task, place)
                self._begin(task)

    def _begin(self, task: Task) -> None:
        missing = [
            value for value in named_in(list(task.inputs.values())) if not self._exists(value)
        ]
        if missing:
            self._blocked[task.key] = task
            self.rerun_sources_of(missing)
        else:
            self._ready.append(task)

    def _reopen(self, key: str, outputs: Mapping[str, Any]) -> None:
        for name, old_value in self._answered[key][2].items():
            old, new = list(parts_of(old_value)), list(parts_of(outputs[name]))
            if len(old) != len(new):
                raise EngineFailed(f"{key}: gave {len(old)} values, and now {len(new)}")
            for old_part, new_part in zip(old, new, strict=True):
                if isinstance(old_part, NamedValue):
                    old_part.replace_with(new_part)
        waiting, self._blocked = self._blocked, {}
        for task in waiting.values():
            self._begin(task)

    def complete(self, key: str, outputs: Mapping[str, Any]) -> None:
        """Record the outputs of a task, and make the tasks that waited for them ready.

        Raises:
            WorkflowError: the run cannot continue.
            EngineFailed: a repeated task gave another number of values.
        """
        task, place = self._running.pop(key)
        if key in self._answered:
            self._reopen(key, outputs)
            return
        self._answered[key] = task, place, outputs
        for value in named_in(list(outputs.values())):
            self._maker.setdefault(value, key)
        if isinstance(place, _Rounds):
            place.current = outputs["picture"]
            self._next_wave(place)
            return
        for name, value in outputs.items():
            place.values[f"{task.call.id}.{name}"] = value
        self._step_ended(place, task.call.id)

    @property
    def ended(self) -> bool:
        """True if all tasks are done."""
        return len(self._top.ended) == len(self._plan.steps) and not self._running

    @property
    def outputs(self) -> dict[str, Any]:
        """The workflow's outputs, once it has ended."""
        return {name: self._top.value(ref) for name, ref in self._plan.outputs.items()}

    def needed(self) -> Iterator[Any]:
        """Yield all values that the run still needs."""
        for task, _ in self._running.values():
            yield from task.inputs.values()
        outputs = self._plan.outputs.values()
        yield from self._top.read(outputs)
        for loop in self._loops:
            yield loop.current
            if loop.areas is not None:
                yield [loop.areas.masks[number] for wave in loop.waves for number in wave]
            step = loop.step
            round_refs = [step.until] if isinstance(step, Repeat) else []
            if isinstance(step, Each) and step.carried is not None and loop.unended:
                round_refs = [step.carried]
            for number, scope in loop.rounds.items():
                running_refs = round_refs if number in loop.running else []
                yield from scope.read([*step.gives.values(), *running_refs])

    def chain_s(self, key: str, price: Price) -> float:
        """Return the seconds of the longest chain of tasks after a running one."""
        task, place = self._running[key]
        if isinstance(place, _Rounds):
            return place.remaining_s(price) + _chain_s(place.scope, place.step.id, price)
        return _chain_s(place, task.call.id, price)

    def remaining_s(
        self, price: Price, remaining: Callable[[Task], float] | None = None
    ) -> tuple[float, float]:
        """Return the seconds of the longest unfinished chain of calls, and of all unfinished calls
        together.

        Args:
            price: seconds of a call.
            remaining: returns the remaining seconds of a running task; None: its call's price.
        """
        path, calls = 0.0, 0.0
        visited: set[_Scope | _Rounds] = set()
        for task, place in self._running.values():
            task_s = price(task.call) if remaining is None else remaining(task)
            path = max(path, task_s + self.chain_s(task.key, price))
            calls += task_s
            parent: _Scope | _Rounds | None = place
            while parent is not None and parent not in visited:
                visited.add(parent)
                calls += parent.unbegun_s(price)
                parent = parent.scope if isinstance(parent, _Rounds) else parent.loop
        return path, calls

    def _advance(self, scope: _Scope) -> None:
        """Begin all steps whose inputs are complete."""
        for step in scope.steps:
            if step.id in scope.begun or not all(map(scope.knows, references_of(step))):
                continue
            scope.begun.add(step.id)
            key = f"{scope.path}{step.id}"
            if isinstance(step, NodeCall):
                inputs = {name: self._value_of(scope, refs) for name, refs in step.inputs.items()}
                self._start(Task(key, step, inputs | step.texts), scope)
            elif isinstance(step, Each):
                self._loops.append(rounds := _Rounds(step, scope, key))
                self._begin_rounds(rounds, step)
            else:
                self._loops.append(rounds := _Rounds(step, scope, key))
                self._open(rounds, [0])

    def _value_of(self, scope: _Scope, refs: Refs) -> Any:
        """Return the value of an input of a call."""
        if isinstance(refs, str):
            return scope.value(refs)
        return self._listed([scope.value(ref) for ref in refs], refs[0])

    def _listed(self, values: Sequence[Any], ref: str) -> Any:
        """Return values of the kind of `ref` as one value."""
        return Areas.of_masks(values) if self._kinds[ref] == "mask" else tuple(values)

    def _start(self, task: Task, place: _Scope | _Rounds) -> None:
        self._running[task.key] = (task, place)
        self._ready.append(task)

    def _step_ended(self, scope: _Scope, step: str) -> None:
        scope.ended.add(step)
        self._advance(scope)
        self._settle(scope)

    def _settle(self, scope: _Scope) -> None:
        """Report a round to its loop once all of it has ended."""
        if len(scope.ended) == len(scope.steps) and scope.loop is not None:
            loop, scope.loop = scope.loop, None
            self._round_ended(loop)

    # Loops.

    def _open(self, rounds: _Rounds, numbers: list[int]) -> None:
        """Begin these rounds."""
        rounds.running, rounds.unended = numbers, len(numbers)
        name = rounds.step.id
        scopes = []
        for number in numbers:
            values = {}
            if rounds.areas is not None:
                values[f"{name}.mask"] = rounds.areas.masks[number]
            if isinstance(rounds.step, Each) and rounds.step.carry is not None:
                values[f"{name}.picture"] = rounds.current
            path = f"{rounds.key}[{number}]/"
            scope = _Scope(path, rounds.step.body, values, rounds.scope, rounds)
            rounds.rounds[number] = scope
            scopes.append(scope)
        for scope in scopes:
            self._advance(scope)
            self._settle(scope)  # it has no steps if a pass removed them

    def _begin_rounds(self, rounds: _Rounds, step: Each) -> None:
        count = step.most
        if step.over is not None:
            areas = rounds.scope.value(step.over)
            rounds.areas, count = areas, len(areas.masks)
            if count > step.most:
                raise WorkflowError(
                    f"{step.id}: {count} regions are too many; accepted: up to {step.most}"
                )
        rounds.waves = [[number] for number in range(count)]
        if step.carry is None:
            rounds.waves = [list(range(count))] if count else []
        else:
            rounds.current = rounds.scope.value(step.carry)
            if step.side_by_side and rounds.areas is not None:
                waves = rounds.areas.waves
                rounds.waves = [
                    [number for number in range(count) if waves[number] == wave]
                    for wave in sorted(set(waves))
                ]
        self._next_wave(rounds)

    def _next_wave(self, rounds: _Rounds) -> None:
        if rounds.waves:
            self._open(rounds, rounds.waves.pop(0))
        else:
            self._loop_ended(rounds, None)

    def _round_ended(self, rounds: _Rounds) -> None:
        rounds.unended -= 1
        if rounds.unended:
            return
        step = rounds.step
        if isinstance(step, Repeat):
            number = rounds.running[0]
            verdict = rounds.rounds[number].value(step.until)
            if verdict.passed or number + 1 == step.most:
                self._loop_ended(rounds, self._best_round(rounds, step))
            else:
                self._open(rounds, [number + 1])
            return
        if step.carried is not None:
            parts = [rounds.rounds[number].value(step.carried) for number in rounds.running]
            if len(parts) > 1:
                self._compose(rounds, parts)
                return
            rounds.current = parts[0]
        self._next_wave(rounds)

    def _compose(self, rounds: _Rounds, parts: list[Any]) -> None:
        """Compose the pictures of a wave."""
        inputs = {"picture": rounds.current, "parts": tuple(parts)}
        key = f"{rounds.key}/compose[{rounds.running[0]}]"
        rounds.running = []
        self._start(Task(key, COMPOSE, inputs), rounds)

    def _best_round(self, rounds: _Rounds, step: Repeat) -> _Scope:
        """Return the round whose outputs the loop gives: the first with the highest score, of the
        rounds that passed or, if none did, of all.
        """

        def rank(number: int) -> tuple[bool, float, int]:
            verdict: Judgement = rounds.rounds[number].value(step.until)
            return (verdict.passed, verdict.score, -number)

        return rounds.rounds[max(rounds.rounds, key=rank)]

    def _loop_ended(self, rounds: _Rounds, best_round: _Scope | None) -> None:
        """End a loop. Its outputs are those of `best_round`, or lists over all rounds."""
        self._loops.remove(rounds)
        step, values = rounds.step, rounds.scope.values
        for name, ref in step.gives.items():
            if best_round is not None:
                values[f"{step.id}.{name}"] = best_round.value(ref)
                continue
            round_values = [rounds.rounds[number].value(ref) for number in sorted(rounds.rounds)]
            values[f"{step.id}.{name}"] = self._listed(round_values, ref)
        if isinstance(step, Each) and step.carry is not None:
            values[f"{step.id}.carried"] = rounds.current
        self._step_ended(rounds.scope, step.id)


def _chain_s(scope: _Scope, step: str, price: Price) -> float:
    """Return the seconds of the longest chain after a step of the scope."""
    seconds, loop = tails(scope.steps, price)[step], scope.loop
    if loop is None:
        return seconds
    seconds += loop.composing(loop.running, price) + loop.remaining_s(price)
    return seconds + _chain_s(loop.scope, loop.step.id, price)
