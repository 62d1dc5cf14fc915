"""Declaration of a node type: ports, settings, price, and the model that runs it.

    @node(model="find", price_s=0.1)
    def find(picture: Picture, name: Words | str, *, threshold: Share = 0.5) -> Mask:
        "Return the mask of the named thing in the picture."

The signature declares everything. Parameters of a port's class are inputs; a default of None makes
one optional, and text may be literal. Parameters after the `*` are settings, checked by their
types. The return type declares the outputs. Calling the function inside a `Workflow` records the
node, and mypy checks the wiring by the same signature.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import (
    Any,
    Final,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from maskserve_common.reading import Misread, Table, read, require_known
from maskserve_workflows.ports import Port, WorkflowError

P = ParamSpec("P")
R = TypeVar("R")
EDIT: Final = "edit"
"""The only node type that runs on workers, step by step in their batches."""


@dataclass(frozen=True)
class NodeType:
    """A kind of node."""

    name: str
    about: str
    model: str
    """Model that runs it: `edit` at a worker, or one of a node server's."""
    price_s: float
    """Seconds that a call is expected to take until some have been measured."""
    deterministic: bool
    """True if equal inputs and settings give the same answer: equal nodes are then merged, and
    answers cached."""
    inputs: Mapping[str, str]
    """Name → kind of each input."""
    optional: frozenset[str]
    outputs: Mapping[str, str]
    settings: type[Table]
    returns: type

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked values of the settings, without those that are None.

        Raises:
            Misread: naming the setting.
        """
        setting_names = frozenset(self.settings.__struct_fields__)
        plain = msgspec.to_builtins(dict(values))
        read(require_known(plain, setting_names), self.settings)
        return {name: value for name, value in plain.items() if value is not None}


class Definition(Protocol):
    """A definition while it is recorded."""

    def record(
        self,
        kind: NodeType,
        signature: inspect.Signature,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Add a call of a node, and return what its function declares to return."""


OPEN: ContextVar[Definition | None] = ContextVar("workflow", default=None)
DECLARED: Final[dict[str, NodeType]] = {}
"""Node types declared so far, by name; `nodes.NODE_TYPES` has all of them."""


def node(
    *,
    model: str,
    price_s: float,
    deterministic: bool = True,
    settings: type[Table] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a node type by a function's signature.

    Args:
        model: model that runs it.
        price_s: `NodeType.price_s`.
        deterministic: `NodeType.deterministic`.
        settings: type of its keyword arguments, if the function takes any.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        kind = _declared(function, model, price_s, deterministic, settings)
        DECLARED[kind.name] = kind

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            flow = OPEN.get()
            if flow is None:
                raise WorkflowError(
                    f"{kind.name}: is called outside of a workflow; accepted: `with Workflow(…)`"
                )
            result: R = flow.record(kind, inspect.signature(function), args, kwargs)
            return result

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    return declare


def _declared(
    function: Callable[..., Any],
    model: str,
    price_s: float,
    deterministic: bool,
    settings: type[Table] | None,
) -> NodeType:
    hints = get_type_hints(function, include_extras=True)
    inputs: dict[str, str] = {}
    optional: set[str] = set()
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function).parameters.items():
        port = _port(hints[name])
        if port is not None:
            inputs[name] = port.kind
            optional |= {name} if parameter.default is None else set()
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            fields.append((name, hints[name], parameter.default))
    returns = hints["return"]
    if issubclass(returns, Port):
        outputs = {returns.kind: returns.kind}
    else:
        outputs = {name: port.kind for name, port in get_type_hints(returns).items()}
    name = f"{function.__name__}_settings"
    settings_type: Any = msgspec.defstruct(name, fields, bases=(Table,), frozen=True, kw_only=True)
    return NodeType(
        function.__name__, inspect.getdoc(function) or "", model, price_s, deterministic, inputs,
        frozenset(optional), outputs, settings or settings_type, returns,
    )  # fmt: skip


def _port(hint: Any) -> type[Port] | None:
    """Return the port class that a type hint contains, or None."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((x for x in parts if isinstance(x, type) and issubclass(x, Port)), None)


def setting_error(where: str, error: Misread) -> WorkflowError:
    """Return the error for a node's invalid setting."""
    return WorkflowError(f"{where}.{error.path}: {error.problem}; accepted: {error.accepted}")
