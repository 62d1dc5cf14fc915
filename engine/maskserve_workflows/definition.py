"""The language of definitions: calling a node inside `with Workflow(…)` records it.

with Workflow("detail", "Repaints everything of a name.") as flow:
    image, name, prompt = flow.picture("image"), flow.text("name"), flow.text("prompt")
    with each(split(find(image, name)), most=8, carry=image) as one:
        one.carried = edit(one.picture, one.mask, prompt)
    flow.gives(image=one.carried)
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, overload

from maskserve_common.reading import Misread
from maskserve_workflows.node_types import OPEN, NodeType, setting_error
from maskserve_workflows.plan import (
    INPUTS,
    MOST,
    Each,
    Input,
    NodeCall,
    Refs,
    Repeat,
    Step,
    WorkflowPlan,
    check_plan,
)
from maskserve_workflows.ports import (
    ELEMENT,
    KINDS,
    MANY,
    Mask,
    Picture,
    Pictures,
    Port,
    Regions,
    Verdict,
    Verdicts,
    Words,
    WorkflowError,
)


class Workflow:
    """Recorder of the nodes called in a `with` block.

    Args:
        name: name under which a router serves the workflow.
        about: description for people.
    """

    def __init__(self, name: str, about: str = "") -> None:
        self.name, self.about = name, about
        self.plan: WorkflowPlan
        """The plan, once the block has ended."""
        self._inputs: list[Input] = []
        self._outputs: dict[str, str] = {}
        self._bodies: list[list[Step]] = [[]]
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Workflow:
        if OPEN.get() is not None:
            raise WorkflowError(
                f"{self.name}: is defined inside another workflow; accepted: outside of it"
            )
        self._token = OPEN.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        OPEN.reset(self._token)
        if error is None:
            self.plan = WorkflowPlan(
                self.name, tuple(self._inputs), tuple(self._bodies[0]), self._outputs, self.about
            )
            check_plan(self.plan)

    def picture(self, name: str) -> Picture:
        """Declare an input picture."""
        return Picture(self._input(name, Picture))

    def mask(self, name: str) -> Mask:
        """Declare an input mask."""
        return Mask(self._input(name, Mask))

    def text(self, name: str) -> Words:
        """Declare an input text."""
        return Words(self._input(name, Words))

    def gives(self, **outputs: Picture | Mask | Words | Verdict) -> None:
        """Declare the workflow's outputs, by name."""
        for name, port in outputs.items():
            self._outputs[name] = _ref(f"{self.name}.{name}", port)

    def _input(self, name: str, kind: type[Port]) -> str:
        self._inputs.append(Input(name=name, kind=kind.kind))
        return f"{INPUTS}.{name}"

    # For nodes and loops.

    def fresh(self, kind: str) -> str:
        """Return a new name for a step of this kind."""
        self._counts[kind] += 1
        return f"{kind}-{self._counts[kind]}"

    def add(self, step: Step) -> None:
        """Record a step in the open body."""
        self._bodies[-1].append(step)

    def enter(self) -> None:
        """Begin a loop's body."""
        self._bodies.append([])

    def leave(self) -> tuple[Step, ...]:
        """End a loop's body and return its steps."""
        return tuple(self._bodies.pop())

    def record(
        self,
        kind: NodeType,
        signature: inspect.Signature,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Record a call of a node in the open body.

        Returns:
            The ports that the node's function declares.

        Raises:
            WorkflowError: the call does not fit the signature.
        """
        name = self.fresh(kind.name)
        try:
            bound = signature.bind(*args, **arguments).arguments
        except TypeError as error:
            raise WorkflowError(f"{name}: {error}; accepted: {kind.name}{signature}") from None
        more = next((p for p, x in signature.parameters.items() if x.kind is x.VAR_KEYWORD), None)
        settings = dict(bound.pop(more, {})) if more else {}
        inputs: dict[str, Refs] = {}
        texts = {}
        for port, value in bound.items():
            if port not in kind.inputs:
                settings[port] = value
            elif isinstance(value, str) and kind.inputs[port] == "text":
                texts[port] = value
            elif isinstance(value, list | tuple) and kind.inputs[port] in ELEMENT:
                if value or port not in kind.optional:
                    inputs[port] = tuple(
                        [_ref(f"{name}.{port}[{i}]", part) for i, part in enumerate(value)]
                    )
            elif value is not None:
                inputs[port] = _ref(f"{name}.{port}", value)
        try:
            settings = kind.checked(settings)
        except (Misread, TypeError) as error:
            if isinstance(error, Misread):
                raise setting_error(name, error) from None
            raise WorkflowError(f"{name}: {error}; accepted: settings as JSON has them") from None
        self.add(NodeCall(name, kind.name, inputs, texts, settings))
        if issubclass(kind.returns, Port):
            return kind.returns(f"{name}.{kind.returns.kind}")
        return kind.returns(
            *(KINDS[output_kind](f"{name}.{port}") for port, output_kind in kind.outputs.items())
        )


def _ref(where: str, value: Any) -> str:
    if isinstance(value, Port):
        return value.ref
    raise WorkflowError(
        f"{where}: is given a {type(value).__name__}; accepted: what a node or input gives"
    )


class _Loop:
    """Common part of loops: a body, and the values that it gives."""

    def __init__(self, name: str) -> None:
        flow = OPEN.get()
        if not isinstance(flow, Workflow):
            raise WorkflowError(
                f"{name}: stands outside of a workflow; accepted: `with Workflow(…)`"
            )
        self._flow = flow
        self._id = self._flow.fresh(name)
        self._outputs: dict[str, str] = {}

    def __enter__(self) -> Any:
        self._flow.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        body = self._flow.leave()
        if error is not None:
            return
        if not body:
            raise WorkflowError(f"{self._id}: has no steps; accepted: at least one")
        self._flow.add(self._step(body))

    def _step(self, body: tuple[Step, ...]) -> Step:
        raise NotImplementedError

    def _reference(self, port: Any) -> str:
        """Return the name under which the loop gives a value of its body."""
        ref = _ref(f"{self._id}.gives", port)
        for name, known_ref in self._outputs.items():
            if known_ref == ref:
                return f"{self._id}.{name}"
        name = f"{port.kind}-{len(self._outputs) + 1}"
        self._outputs[name] = ref
        return f"{self._id}.{name}"


class each(_Loop):  # noqa: N801  it reads as a statement
    """Run the block for every region, or a fixed number of times.

    Args:
        over: regions, or a number of rounds.
        most: most regions; more are an error.
        carry: picture that the first round gets; each round passes its own to the next, as
            `carried`.
    """

    def __init__(
        self, over: Regions | int, *, most: int | None = None, carry: Picture | None = None
    ) -> None:
        super().__init__("each")
        if isinstance(over, int) and most is not None:
            raise WorkflowError(f"{self._id}.most: is for regions; accepted: a number alone")
        self._over = None if isinstance(over, int) else _ref(f"{self._id}.over", over)
        rounds = over if isinstance(over, int) else (most or MOST)
        if not 1 <= rounds <= MOST:
            raise WorkflowError(f"{self._id}.most: is {rounds}; accepted: 1 to {MOST}")
        self._most = rounds
        self._carry = None if carry is None else _ref(f"{self._id}.carry", carry)
        self._carried: str | None = None

    @property
    def mask(self) -> Mask:
        """The round's region."""
        if self._over is None:
            raise WorkflowError(f"{self._id}.mask: it has no regions; accepted: each(regions)")
        return Mask(f"{self._id}.mask")

    @property
    def picture(self) -> Picture:
        """The picture of the previous round; `carry` in the first round."""
        if self._carry is None:
            raise WorkflowError(f"{self._id}.picture: nothing is carried; accepted: carry=picture")
        return Picture(f"{self._id}.picture")

    @property
    def carried(self) -> Picture:
        """The picture of the last round; set it in the block."""
        return Picture(f"{self._id}.carried")

    @carried.setter
    def carried(self, picture: Picture) -> None:
        self._carried = _ref(f"{self._id}.carried", picture)

    @overload
    def all(self, port: Picture) -> Pictures: ...
    @overload
    def all(self, port: Mask) -> Regions: ...
    @overload
    def all(self, port: Verdict) -> Verdicts: ...
    def all(self, port: Picture | Mask | Verdict) -> Port:
        """Return the list of all rounds' values of a value of the block; call it in the block."""
        ref = self._reference(port)
        if port.kind not in MANY:
            raise WorkflowError(
                f"{self._id}.all: {port.ref} is {port.kind}; accepted: " + ", ".join(MANY)
            )
        return KINDS[MANY[port.kind]](ref)

    def _step(self, body: tuple[Step, ...]) -> Step:
        return Each(
            id=self._id,
            body=body,
            most=self._most,
            over=self._over,
            carry=self._carry,
            carried=self._carried,
            gives=self._outputs,
        )

    def __enter__(self) -> each:
        super().__enter__()
        return self


class repeat(_Loop):  # noqa: N801
    """Run the block until a verdict has passed, at most `most` times."""

    def __init__(self, *, most: int) -> None:
        super().__init__("repeat")
        if not 1 <= most <= MOST:
            raise WorkflowError(f"{self._id}.most: is {most}; accepted: 1 to {MOST}")
        self._most = most
        self._until: str | None = None

    def until(self, verdict: Verdict) -> None:
        """Set the verdict that ends the loop once it has passed."""
        self._until = _ref(f"{self._id}.until", verdict)

    @overload
    def best(self, port: Picture) -> Picture: ...
    @overload
    def best(self, port: Mask) -> Mask: ...
    @overload
    def best(self, port: Verdict) -> Verdict: ...
    def best(self, port: Picture | Mask | Verdict) -> Port:
        """Return a value of the block, from the round that counts; call it in the block."""
        return type(port)(self._reference(port))

    def _step(self, body: tuple[Step, ...]) -> Step:
        if self._until is None:
            raise WorkflowError(f"{self._id}.until: is missing; accepted: until(verdict)")
        return Repeat(
            id=self._id, body=body, most=self._most, until=self._until, gives=self._outputs
        )

    def __enter__(self) -> repeat:
        super().__enter__()
        return self
