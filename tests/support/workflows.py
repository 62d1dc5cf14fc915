"""A plain interpreter of plans: one node after the other, as a reader would. The oracle of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maskserve_core.workflows.plan import Each, NodeCall, Repeat, Step, WorkflowPlan
from maskserve_core.workflows.values import Areas

Node = Callable[[str, NodeCall, Mapping[str, Any]], Mapping[str, Any]]
"""Key, node and inputs → outputs."""


def interpret(plan: WorkflowPlan, inputs: Mapping[str, Any], node: Node) -> dict[str, Any]:
    """What the plan gives."""
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    _steps(plan.steps, values, "", node)
    return {name: values[ref] for name, ref in plan.outputs.items()}


def _steps(steps: Sequence[Step], values: dict[str, Any], path: str, node: Node) -> None:
    for step in steps:
        key = path + step.id
        if isinstance(step, NodeCall):
            given = {name: values[ref] for name, ref in step.inputs.items()}
            made = node(key, step, {**given, **step.texts})
        elif isinstance(step, Each):
            made = _each(step, values, key, node)
        else:
            made = _repeat(step, values, key, node)
        values.update({f"{step.id}.{name}": value for name, value in made.items()})


def _each(step: Each, values: Mapping[str, Any], key: str, node: Node) -> dict[str, Any]:
    areas = values[step.over] if step.over is not None else None
    rounds = len(areas.masks) if areas is not None else step.most
    waves = areas.waves if areas is not None and step.side_by_side else range(rounds)
    current = values[step.carry] if step.carry is not None else None
    seen: dict[int, dict[str, Any]] = {}
    for wave in sorted(set(waves)):
        of_wave = [i for i in range(rounds) if waves[i] == wave]
        for i in of_wave:
            own = dict(values)
            if areas is not None:
                own[f"{step.id}.mask"] = areas.masks[i]
            if step.carry is not None:
                own[f"{step.id}.picture"] = current
            _steps(step.body, own, f"{key}[{i}]/", node)
            seen[i] = own
        if step.carried is not None:
            parts = tuple(seen[i][step.carried] for i in of_wave)
            current = parts[0]
            if len(parts) > 1:
                before = seen[of_wave[0]][f"{step.id}.picture"]
                given = {"picture": before, "parts": parts}
                call = NodeCall(id="compose", node="compose")
                current = node(f"{key}/compose[{of_wave[0]}]", call, given)["picture"]
    made: dict[str, Any] = {} if step.carry is None else {"carried": current}
    for name, ref in step.gives.items():
        every = tuple(seen[i][ref] for i in range(rounds))
        made[name] = Areas.in_turn(every) if name.startswith("mask") else every
    return made


def _repeat(step: Repeat, values: Mapping[str, Any], key: str, node: Node) -> dict[str, Any]:
    best: tuple[tuple[bool, float], dict[str, Any]] | None = None
    for i in range(step.most):
        own = dict(values)
        _steps(step.body, own, f"{key}[{i}]/", node)
        said = own[step.until]
        rank = (said.passed, said.score)
        if best is None or rank > best[0]:
            best = (rank, own)
        if said.passed:
            break
    assert best is not None
    return {name: best[1][ref] for name, ref in step.gives.items()}
