"""Files of node models: `@node` signatures and `@node_model` classes.

    depth.py ── signatures ──► router, compiler, supervisor, node server
        └────── whole file ──► node server, when the model is opened

Who only needs signatures runs a part of a file: its decorated functions and classes without their
bodies, and the statements that bind the names in these. So a file may import torch at its top, and
a router that has no torch reads it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from maskserve_common.config import NodesConfig
from maskserve_common.reading import nearest
from maskserve_workflows.node_request import ModelSetup, Nodes
from maskserve_workflows.node_types import EDIT, NodeModel, NodeType, node_type_of
from maskserve_workflows.ports import WorkflowError

_DECORATORS: Final = ("node", "node_model")
_RESERVED: Final = frozenset({"path", "models", "load", "device_bytes"})
"""Keys of `[nodes]` that are no model's."""


class NodeFiles:
    """The node types and models of all files that were read."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        """Args:
        functions: nodes of no file, such as `edit`.
        """
        self._functions = {function.__name__: function for function in functions}
        self._types = {name: node_type_of(function) for name, function in self._functions.items()}
        self._models: list[NodeModel] = []
        self.types: Mapping[str, NodeType] = MappingProxyType(self._types)
        """Node types by name."""
        self.functions: Mapping[str, Callable[..., Any]] = MappingProxyType(self._functions)
        """Functions by name, which a definition calls."""

    @property
    def models(self) -> tuple[NodeModel, ...]:
        """All classes that run nodes."""
        return tuple(self._models)

    def classes(self, model: str) -> list[NodeModel]:
        """Return the classes that run a model; it has several if these accept different folders."""
        return [model_class for model_class in self._models if model_class.name == model]

    def read(self, folders: Iterable[str | Path]) -> list[str]:
        """Read the signatures in the folders' .py files. A file with an error is left out.

        Returns:
            The errors: a sentence for each file, or node.
        """
        problems, paths = [], []
        for folder in map(Path, folders):
            if not folder.is_dir():
                problems.append(f"{folder}: is not a folder; accepted: a folder of node files")
            paths += sorted(path.absolute() for path in folder.glob("*.py"))
        for path in (path for path in paths if path.name != "__init__.py"):
            try:
                self._add(str(path), signatures(path))
            except (Exception, SystemExit) as error:
                problems.append(error_of(path, error))
        return problems + [self._without_model(kind) for kind in self._unserved()]

    def _add(self, file: str, namespace: Mapping[str, Any]) -> None:
        """Add what a file declares, in place of what it declared before.

        Raises:
            WorkflowError: it declares nothing, or the names of another file.
        """
        functions, models = _declared_in(namespace)
        if not functions and not models:
            raise WorkflowError("declares nothing; accepted: @node and @node_model")
        for name, function in functions.items():
            if (earlier := self._types.get(name)) is not None and earlier.file != file:
                raise _declared_twice("node", name, earlier.file)
            _check_model(f"node {name}", node_type_of(function).model)
        other_models = [earlier for earlier in self._models if earlier.file != file]
        for model in models:
            _check_model(model.class_name, model.name)
            _check_source(model)
            for other in other_models:
                if _accept_the_same(model, other):
                    raise _declared_twice("model", model.name, other.file)
            other_models.append(model)
        self._models = other_models
        for name in [name for name, kind in self._types.items() if kind.file == file]:
            del self._types[name], self._functions[name]
        self._functions.update(functions)
        self._types.update({name: node_type_of(function) for name, function in functions.items()})

    def _unserved(self) -> list[NodeType]:
        names = {model.name for model in self._models} | {EDIT}
        return [kind for kind in self._types.values() if kind.model not in names]

    def _without_model(self, kind: NodeType) -> str:
        """Leave out a node that no model runs; return the error."""
        del self._types[kind.name], self._functions[kind.name]
        names = sorted({model.name for model in self._models})
        return (
            f"{kind.file}: node {kind.name} is run by model {kind.model}, which no file declares"
            f'{nearest(kind.model, names)}; accepted: @node_model("{kind.model}") on a class, or '
            f"{', '.join(names)}"
        )


def signatures(path: Path) -> dict[str, Any]:
    """Return the namespace of a file's signatures; raises as an import of the file does."""
    module = types.ModuleType(_module_name(path, "signatures"))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where annotations of its classes are looked up
    tree = _signature_part(ast.parse(path.read_bytes(), str(path)))
    exec(compile(tree, str(path), "exec"), vars(module))
    return vars(module)


def open_model(model: NodeModel, setup: ModelSetup) -> Nodes:
    """Import a model's file and construct its class.

    Raises:
        WorkflowError: the file cannot be imported; names file and line.
    """
    try:
        cls = vars(_module(Path(model.file)))[model.class_name]
    except (Exception, SystemExit) as error:
        raise WorkflowError(error_of(Path(model.file), error)) from error
    nodes: Nodes = cls(setup)
    return nodes


def error_of(path: Path, error: BaseException) -> str:
    """Return a sentence about an error in a file, with the line where it happened."""
    line, problem = None, str(error)
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line, problem = error.lineno, error.msg
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    where = f"{path}:{line}" if line else f"{path}"
    name = "" if isinstance(error, WorkflowError) else f"{type(error).__name__}: "
    return f"{where}: {name}{problem}"


@cache
def _module(path: Path) -> Any:
    """Return a file's module, imported whole."""
    spec = importlib.util.spec_from_file_location(_module_name(path, "node"), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path, part: str) -> str:
    return f"maskserve_{part}_{path.stem}_{zlib.crc32(str(path).encode()):08x}"


def _signature_part(tree: ast.Module) -> ast.Module:
    """Return the statements that declare nodes and models, and those that bind their names."""
    parts_by_line = {
        position: part
        for position, x in enumerate(tree.body)
        if (part := _declaration(x)) is not None
    }
    unvisited = list(parts_by_line.values())
    needed: set[str] = set()
    while unvisited:
        needed |= {x.id for x in ast.walk(unvisited.pop()) if isinstance(x, ast.Name)}
        for position, statement in enumerate(tree.body):
            if position not in parts_by_line and not needed.isdisjoint(_bound_names(statement)):
                parts_by_line[position] = statement
                unvisited.append(statement)
    parts = [_needed_part(parts_by_line[position], needed) for position in sorted(parts_by_line)]
    futures = [x for x in tree.body if isinstance(x, ast.ImportFrom) and x.module == "__future__"]
    return ast.Module([*futures, *parts], [])


def _declaration(statement: ast.stmt) -> ast.stmt | None:
    """Return a statement under one of our decorators without its body; None: it is another."""
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return None
    decorators = [x for x in statement.decorator_list if _decorator_name(x) in _DECORATORS]
    if not decorators:
        return None
    docstring = statement.body[:1] if ast.get_docstring(statement) is not None else []
    body: list[ast.stmt] = docstring or [ast.copy_location(ast.Pass(), statement)]
    if isinstance(statement, ast.ClassDef):
        part: ast.stmt = ast.ClassDef(statement.name, [], [], body, decorators)  # type: ignore[call-arg,unused-ignore]
    else:
        part = ast.FunctionDef(statement.name, statement.args, body, decorators, statement.returns)  # type: ignore[call-arg,unused-ignore]
    if sys.version_info >= (3, 12):
        vars(part)["type_params"] = []
    return ast.copy_location(part, statement)


def _decorator_name(decorator: ast.expr) -> str:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for part in ast.walk(statement):
        if isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield part.name


def _needed_part(statement: ast.stmt, needed: set[str]) -> ast.stmt:
    """Return an import without the names that nothing needs, or the statement itself."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        statement.names = [
            x for x in statement.names if (x.asname or x.name).partition(".")[0] in needed
        ]
    return statement


def _declared_in(
    namespace: Mapping[str, Any],
) -> tuple[dict[str, Callable[..., Any]], list[NodeModel]]:
    """Return the functions and models that a namespace declares itself, not those it imports."""
    name = namespace["__name__"]
    members = [x for x in namespace.values() if getattr(x, "__module__", "") == name]
    functions = {x.__name__: x for x in members if "node_type" in getattr(x, "__dict__", {})}
    attributes = [getattr(x, "__dict__", {}) for x in members]
    return functions, [values["node_model"] for values in attributes if "node_model" in values]


def _declared_twice(kind: str, name: str, file: str) -> WorkflowError:
    return WorkflowError(f"{kind} {name} is declared in {file}, too; accepted: each name once")


def _accept_the_same(one: NodeModel, other: NodeModel) -> bool:
    """Return whether two classes run one model from folders of one kind."""
    return one.name == other.name and (
        not one.kinds or not other.kinds or not set(one.kinds).isdisjoint(other.kinds)
    )


def _check_model(owner: str, model: Any) -> None:
    if not isinstance(model, str) or not model.isidentifier() or model == EDIT:
        raise WorkflowError(
            f"{owner} names model {model!r}; accepted: letters, digits and _, but not {EDIT}"
        )


def _check_source(model: NodeModel) -> None:
    """Raise WorkflowError if a class has a key of `[nodes]` that is another's, or lacks one."""
    source, fields = model.source, NodesConfig.__struct_fields__
    is_needed = bool(model.kinds or model.needs)
    is_key = source == model.name or source in fields
    if source in _RESERVED or (not is_key if source else is_needed):
        accepted = model.name if model.name not in _RESERVED else "another name of the model"
        raise WorkflowError(f"{model.class_name} has source {source!r}; accepted: {accepted}")
