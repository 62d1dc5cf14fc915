"""A plain interpreter of plans, the oracle of runs. It runs one node after the other. Also random
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.contracts.request import EDIT_KINDS
from maskserve_common.imaging.images import encode_png
from maskserve_workflows.definition import Workflow, each, repeat
from maskserve_workflows.node_request import NodeRequest, Nodes
from maskserve_workflows.nodes import (
    NODE_FILES,
    NODE_TYPES,
    best,
    compose,
    edit,
    enlarge,
    find,
    generate,
    invert,
    outline,
    shows,
    split,
)
from maskserve_workflows.passes import PASSES, compiled
from maskserve_workflows.plan import Each, NodeCall, Repeat, Step, WorkflowPlan
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.values import Areas, map_parts
from tests.support.draws import fresh_seed

DRAWN = 30
"""Number of plans of `drawn_plans`."""
Node = Callable[[str, NodeCall, Mapping[str, Any]], Mapping[str, Any]]
"""Key, node and inputs → outputs."""


@contextmanager
def node_path(*folders: Path) -> Iterator[list[str]]:
    """The node files of these folders, in this process; gives the errors of reading them."""
    types, functions, models = dict(NODE_TYPES), dict(NODE_FILES.functions), NODE_FILES.models
    try:
        yield NODE_FILES.read(folders)
    finally:
        NODE_FILES._models = list(models)
        for known in (NODE_FILES._types, NODE_FILES._functions):
            known.clear()
        NODE_FILES._types.update(types)
        NODE_FILES._functions.update(functions)


def new_node(folder: Path) -> Path:
    """Write the node of docs/workflows.md to a folder; return it."""
    section = (CHECKOUT / "docs" / "workflows.md").read_text().partition("## Add a node")[2]
    text = section.partition("```python\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= 30
    folder.mkdir(exist_ok=True)
    (folder / "sharpen.py").write_text(text)
    return folder


def run_one(
    nodes: Nodes, node: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The outputs of one call, with pictures as files. Raises the node's error."""
    (result,) = nodes.run([NodeRequest(node, inputs, settings)])
    if isinstance(result, Exception):
        raise result

    def encoded(part: Any) -> Any:
        return encode_png(part) if isinstance(part, np.ndarray) else part

    return {name: map_parts(value, encoded) for name, value in result.items()}


def interpret(plan: WorkflowPlan, inputs: Mapping[str, Any], node: Node) -> dict[str, Any]:
    """The plan's outputs."""
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    _steps(plan.steps, values, "", node)
    return {name: values[ref] for name, ref in plan.outputs.items()}


def _steps(steps: Sequence[Step], values: dict[str, Any], path: str, node: Node) -> None:
    for step in steps:
        key = path + step.id
        if isinstance(step, NodeCall):
            inputs = {
                name: map_parts(refs, lambda ref: values[ref]) for name, refs in step.inputs.items()
            }
            outputs = node(key, step, {**inputs, **step.texts})
        elif isinstance(step, Each):
            outputs = _run_each(step, values, key, node)
        else:
            outputs = _repeat(step, values, key, node)
        values.update({f"{step.id}.{name}": value for name, value in outputs.items()})


def _run_each(step: Each, values: Mapping[str, Any], key: str, node: Node) -> dict[str, Any]:
    areas = values[step.over] if step.over is not None else None
    rounds = len(areas.masks) if areas is not None else step.most
    if rounds > step.most:
        raise WorkflowError(f"{step.id}: {rounds} regions are too many")
    waves = areas.waves if areas is not None and step.side_by_side else range(rounds)
    current = values[step.carry] if step.carry is not None else None
    round_values: dict[int, dict[str, Any]] = {}
    for wave in sorted(set(waves)):
        of_wave = [i for i in range(rounds) if waves[i] == wave]
        for i in of_wave:
            scope = dict(values)
            if areas is not None:
                scope[f"{step.id}.mask"] = areas.masks[i]
            if step.carry is not None:
                scope[f"{step.id}.picture"] = current
            _steps(step.body, scope, f"{key}[{i}]/", node)
            round_values[i] = scope
        if step.carried is not None:
            parts = tuple(round_values[i][step.carried] for i in of_wave)
            current = parts[0]
            if len(parts) > 1:
                before = round_values[of_wave[0]][f"{step.id}.picture"]
                inputs = {"picture": before, "parts": parts}
                call = NodeCall(id="compose", node="compose")
                current = node(f"{key}/compose[{of_wave[0]}]", call, inputs)["picture"]
    outputs: dict[str, Any] = {} if step.carry is None else {"carried": current}
    for name, ref in step.gives.items():
        every = tuple(round_values[i][ref] for i in range(rounds))
        outputs[name] = Areas.of_masks(every) if name.startswith("mask") else every
    return outputs


def _repeat(step: Repeat, values: Mapping[str, Any], key: str, node: Node) -> dict[str, Any]:
    best: tuple[tuple[bool, float], dict[str, Any]] | None = None
    for i in range(step.most):
        scope = dict(values)
        _steps(step.body, scope, f"{key}[{i}]/", node)
        verdict = scope[step.until]
        rank = (verdict.passed, verdict.score)
        if best is None or rank > best[0]:
            best = (rank, scope)
        if verdict.passed:
            break
    assert best is not None
    return {name: best[1][ref] for name, ref in step.gives.items()}


@st.composite
def plans(
    draw: st.DrawFn, deep: int = 2, rounds: int = 3, *, sized: bool = False, masked: bool = False
) -> WorkflowPlan:
    """A definition with random nodes and loops that are wired as their kinds allow.

    Args:
        draw: hypothesis's.
        deep: depth of nested loops.
        rounds: most rounds of a loop without regions.
        sized: all pictures keep the size of the masks.
        masked: all edits have a mask.
    """

    def pick(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    with Workflow("random") as flow:
        pictures, masks, verdicts = [flow.picture("image")], [flow.mask("mask")], []
        texts = [flow.text("name"), "a red star"]

        def calls(pictures: list[Any], masks: list[Any], verdicts: list[Any], depth: int) -> None:
            for _ in range(draw(st.integers(1, 4))):
                kind = draw(st.integers(0, 7 if depth < deep else 4))
                if kind == 0:
                    seed = {"seed": 3} if draw(st.booleans()) else {}
                    edit_kind = "inpaint" if masked else pick(EDIT_KINDS)
                    if edit_kind == "generate":
                        pictures.append(generate(pick(texts), **seed))
                        continue
                    mask = pick(masks) if edit_kind == "inpaint" else None
                    further = [] if masked else [pick(pictures) for _ in range(pick((0, 0, 1, 2)))]
                    pictures.append(
                        edit(pick(pictures), mask, pick(texts), references=further, **seed)
                    )
                elif kind == 1:
                    masks.append(find(pick(pictures), pick(texts)))
                elif kind == 2:
                    masks.append(invert(pick(masks)))
                elif kind == 3:
                    verdicts.append(shows(pick(pictures), pick(masks), pick(texts)))
                elif kind == 4 and not sized:
                    pictures.append(enlarge(pick(pictures)))
                elif kind == 4:
                    pictures.append(outline(pick(pictures)))
                elif kind == 5:
                    with each(split(pick(masks)), most=4, carry=pick(pictures)) as one:
                        inner = [*pictures, one.picture]
                        calls(inner, [*masks, one.mask], list(verdicts), depth + 1)
                        one.carried = inner[-1]
                        parts = one.all(pick(inner))
                    pictures.append(one.carried)
                    pictures.append(compose(pick(pictures), parts))
                elif kind == 6:
                    with each(draw(st.integers(1, rounds))) as one:
                        inner, inner_verdicts = list(pictures), list(verdicts)
                        calls(inner, list(masks), inner_verdicts, depth + 1)
                        inner_verdicts.append(shows(inner[-1], pick(masks), pick(texts)))
                        all_pictures, all_verdicts = one.all(inner[-1]), one.all(inner_verdicts[-1])
                    chosen = best(all_pictures, all_verdicts)
                    pictures.append(chosen.picture)
                    verdicts.append(chosen.verdict)
                else:
                    with repeat(most=draw(st.integers(1, rounds))) as tries:
                        inner, inner_verdicts = list(pictures), list(verdicts)
                        calls(inner, list(masks), inner_verdicts, depth + 1)
                        tries.until(shows(inner[-1], pick(masks), pick(texts)))
                        pictures.append(tries.best(inner[-1]))

        calls(pictures, masks, verdicts, 0)
        flow.gives(image=pictures[-1], other=pick(pictures))
    return flow.plan


def plans_of_every_kind() -> list[WorkflowPlan]:
    """Workflows that together have every kind of node and loop."""
    with Workflow("regions", "Each region by itself.") as regions:
        image, prompt = regions.picture("image"), regions.text("prompt")
        with each(split(regions.mask("mask")), most=4, carry=image) as one:
            one.carried = edit(one.picture, one.mask, prompt)
        regions.gives(image=one.carried)
    with Workflow("tries", "Until one will do.") as tries:
        image, mask = tries.picture("image"), tries.mask("mask")
        with repeat(most=2) as again:
            with each(2) as one:
                result = edit(image, mask, "a red star")
                pictures = one.all(result)
                verdicts = one.all(shows(result, mask, "a red star", enough=1.0))
            chosen = best(pictures, verdicts)
            again.until(chosen.verdict)
            picture, verdict = again.best(chosen.picture), again.best(chosen.verdict)
        tries.gives(image=enlarge(picture), verdict=verdict)
    with Workflow("named", "What is found, or not.") as named:
        image = named.picture("image")
        area = find(image, named.text("name"), threshold=1.0)
        named.gives(image=edit(outline(image), invert(area), "a star"))
    return [compiled(flow.plan) for flow in (regions, tries, named)]


def drawn_plans() -> list[WorkflowPlan]:
    """Random plans with all passes but `prime`, because cached rows differ from dense ones."""
    workflow_plans: list[WorkflowPlan] = []

    @hypothesis.settings(
        max_examples=DRAWN, database=None, phases=[hypothesis.Phase.generate], deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.seed(fresh_seed())
    @hypothesis.given(plans(deep=1, rounds=2, sized=True, masked=True))
    def draw(plan: WorkflowPlan) -> None:
        named = structs.replace(plan, name=f"drawn-{len(workflow_plans)}")
        workflow_plans.append(compiled(named, set(PASSES) - {"prime"}))

    draw()
    return workflow_plans
