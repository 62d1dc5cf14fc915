"""A workflow as plain data, which a router reads.

Steps are in order; each takes inputs of the workflow and outputs of earlier steps, by reference.
Two kinds of steps contain others: `each` runs its body for every region or a fixed number of times,
and `repeat` runs it until a verdict has passed. Both are bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, structs

from maskserve_common.contracts.edit_kinds import MOST_PICTURES, check_settings_of, kind_of
from maskserve_common.contracts.request import EditKind
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.contracts.tensors import INPUT_KINDS
from maskserve_common.errors import InvalidRequest
from maskserve_common.reading import Misread, Table, nearest, read
from maskserve_workflows.node_types import EDIT, ENCODE, setting_error
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.ports import ELEMENT, MANY, WorkflowError

VERSION: Final = 1
MOST: Final = 16
"""Most rounds of a loop."""
MOST_STEPS: Final = 64
MOST_LISTED: Final = 64
"""Most references of a list."""
INPUTS: Final = "inputs"
RESERVED: Final = frozenset({"edit", "edit_stream", "edit_pipeline", "control"})
"""Model names that are always taken."""

Id = Annotated[
    str,
    Meta(
        pattern=r"\A[a-z][a-z0-9_-]{0,40}\Z",
        description="a lower-case letter, then up to 40 letters, digits, or any of _ -",
    ),
]
Ref = Annotated[str, Meta(max_length=100)]
Refs = Ref | Annotated[tuple[Ref, ...], Meta(min_length=1, max_length=MOST_LISTED)]
"""An input of a call; of a list's kind it may be the references of its values."""
Rounds = Annotated[int, Meta(ge=1, le=MOST)]


class NodeCall(Table, frozen=True, tag="call", tag_field="step"):
    """A call of a node."""

    id: Id
    node: str
    """Node type."""
    inputs: dict[str, Refs] = msgspec.field(default_factory=dict)
    texts: dict[str, Annotated[str, Meta(max_length=32_000)]] = msgspec.field(default_factory=dict)
    """Literal text inputs."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


class Each(Table, frozen=True, tag="each", tag_field="step"):
    """A body that runs once for every region, or `most` times."""

    id: Id
    body: tuple[Step, ...]
    most: Rounds
    """Most rounds; more regions are an error."""
    over: Ref | None = None
    """Regions to loop over; None: it runs `most` times. In the body `ID.mask` is the round's
    region."""
    carry: Ref | None = None
    """Picture that the first round begins with, `ID.picture` in the body; each round passes its own
    to the next. None: rounds are independent."""
    carried: Ref | None = None
    """Value that a round passes to the next."""
    side_by_side: bool = False
    """True if rounds whose regions do not touch begin with the same picture and are composed."""
    gives: dict[str, Ref] = msgspec.field(default_factory=dict)
    """Name → a value of the body; outside, `ID.NAME` is the list of all rounds' values."""


class Repeat(Table, frozen=True, tag="repeat", tag_field="step"):
    """A body that runs until its verdict has passed; if none does, the best round counts."""

    id: Id
    body: tuple[Step, ...]
    most: Rounds
    until: Ref
    gives: dict[str, Ref] = msgspec.field(default_factory=dict)
    """Name → a value of the body; outside, `ID.NAME` is the value of the round that counts."""


Step = NodeCall | Each | Repeat


class Input(Table, frozen=True):
    """An input of the workflow, given by the client."""

    name: Id
    kind: str


class WorkflowPlan(Table, frozen=True):
    """A workflow."""

    name: Id
    inputs: tuple[Input, ...]
    steps: Annotated[tuple[Step, ...], Meta(max_length=MOST_STEPS)]
    outputs: dict[Id, Ref]
    about: str = ""
    notes: tuple[str, ...] = ()
    """Changes that the passes made."""
    early: tuple[str, ...] = ()
    """LoRAs and ControlNets of later nodes, which are loaded as a run begins."""
    version: int = VERSION
    digest: str = ""
    """Digest of all other fields; an answer's META names it."""


def kinds_of(step: Step, inner: Mapping[str, str]) -> dict[str, str]:
    """Return a step's outputs, name → kind, as later steps see them.

    Args:
        step: the step.
        inner: for a loop, its body's values by reference.
    """
    if isinstance(step, NodeCall):
        return dict(NODE_TYPES[step.node].outputs)
    if isinstance(step, Repeat):
        return {name: inner[ref] for name, ref in step.gives.items()}
    kinds = {name: MANY[inner[ref]] for name, ref in step.gives.items()}
    return kinds | ({"carried": "picture"} if step.carry is not None else {})


def round_kinds(step: Step) -> dict[str, str]:
    """Return the kinds of the values that a loop gives its body, by reference."""
    kinds = {}
    if isinstance(step, Each):
        if step.over is not None:
            kinds[f"{step.id}.mask"] = "mask"
        if step.carry is not None:
            kinds[f"{step.id}.picture"] = "picture"
    return kinds


def refs_of(refs: Refs) -> tuple[str, ...]:
    """Return the references of an input: its one, or those of its list."""
    return (refs,) if isinstance(refs, str) else refs


def references(step: Step) -> Iterator[str]:
    """Yield all references of a step, including those of its body to its own values."""
    if isinstance(step, NodeCall):
        for refs in step.inputs.values():
            yield from refs_of(refs)
        return
    ends = [step.until] if isinstance(step, Repeat) else [step.over, step.carry, step.carried]
    yield from [ref for ref in (*ends, *step.gives.values()) if ref is not None]
    for substep in step.body:
        yield from references(substep)


def references_of(step: Step) -> list[str]:
    """Return the references of a step to values outside of it."""
    inner_ids = {step.id}
    if not isinstance(step, NodeCall):
        bodies = list(step.body)
        while bodies:
            substep = bodies.pop()
            inner_ids.add(substep.id)
            bodies += [] if isinstance(substep, NodeCall) else substep.body
    return [ref for ref in references(step) if ref.partition(".")[0] not in inner_ids]


def every_step(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps and those in their bodies, in order."""
    for step in steps:
        yield step
        if not isinstance(step, NodeCall):
            yield from every_step(step.body)


def is_edit(call: NodeCall) -> bool:
    """Return whether a worker runs a call, as an edit of some kind."""
    return NODE_TYPES[call.node].model == EDIT and call.node != ENCODE


def edit_calls(steps: Sequence[Step]) -> Iterator[NodeCall]:
    """Yield the calls that workers run, in order."""
    for step in every_step(steps):
        if isinstance(step, NodeCall) and is_edit(step):
            yield step


def kind_of_edit(call: NodeCall) -> EditKind:
    """Return the kind of a worker's call."""
    settings = call.settings
    grows = any(settings.get("expand") or ())
    masked = "mask" in call.inputs or grows or settings.get("mask_from") is not None
    has_source = not {"image", "references"}.isdisjoint(call.inputs)
    return kind_of(source=has_source, masked=masked)


def all_kinds(plan: WorkflowPlan) -> dict[str, str]:
    """Return the kind of every value by reference, including those of bodies."""
    kinds = {
        f"{INPUTS}.{workflow_input.name}": workflow_input.kind for workflow_input in plan.inputs
    }

    def add(steps: Sequence[Step]) -> None:
        for step in steps:
            if not isinstance(step, NodeCall):
                kinds.update(round_kinds(step))
                add(step.body)
            kinds.update({f"{step.id}.{n}": kind for n, kind in kinds_of(step, kinds).items()})

    add(plan.steps)
    return kinds


def output_kinds(plan: WorkflowPlan) -> dict[str, str]:
    """Return the kind of each output."""
    kinds = all_kinds(plan)
    return {name: kinds[ref] for name, ref in plan.outputs.items()}


def check_plan(plan: WorkflowPlan) -> None:
    """Check that a plan can run.

    Raises:
        WorkflowError: naming node and port, and what fits.
    """
    if plan.version != VERSION:
        raise WorkflowError(f"{plan.name}: is of version {plan.version}; accepted: {VERSION}")
    if plan.name in RESERVED:
        raise WorkflowError(f"{plan.name}: is the name of a model; accepted: any other")
    kinds = _input_kinds(plan)
    _check_ids(plan)
    loops = _loops_of(plan.steps)
    _check_steps(plan.steps, kinds, loops)
    if not plan.outputs:
        raise WorkflowError(f"{plan.name}: gives nothing; accepted: at least one output")
    if "meta" in plan.outputs:
        raise WorkflowError(f"{plan.name}.meta: every workflow has it; accepted: another name")
    for name, ref in plan.outputs.items():
        kind = _kind(f"{plan.name}.{name}", ref, kinds, loops)
        if kind not in (*INPUT_KINDS, "verdict"):
            raise WorkflowError(
                f"{plan.name}.{name}: {ref} is {kind}; accepted: a picture, mask, text or verdict"
            )


def _input_kinds(plan: WorkflowPlan) -> dict[str, str]:
    """Return the kinds of a plan's inputs, by reference.

    Raises:
        WorkflowError: naming an input that no client can send.
    """
    kinds: dict[str, str] = {}
    for workflow_input in plan.inputs:
        if workflow_input.kind not in INPUT_KINDS:
            raise WorkflowError(
                f"{INPUTS}.{workflow_input.name}: a {workflow_input.kind} cannot be sent; "
                "accepted: " + ", ".join(INPUT_KINDS)
            )
        if f"{INPUTS}.{workflow_input.name}" in kinds:
            raise WorkflowError(
                f"{INPUTS}.{workflow_input.name}: is given twice; accepted: each name once"
            )
        if workflow_input.name == "settings":
            raise WorkflowError(f"{INPUTS}.settings: every workflow has it; accepted: another name")
        kinds[f"{INPUTS}.{workflow_input.name}"] = workflow_input.kind
    return kinds


def _check_ids(plan: WorkflowPlan) -> None:
    ids = [step.id for step in every_step(plan.steps)]
    if len(ids) > MOST_STEPS:
        raise WorkflowError(f"{plan.name}: has {len(ids)} steps; accepted: up to {MOST_STEPS}")
    for name in ids:
        if ids.count(name) > 1 or name == INPUTS:
            raise WorkflowError(f"{name}: names two steps; accepted: each name once")


def _loops_of(steps: Sequence[Step], inside: str = "") -> dict[str, str]:
    """Return for each step the id of the loop that contains it, or "" for none."""
    loops = {}
    for step in steps:
        loops[step.id] = inside
        if not isinstance(step, NodeCall):
            loops |= _loops_of(step.body, step.id)
    return loops


def _check_steps(steps: Sequence[Step], known: dict[str, str], loops: Mapping[str, str]) -> None:
    """Check steps that may refer to `known`, and add their outputs to it."""
    for step in steps:
        if isinstance(step, NodeCall):
            _check_call(step, known, loops)
            inner: dict[str, str] = {}
        else:
            inner = _check_loop(step, known, loops)
        known |= {f"{step.id}.{name}": kind for name, kind in kinds_of(step, inner).items()}


def _check_call(step: NodeCall, known: Mapping[str, str], loops: Mapping[str, str]) -> None:
    kind = NODE_TYPES.get(step.node)
    if kind is None:
        raise WorkflowError(
            f"{step.id}: there is no node {step.node!r}{nearest(step.node, NODE_TYPES)}; accepted: "
            + ", ".join(sorted(NODE_TYPES))
        )
    for name in (*step.inputs, *step.texts):
        if name not in kind.inputs:
            raise WorkflowError(
                f"{step.id}.{name}: {step.node} has no such input{nearest(name, kind.inputs)}; "
                f"accepted: {', '.join(kind.inputs)}"
            )
    for name in step.texts:
        if kind.inputs[name] != "text" or name in step.inputs:
            raise WorkflowError(f"{step.id}.{name}: text is written out; accepted: a value of "
                                f"kind {kind.inputs[name]}, once")  # fmt: skip
    for name, expected_kind in kind.inputs.items():
        if name in step.texts:
            continue
        if name not in step.inputs:
            if name not in kind.optional:
                raise WorkflowError(f"{step.id}.{name}: is missing; accepted: a {expected_kind}")
            continue
        _check_refs(f"{step.id}.{name}", step.inputs[name], expected_kind, known, loops)
    try:
        settings = kind.checked(step.settings)
    except Misread as error:
        raise setting_error(step.id, error) from None
    if kind.model == EDIT:
        _check_edit(step, read(settings, EditSettings))


def _check_edit(call: NodeCall, settings: EditSettings) -> None:
    """Check that the settings of a worker's call have an effect, and that a model may take its
    references.

    Raises:
        WorkflowError: naming the setting or `references`.
    """
    if call.node == ENCODE and kind_of_edit(call) == "generate":
        raise WorkflowError(f"{call.id}.image: is missing; accepted: a picture, or references")
    references = call.inputs.get("references", ())
    if not isinstance(references, str) and len(references) >= MOST_PICTURES:
        raise WorkflowError(
            f"{call.id}.references: has {len(references)} pictures; accepted: up to "
            f"{MOST_PICTURES - 1}"
        )
    try:
        check_settings_of(settings, kind_of_edit(call))
    except InvalidRequest as error:
        raise WorkflowError(f"{call.id}.{error.message.removeprefix('SETTINGS.')}") from None


def _check_loop(
    step: Each | Repeat, known: Mapping[str, str], loops: Mapping[str, str]
) -> dict[str, str]:
    """Check a loop's inputs and body; return the kinds of the body's values, by reference."""
    if isinstance(step, Each):
        if step.over is not None:
            _check_kind(f"{step.id}.over", step.over, "regions", known, loops)
        if step.carry is not None:
            _check_kind(f"{step.id}.carry", step.carry, "picture", known, loops)
        if (step.carry is None) != (step.carried is None):
            raise WorkflowError(
                f"{step.id}.carried: stands alone; accepted: both carry and carried, or neither"
            )
        if step.side_by_side and (step.over is None or step.carry is None):
            raise WorkflowError(
                f"{step.id}.side_by_side: is for regions of one picture; accepted: over and carry"
            )
    inner = {**known, **round_kinds(step)}
    _check_steps(step.body, inner, loops)
    if isinstance(step, Repeat):
        _check_kind(f"{step.id}.until", step.until, "verdict", inner, loops)
    elif step.carried is not None:
        _check_kind(f"{step.id}.carried", step.carried, "picture", inner, loops)
    for name, ref in step.gives.items():
        kind = _kind(f"{step.id}.{name}", ref, inner, loops)
        if isinstance(step, Each) and (kind not in MANY or name == "carried"):
            raise WorkflowError(
                f"{step.id}.{name}: values of kind {kind} do not form a list; accepted: "
                + ", ".join(MANY)
            )
    return inner


def _kind(where: str, ref: str, known: Mapping[str, str], loops: Mapping[str, str]) -> str:
    """Return the kind of a referenced value. Raises WorkflowError: the value does not exist."""
    if ref in known:
        return known[ref]
    owner = ref.partition(".")[0]
    if loops.get(owner):
        raise WorkflowError(
            f"{where}: takes {ref}, which is inside of {loops[owner]}; accepted: what that gives"
        )
    if owner in loops and not any(known_ref.startswith(f"{owner}.") for known_ref in known):
        raise WorkflowError(
            f"{where}: takes {ref}, which comes later or goes in a circle; accepted: what is "
            "before it"
        )
    raise WorkflowError(
        f"{where}: takes {ref}, which nothing gives{nearest(ref, known)}; accepted: "
        + (", ".join(sorted(known)) or "nothing yet")
    )


def _check_kind(
    where: str, ref: str, port_kind: str, known: Mapping[str, str], loops: Mapping[str, str]
) -> None:
    kind = _kind(where, ref, known, loops)
    if kind != port_kind:
        fitting = [name for name, known_kind in known.items() if known_kind == port_kind]
        raise WorkflowError(
            f"{where}: takes a {port_kind}, and {ref} is {kind}; accepted: "
            + (", ".join(fitting) or f"a {port_kind}")
        )


def _check_refs(
    where: str, refs: Refs, port_kind: str, known: Mapping[str, str], loops: Mapping[str, str]
) -> None:
    if isinstance(refs, str):
        _check_kind(where, refs, port_kind, known, loops)
        return
    if port_kind not in ELEMENT:
        raise WorkflowError(f"{where}: takes a {port_kind}, and is given a list; accepted: one")
    if not refs:
        raise WorkflowError(f"{where}: is empty; accepted: at least one {ELEMENT[port_kind]}")
    for index, ref in enumerate(refs):
        _check_kind(f"{where}[{index}]", ref, ELEMENT[port_kind], known, loops)


def digest_of(plan: WorkflowPlan) -> str:
    """Return the SHA-256 of a plan without its digest, as 16 hexadecimal digits."""
    raw = msgspec.json.encode(structs.replace(plan, digest=""), order="sorted")
    return hashlib.sha256(raw).hexdigest()[:16]


def dump_plan(plan: WorkflowPlan) -> bytes:
    """Return the plan as JSON, with its present digest."""
    raw = msgspec.json.encode(structs.replace(plan, digest=digest_of(plan)))
    return msgspec.json.format(raw, indent=2) + b"\n"


def parse_plan(raw: bytes) -> WorkflowPlan:
    """Parse and check a plan's JSON.

    Raises:
        WorkflowError: it is not a plan, cannot run, or was changed by hand.
    """
    try:
        values = msgspec.json.decode(raw)
        version = values.get("version") if isinstance(values, dict) else None
        if isinstance(values, dict) and version != VERSION:
            raise WorkflowError(f"version: is {version!r}; accepted: {VERSION}")
        plan = read(values, WorkflowPlan)
    except msgspec.DecodeError:
        raise WorkflowError("the plan is not valid JSON; accepted: what compile writes") from None
    except Misread as error:
        raise WorkflowError(str(error)) from None
    check_plan(plan)
    if plan.digest != digest_of(plan):
        raise WorkflowError(
            f"{plan.name}.digest: is not that of the plan, which was changed by hand; accepted: "
            "what compile writes"
        )
    return plan
