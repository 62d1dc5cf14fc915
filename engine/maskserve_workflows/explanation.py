"""Explains a plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import Each, NodeCall, Refs, Step, WorkflowPlan


def explain(plan: WorkflowPlan) -> str:
    """Return a plan's inputs, steps, outputs and pass notes as lines of text."""
    lines = [f"{plan.name} {plan.digest}: {plan.about}".rstrip(": ")]
    lines += [
        f"  takes {workflow_input.name}, a {workflow_input.kind}" for workflow_input in plan.inputs
    ]
    lines += _steps(plan.steps, "  ")
    lines += [f"  gives {name} = {ref}" for name, ref in plan.outputs.items()]
    lines += [f"  pass {note}" for note in plan.notes]
    return "\n".join(lines)


def _steps(steps: Sequence[Step], indent: str) -> Iterator[str]:
    for step in steps:
        if isinstance(step, NodeCall):
            kind = NODE_TYPES[step.node]
            arguments = [f"{name}={_refs_text(refs)}" for name, refs in step.inputs.items()]
            arguments += [f"{name}={_json(text)}" for name, text in step.texts.items()]
            arguments += [f"{name}={_json(value)}" for name, value in step.settings.items()]
            where = f"at {kind.model}, about {kind.price_s:g} s"
            yield f"{indent}{step.id}: {step.node}({', '.join(arguments)}) {where}"
            continue
        if isinstance(step, Each):
            rounds = f"each of {step.over}, {step.most} at most" if step.over else f"{step.most}x"
            carried = f", from {step.carry} on" if step.carry else ""
            parallel_note = ", side by side where regions stay apart" if step.side_by_side else ""
            yield f"{indent}{step.id}: {rounds}{carried}{parallel_note}"
        else:
            yield f"{indent}{step.id}: until {step.until}, {step.most} times at most"
        yield from _steps(step.body, indent + "  ")


def _refs_text(refs: Refs) -> str:
    return refs if isinstance(refs, str) else f"[{', '.join(refs)}]"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
