"""Compiler passes over a plan.

Each pass has a flag and notes its changes. It leaves answers unchanged unless its docstring says
otherwise.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from maskserve_common.contracts.settings import ENCODER_SETTINGS, REFERENCE_SETTINGS
from maskserve_workflows.node_types import ENCODE
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import (
    MOST_STEPS,
    Each,
    NodeCall,
    Refs,
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
    refs_of,
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
                notes.append(f"{step.id} is left out: nothing uses its outputs")
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
                        notes.append(f"{step.id} is the same call as {seen_steps[fingerprint]}")
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
    """Encode a picture once for several edits that see it, before they begin: as the source under
    one mask, with the prompt if they have the same, or as a reference. What the same edits share is
    encoded by one call.
    """
    notes: list[str] = []
    names = {step.id for step in every_step(plan.steps)}

    def fresh() -> str:
        name = next(name for i in itertools.count(1) if (name := f"{ENCODE}-{i}") not in names)
        names.add(name)
        return name

    def shared(steps: Sequence[Step], encodings_of: dict[str, _Encodings]) -> tuple[Step, ...]:
        """Return the steps with encodings before those that share them.

        Args:
            steps: steps of the plan or of a loop's body.
            encodings_of: edit -> its encodings, as far as known; they are added to.
        """
        edits_of: dict[_EncodedPicture, dict[str, _SharingEdit]] = {}
        for number, step in enumerate(steps):
            for edit in _sharing_edits(step, number):
                for picture in edit.pictures:
                    if picture not in encodings_of[edit.call.id].pictures:
                        edits_of.setdefault(picture, {})[edit.call.id] = edit
        pictures_of: dict[tuple[str, ...], list[_EncodedPicture]] = {}
        for picture, edits in edits_of.items():
            if sum(edit.most for edit in edits.values()) > 1:
                pictures_of.setdefault(tuple(edits), []).append(picture)
        encodes: dict[int, list[NodeCall]] = {}
        for ids, pictures in pictures_of.items():
            if len(names) == MOST_STEPS:
                break
            users = [edits_of[pictures[0]][name] for name in ids]
            call = _encode_call(fresh(), pictures, users)
            encodes.setdefault(users[0].number, []).append(call)
            for name in ids:
                encodings_of[name].add(call.id, pictures)
            count, refs = sum(edit.most for edit in users), dict.fromkeys(x.ref for x in pictures)
            verb = "is" if len(refs) == 1 else "are"
            notes.append(f"{' and '.join(refs)} {verb} encoded once for {count} edits")
        new_steps: list[Step] = []
        for number, step in enumerate(steps):
            new_steps += encodes.get(number, ())
            if not isinstance(step, NodeCall):
                step = structs.replace(step, body=shared(step.body, encodings_of))
            elif encodings := encodings_of[step.id].refs:
                step = structs.replace(step, inputs={**step.inputs, "encodings": encodings})
            new_steps.append(step)
        return tuple(new_steps)

    return structs.replace(plan, steps=shared(plan.steps, defaultdict(_Encodings))), notes


def prime_first(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Let edits that share a picture wait until it is primed, and then run cached."""
    counts: dict[str, int] = {}
    for ref, times in _edits_of(plan.steps):
        counts[ref] = counts.get(ref, 0) + times
    several = {ref for ref, count in counts.items() if count > 1}

    def primed(step: Step) -> Step:
        if not isinstance(step, NodeCall):
            return structs.replace(step, body=tuple(map(primed, step.body)))
        is_settled = not _reads_template(step) or "cache" in step.settings
        if is_settled or step.inputs["image"] not in several:
            return step
        return structs.replace(step, settings={**step.settings, "cache": "require"})

    notes = [f"{ref} is primed for {counts[ref]} edits" for ref in sorted(several)]
    return structs.replace(plan, steps=tuple(map(primed, plan.steps))), notes


def side_by_side(plan: WorkflowPlan) -> tuple[WorkflowPlan, list[str]]:
    """Run the edits of an `each` side by side if their regions do not touch; compose the results.

    Edits of regions that touch still run one after the other. A loop that edits a picture without
    a mask stays as it is. Answers change: an edit no longer sees the changes of the others.
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
    """Let a run load the LoRAs of its later edits when it begins."""
    first = {f"inputs.{workflow_input.name}" for workflow_input in plan.inputs}
    later = [step for step in edit_calls(plan.steps) if not set(references(step)) <= first]
    early = {lora["name"]: None for step in later for lora in step.settings.get("loras", ())}
    notes = [f"LoRA {name} is loaded when the run begins" for name in early]
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
        inputs = {
            name: renamed(refs) if isinstance(refs, str) else tuple(map(renamed, refs))
            for name, refs in step.inputs.items()
        }
        return structs.replace(step, inputs=inputs)
    outputs = {name: renamed(ref) for name, ref in step.gives.items()}
    if isinstance(step, Repeat):
        return structs.replace(step, until=renamed(step.until), gives=outputs)
    over, carry, carried = (
        None if ref is None else renamed(ref) for ref in (step.over, step.carry, step.carried)
    )
    return structs.replace(step, over=over, carry=carry, carried=carried, gives=outputs)


def _is_masked(call: NodeCall) -> bool:
    """Return whether a call is an edit with a mask."""
    return is_edit(call) and kind_of_edit(call) == "inpaint"


def _reads_template(call: NodeCall) -> bool:
    """Return whether a call is an edit that may read its template's entries, which have not seen
    any references.
    """
    has_references = "references" in call.inputs or bool(call.settings.get("reference_ids"))
    return _is_masked(call) and not has_references


def _edits_of(steps: Sequence[Step]) -> Iterator[tuple[str, int]]:
    """Yield the pictures of edits that may read entries, each with the most edits at once."""
    for step in steps:
        if isinstance(step, NodeCall):
            if _reads_template(step):
                [image] = refs_of(step.inputs["image"])
                yield image, 1
            continue
        rounds = step.most if isinstance(step, Each) else 1
        body_ids = {substep.id for substep in every_step([step])}
        for ref, count in _edits_of(step.body):
            is_parallel = (
                isinstance(step, Each) and step.side_by_side and ref == f"{step.id}.picture"
            )
            outside = ref.partition(".")[0] not in body_ids
            yield ref, count * (rounds if outside or is_parallel else 1)


class _EncodedPicture(NamedTuple):
    """A picture as the encoder sees it; equal ones have one encoding."""

    ref: str
    mask: str | None
    settings: str
    """Settings on which its encoding depends, as JSON."""
    is_source: bool


@dataclass(slots=True)
class _Encodings:
    """Encodings that an edit takes."""

    refs: tuple[str, ...] = ()
    pictures: set[_EncodedPicture] = field(default_factory=set)

    def add(self, name: str, pictures: Collection[_EncodedPicture]) -> None:
        """Add the encoding of these pictures by the step of this name."""
        self.refs += (f"{name}.encoding",)
        self.pictures.update(pictures)


class _SharingEdit(NamedTuple):
    """An edit in a step, with inputs from outside of the step's loops."""

    number: int
    """Place of the step in its body."""
    call: NodeCall
    most: int
    """Most calls of it at once."""
    outer: Mapping[str, str]
    """Its inputs that are known before the step."""
    pictures: tuple[_EncodedPicture, ...]
    """Its source and references that are known before the step."""


def _sharing_edits(step: Step, number: int) -> Iterator[_SharingEdit]:
    """Yield the edits in a step with a picture from before it."""
    inner_ids = set() if isinstance(step, NodeCall) else {x.id for x in every_step([step])}

    def is_outer(ref: str) -> bool:
        return ref.partition(".")[0] not in inner_ids

    for call, count in _edits_at_once(step):
        outer = {
            name: ref for name, ref in call.inputs.items() if isinstance(ref, str) and is_outer(ref)
        }
        pictures = []
        if outer.keys() >= {"image", "mask"} & call.inputs.keys() and (
            "mask_from" not in call.settings
        ):
            settings = _json(_encoder_settings(call, is_source=True))
            pictures.append(_EncodedPicture(outer["image"], outer.get("mask"), settings, True))
        listed, settings = call.inputs.get("references", ()), _json(_encoder_settings(call))
        if not isinstance(listed, str):
            pictures += [
                _EncodedPicture(ref, None, settings, False) for ref in listed if is_outer(ref)
            ]
        if pictures and "encodings" not in call.inputs:
            yield _SharingEdit(number, call, count, outer, tuple(pictures))


def _encoder_settings(call: NodeCall, *, is_source: bool = False) -> dict[str, Any]:
    """Return the settings on which the encoding of an edit's source depends, or of a reference."""
    names = ENCODER_SETTINGS if is_source else REFERENCE_SETTINGS
    return {name: value for name, value in call.settings.items() if name in names}


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _edits_at_once(step: Step) -> Iterator[tuple[NodeCall, int]]:
    """Yield the edits in a step, each with the most calls at once."""
    if isinstance(step, NodeCall):
        if is_edit(step) and kind_of_edit(step) != "generate":
            yield step, 1
        return
    rounds = step.most if isinstance(step, Each) else 1
    for substep in step.body:
        yield from ((call, rounds * count) for call, count in _edits_at_once(substep))


def _encode_call(
    name: str, pictures: Sequence[_EncodedPicture], edits: Sequence[_SharingEdit]
) -> NodeCall:
    """Return the call that encodes these pictures for these edits: with a source the prompt, too,
    if they have the same.
    """
    source = next((picture for picture in pictures if picture.is_source), None)
    references = tuple([picture.ref for picture in pictures if not picture.is_source])
    inputs: dict[str, Refs] = {} if source is None else {"image": source.ref}
    if source is not None and source.mask is not None:
        inputs["mask"] = source.mask
    if references:
        inputs["references"] = references
    prompts = {(edit.outer.get("prompt"), edit.call.texts.get("prompt")) for edit in edits}
    ref, text = prompts.pop() if source is not None and len(prompts) == 1 else (None, None)
    return NodeCall(
        id=name,
        node=ENCODE,
        inputs=inputs if ref is None else {**inputs, "prompt": ref},
        texts={} if text is None else {"prompt": text},
        settings=_encoder_settings(edits[0].call, is_source=source is not None),
    )
