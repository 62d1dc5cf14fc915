"""Declarations of a node file: node types, and the models that run them.

    @node(model="find", price_s=0.1)
    def find(picture: Picture, name: Words | str, *, threshold: Share = 0.5) -> Mask:
        "Return the mask of the named thing in the picture."

The signature declares everything. Parameters of a port's class are inputs; one that may be None is
optional, and text may be literal. Parameters after the `*` are settings, checked by their types.
The return type declares the outputs. Calling the function inside a `Workflow` records the node, and
mypy checks the wiring by the same signature.

    @node_model("find", source="find", kinds=("clipseg",))
    class FindNodes: ...

The class has a constructor that takes a `ModelSetup`, and `run` (`node_request.Nodes`).
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
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

from maskserve_common.reading import Misread, Table, read, require_known, without_point
from maskserve_workflows.ports import KINDS, Port, WorkflowError

P = ParamSpec("P")
R = TypeVar("R")
ENCODE: Final = "encode"
"""The node type that runs the encoder of edits that come later, at a worker."""
EDIT: Final = "edit"
"""Model of the node types that run on workers, step by step in their batches."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,35}")
_PORTS: Final = ", ".join(port.__name__ for port in KINDS.values())


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
    file: str
    """Path of the file that declares it."""

    @cached_property
    def signature(self) -> str:
        """Ports and settings on one line; equal in equal versions of the node."""
        name = self.settings.__name__
        schema = msgspec.json.schema(self.settings)["$defs"][name].get("properties", {})
        settings = [f"{key}={_line(values)}" for key, values in schema.items()]
        inputs = [
            f"{name}: {kind}" + (" or none" if name in self.optional else "")
            for name, kind in self.inputs.items()
        ]
        outputs = [f"{name}: {kind}" for name, kind in self.outputs.items()]
        return f"({', '.join([*inputs, *settings])}) -> {', '.join(outputs)}"

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


@dataclass(frozen=True)
class NodeModel:
    """A class that runs nodes on node servers."""

    name: str
    about: str
    source: str
    """Key of `[nodes]` whose value the class receives; empty: it needs none, and every node server
    runs it."""
    kinds: tuple[str, ...]
    """`model_type`s of the folders that it accepts (config.json of transformers); empty: it reads
    the folder by itself."""
    needs: tuple[str, ...]
    """Models that its calls use."""
    file: str
    """Path of the file that declares it."""
    class_name: str


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

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            flow = OPEN.get()
            if flow is None:
                raise WorkflowError(
                    f"{kind.name}: is called outside of a workflow; accepted: `with Workflow(…)`"
                )
            result: R = flow.record(kind, inspect.signature(function), args, kwargs)
            return result

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        call.__module__ = function.__module__
        vars(call)["node_type"] = kind
        return call

    return declare


def node_model(
    name: str, *, source: str = "", kinds: Sequence[str] = (), needs: Sequence[str] = ()
) -> Callable[[type[R]], type[R]]:
    """Declare the class that runs the nodes of a model; the arguments are those of `NodeModel`.

    Several classes may run a model, if they accept folders of different kinds.
    """

    def declare(cls: type[R]) -> type[R]:
        file = getattr(sys.modules[cls.__module__], "__file__", None) or ""
        about = " ".join((inspect.getdoc(cls) or "").split())
        model = NodeModel(name, about, source, tuple(kinds), tuple(needs), file, cls.__name__)
        setattr(cls, "node_model", model)  # noqa: B010  mypy knows no such attribute
        return cls

    return declare


def node_type_of(function: Callable[..., Any]) -> NodeType:
    """Return the node type that a function under `node` declares."""
    kind: NodeType = vars(function)["node_type"]
    return kind


def _declared(
    function: Callable[..., Any],
    model: str,
    price_s: float,
    deterministic: bool,
    settings: type[Table] | None,
) -> NodeType:
    name = function.__name__
    if not _NAME.fullmatch(name):
        raise WorkflowError(
            f"{name}: cannot name a node; accepted: a lower-case letter, then up to 35 letters, "
            "digits or _"
        )
    hints = get_type_hints(function, include_extras=True)
    inputs: dict[str, str] = {}
    optional: set[str] = set()
    fields: list[tuple[str, Any, Any]] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and settings is not None:
            continue
        port = _port(hints.get(key))
        if port is not None:
            inputs[key] = port.kind
            is_optional = parameter.default is None or types.NoneType in get_args(hints[key])
            optional |= {key} if is_optional else set()
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            fields.append((key, _setting(f"{name}.{key}", hints.get(key)), parameter.default))
        else:
            raise WorkflowError(
                f"{name}.{key}: is {_words(hints.get(key))}; accepted: a port ({_PORTS}); settings "
                "stand after a `*`"
            )
    returns: Any = hints.get("return")
    settings_type: Any = msgspec.defstruct(
        f"{name}_settings",
        [
            (key, hint) if default is inspect.Parameter.empty else (key, hint, default)
            for key, hint, default in fields
        ],
        bases=(Table,), frozen=True, kw_only=True,
    )  # fmt: skip
    return NodeType(
        name, inspect.getdoc(function) or "", model, price_s, deterministic, inputs,
        frozenset(optional), _outputs(name, returns), settings or settings_type, returns,
        function.__code__.co_filename,
    )  # fmt: skip


def _outputs(name: str, returns: Any) -> dict[str, str]:
    """Return the kinds of the outputs that a return type declares."""
    ports: dict[str, Any] = {}
    if isinstance(returns, type):
        has_fields = hasattr(returns, "_fields")
        ports = get_type_hints(returns) if has_fields else {getattr(returns, "kind", ""): returns}
    if not ports or not all(isinstance(x, type) and issubclass(x, Port) for x in ports.values()):
        raise WorkflowError(
            f"{name}.return: is {_words(returns)}; accepted: a port ({_PORTS}), or a NamedTuple of "
            "ports"
        )
    return {output: port.kind for output, port in ports.items()}


def _setting(where: str, hint: Any) -> Any:
    """Return the type of a setting, if JSON has it."""
    try:
        msgspec.json.schema(hint)
    except TypeError:
        hint = None
    if hint is None:
        raise WorkflowError(f"{where}: has no type that JSON has; accepted: one, such as float")
    return hint


def _words(hint: Any) -> str:
    return "without a type" if hint is None else str(getattr(hint, "__name__", hint))


def _line(schema: Any) -> str:
    return msgspec.json.encode(without_point(schema), order="sorted").decode()


def _port(hint: Any) -> type[Port] | None:
    """Return the port class that a type hint contains, or None."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((x for x in parts if isinstance(x, type) and issubclass(x, Port)), None)


def setting_error(where: str, error: Misread) -> WorkflowError:
    """Return the error for a node's invalid setting."""
    return WorkflowError(f"{where}.{error.path}: {error.problem}; accepted: {error.accepted}")
