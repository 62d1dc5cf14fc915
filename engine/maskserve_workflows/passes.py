"""Compiler passes over a plan.

Each pass has a flag and notes its changes. It leaves answers unchanged unless its docstring says
otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from maskserve_common.contracts.settings import ENCODER_SETTINGS
from maskserve_workflows.node_types import ENCODE
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import (
    MOST_STEPS,
    Each,
    NodeCall,
    Repeat,
    Step,
    WorkflowPlan,
    check_plan,
    digest_of,
    edit_calls,
    every_step,
    is_edit,
    kind_of_edit,
    references,
)


def compiled(plan: WorkflowPlan, passes: Collection[str] | None = None) -> WorkflowPlan:
    """Return the plan with these passes applied, by default all, and its digest.

    Raises:
        WorkflowError: the plan cannot run.
    """
    check_plan(plan)
    for name, run_pass in PASSES.items():
        if passes is None or name in passes:
            plan, notes = run_pass(plan)
            pass_notes = tuple(f"{name}: {note}" for note in notes)
            plan = structs.replace(plan, notes=(*plan.notes, *pass_notes))
    check_plan(plan)
    return structs.replace(plan, digest=digest_of(plan))


def drop_dead(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Drop nodes whose outputs nothing uses."""
    notes: list[str] = []

    def alive(steps: Sequence[Step], needed: set[str]) -> tuple[Step, ...]:
        """Return the steps whose values are required, and add their inputs to `needed`."""
        live_steps: list[Step] = []
        for step in reversed(steps):
            required_names = {
                ref.partition(".")[2] for ref in needed if ref.partition(".")[0] == step.id
            }
            if not required_names:
                notes.append(f"{step.id} is left out: nobody takes what it gives")
                continue
            if not isinstance(step, NodeCall):
                outputs = {name: ref for name, ref in step.gives.items() if name in required_names}
                ends = [step.until] if isinstance(step, Repeat) else [step.carried]
                inner = {ref for ref in (*ends, *outputs.values()) if ref is not None}
                step = structs.replace(step, gives=outputs, body=alive(step.body, inner))
            needed |= set(references(step))
            live_steps.append(step)
        return tuple(reversed(live_steps))

    steps = alive(plan.steps, set(plan.outputs.values()))
    return structs.replace(plan, steps=steps), notes


def merge_equal(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Call nodes that would give the same answer only once."""
    notes: list[str] = []
    new: dict[str, str] = {}
    """Step → the equal step that stays."""

    def renamed(ref: str) -> str:
        step, _, name = ref.partition(".")
        return f"{new.get(step, step)}.{name}"

    def merged(steps: Sequence[Step], known: Mapping[bytes, str]) -> tuple[Step, ...]:
        merged_steps: list[Step] = []
        seen_steps = dict(known)
        for step in steps:
            step = _with_references(step, renamed)
            if isinstance(step, NodeCall):
                if NODE_TYPES[step.node].deterministic or "seed" in step.settings:
                    fingerprint = msgspec.json.encode(
                        structs.replace(step, id="same"), order="sorted"
                    )
                    if fingerprint in seen_steps:
                        new[step.id] = seen_steps[fingerprint]
                        notes.append(f"{step.id} is {seen_steps[fingerprint]}")
                        continue
                    seen_steps[fingerprint] = step.id
            else:
                step = structs.replace(step, body=merged(step.body, seen_steps))
                # Values that it gives from its body may have been merged meanwhile.
                step = _with_references(step, renamed)
            merged_steps.append(step)
        return tuple(merged_steps)

    steps = merged(plan.steps, {})
    outputs = {name: renamed(ref) for name, ref in plan.outputs.items()}
    return structs.replace(plan, steps=steps, outputs=outputs), notes


def share_encodings(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Encode a picture once for several edits with this picture and mask, before they begin; with
    it their prompt, if they have the same.
    """
    notes: list[str] = []
    names = {step.id for step in every_step(plan.steps)}

    def fresh() -> str:
        name = next(name for i in itertools.count(1) if (name := f"{ENCODE}-{i}") not in names)
        names.add(name)
        return name

    def shared(steps: Sequence[Step], encoding_of: dict[str, str]) -> tuple[Step, ...]:
        """Return the steps with encodings before those that share them.

        Args:
            steps: steps of the plan or of a loop's body.
            encoding_of: edit -> its encoding, where that is known; it is added to.
        """
        groups: dict[bytes, list[_SharingEdit]] = {}
        for number, step in enumerate(steps):
            for edit in _sharing_edits(step, number):
                if edit.call.id not in encoding_of:
                    groups.setdefault(edit.key, []).append(edit)
        encodes: dict[int, list[NodeCall]] = {}
        for edits in groups.values():
            count = sum(edit.most for edit in edits)
            if count > 1 and len(names) < MOST_STEPS:
                call = _encode_call(fresh(), edits)
                encodes.setdefault(edits[0].number, []).append(call)
                encoding_of |= {edit.call.id: call.id for edit in edits}
                notes.append(f"{call.inputs['image']} is encoded once for {count} edits")
        new_steps: list[Step] = []
        for number, step in enumerate(steps):
            new_steps += encodes.get(number, ())
            if not isinstance(step, NodeCall):
                step = structs.replace(step, body=shared(step.body, encoding_of))
            elif step.id in encoding_of:
                inputs = {**step.inputs, "encoding": f"{encoding_of[step.id]}.encoding"}
                step = structs.replace(step, inputs=inputs)
            new_steps.append(step)
        return tuple(new_steps)

    return structs.replace(plan, steps=shared(plan.steps, {})), notes


def prime_first(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Let edits that share a picture wait until it is primed, and then run cached."""
    counts: dict[str, int] = {}
    for ref, times in _edits_of(plan.steps):
        counts[ref] = counts.get(ref, 0) + times
    several = {ref for ref, count in counts.items() if count > 1}

    def primed(step: Step) -> Step:
        if not isinstance(step, NodeCall):
            return structs.replace(step, body=tuple(map(primed, step.body)))
        if not _is_masked(step) or "cache" in step.settings or step.inputs["image"] not in several:
            return step
        return structs.replace(step, settings={**step.settings, "cache": "require"})

    notes = [f"{ref} is primed for {counts[ref]} edits" for ref in sorted(several)]
    return structs.replace(plan, steps=tuple(map(primed, plan.steps))), notes


def side_by_side(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Let edits of one picture whose regions do not touch share it, and compose their results.

    Regions that touch are edited one after the other, and so are all regions if a round edits a
    picture without a mask. Answers change: each edit sees the picture without the others' changes.
    """
    notes: list[str] = []

    def parallel(step: Step) -> Step:
        if isinstance(step, NodeCall):
            return step
        step = structs.replace(step, body=tuple(map(parallel, step.body)))
        carries = isinstance(step, Each) and step.carry is not None and step.over is not None
        if carries and all(map(_is_masked, edit_calls(step.body))):
            notes.append(f"rounds of {step.id} whose regions stay apart share their picture")
            return structs.replace(step, side_by_side=True)
        return step

    return structs.replace(plan, steps=tuple(map(parallel, plan.steps))), notes


def hoist_edits(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Load LoRAs that edits of later nodes name as the run begins."""
    first = {f"inputs.{workflow_input.name}" for workflow_input in plan.inputs}
    later = [step for step in edit_calls(plan.steps) if not set(step.inputs.values()) <= first]
    early = {lora["name"]: None for step in later for lora in step.settings.get("loras", ())}
    notes = [f"{name} is brought as the run begins" for name in early]
    return structs.replace(plan, early=tuple(early)), notes


PASSES: Final[dict[str, Callable[[WorkflowPlan], tuple[WorkflowPlan, list[str]]]]] = {
    "dead": drop_dead,
    "merge": merge_equal,
    "beside": side_by_side,
    "encode": share_encodings,
    "prime": prime_first,
    "early": hoist_edits,
}
"""Passes in the order in which they run."""


def _with_references(step: Step, renamed: Callable[[str], str]) -> Step:
    """Rename a step's own references to other steps; its body stays."""
    if isinstance(step, NodeCall):
        inputs = {name: renamed(ref) for name, ref in step.inputs.items()}
        return structs.replace(step, inputs=inputs)
    outputs = {name: renamed(ref) for name, ref in step.gives.items()}
    if isinstance(step, Repeat):
        return structs.replace(step, until=renamed(step.until), gives=outputs)
    over, carry, carried = (
        None if ref is None else renamed(ref) for ref in (step.over, step.carry, step.carried)
    )
    return structs.replace(step, over=over, carry=carry, carried=carried, gives=outputs)


def _is_masked(call: NodeCall) -> bool:
    """Return whether a call is an edit that may read cached tokens."""
    return is_edit(call) and kind_of_edit(call) == "inpaint"


def _edits_of(steps: Sequence[Step]) -> Iterator[tuple[str, int]]:
    """Yield the pictures that masked edits need, each with the most edits at once."""
    for step in steps:
        if isinstance(step, NodeCall):
            if _is_masked(step):
                yield step.inputs["image"], 1
            continue
        rounds = step.most if isinstance(step, Each) else 1
        body_ids = {substep.id for substep in every_step([step])}
        for ref, count in _edits_of(step.body):
            is_parallel = (
                isinstance(step, Each) and step.side_by_side and ref == f"{step.id}.picture"
            )
            outside = ref.partition(".")[0] not in body_ids
            yield ref, count * (rounds if outside or is_parallel else 1)


class _SharingEdit(NamedTuple):
    """An edit in a step, with inputs from outside of the step's loops."""

    number: int
    """Place of the step in its body."""
    call: NodeCall
    most: int
    """Most calls of it at once."""
    outer: Mapping[str, str]
    """Its inputs that are known before the step."""

    @property
    def key(self) -> bytes:
        """Equal for edits whose picture has one encoding."""
        settings = {name: x for name, x in self.call.settings.items() if name in ENCODER_SETTINGS}
        place = [self.outer["image"], self.outer.get("mask"), settings]
        return msgspec.json.encode(place, order="sorted")


def _sharing_edits(step: Step, number: int) -> Iterator[_SharingEdit]:
    """Yield the edits in a step whose picture and mask come from before it."""
    inner_ids = set() if isinstance(step, NodeCall) else {x.id for x in every_step([step])}
    for call, count in _edits_at_once(step):
        outer = {
            name: ref for name, ref in call.inputs.items() if ref.partition(".")[0] not in inner_ids
        }
        pictures = {"image", "mask"} & call.inputs.keys()
        is_settled = "encoding" in call.inputs or "mask_from" in call.settings
        if outer.keys() >= pictures and not is_settled:
            yield _SharingEdit(number, call, count, outer)


def _edits_at_once(step: Step) -> Iterator[tuple[NodeCall, int]]:
    """Yield the edits in a step, each with the most calls at once."""
    if isinstance(step, NodeCall):
        if is_edit(step) and kind_of_edit(step) != "generate":
            yield step, 1
        return
    rounds = step.most if isinstance(step, Each) else 1
    for substep in step.body:
        yield from ((call, rounds * count) for call, count in _edits_at_once(substep))


def _encode_call(name: str, edits: Sequence[_SharingEdit]) -> NodeCall:
    """Return the call that encodes for these edits: the prompt, too, if they have the same."""
    first = edits[0]
    prompts = {(edit.outer.get("prompt"), edit.call.texts.get("prompt")) for edit in edits}
    ref, text = prompts.pop() if len(prompts) == 1 else (None, None)
    inputs = {name: first.outer[name] for name in ("image", "mask") if name in first.outer}
    settings = {key: x for key, x in first.call.settings.items() if key in ENCODER_SETTINGS}
    return NodeCall(
        id=name,
        node=ENCODE,
        inputs=inputs if ref is None else {**inputs, "prompt": ref},
        texts={} if text is None else {"prompt": text},
        settings=settings,
    )
