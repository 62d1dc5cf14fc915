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
        self._models: dict[tuple[str, str], NodeModel] = {}
        self.types: Mapping[str, NodeType] = MappingProxyType(self._types)
        """Node types by name."""
        self.functions: Mapping[str, Callable[..., Any]] = MappingProxyType(self._functions)
        """Functions by name, which a definition calls."""

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
                self._add(path, signatures(path))
            except WorkflowError as error:
                problems.append(str(error))
        return problems + [self._without_model(kind) for kind in self._unserved()]

    def models(self, name: str) -> list[NodeModel]:
        """Return the classes that run a model; it has several if these accept different folders."""
        return list(dict.fromkeys(x for (known, _), x in self._models.items() if known == name))

    @property
    def all_models(self) -> list[NodeModel]:
        return list(dict.fromkeys(self._models.values()))

    def _add(self, path: Path, namespace: Mapping[str, Any]) -> None:
        functions, models = _declared_in(namespace)
        if not functions and not models:
            raise WorkflowError(f"{path}: declares nothing; accepted: @node and @node_model")
        for name, function in functions.items():
            self._require_new(path, "node", name, self._types.get(name))
            _check_model(path, f"node {name}", node_type_of(function).model)
        keys = {(model.name, kind): model for model in models for kind in model.kinds or ("",)}
        for (name, kind), model in keys.items():
            _check_model(path, model.class_name, name)
            _check_source(path, model)
            rival = next(
                (x for key, x in self._models.items() if key in ((name, kind), (name, ""))
                 or (not kind and key[0] == name)), None,
            )  # fmt: skip
            self._require_new(path, "model", name, rival)
        for known in (self._functions, self._types):
            for name in [x for x, kind in self._types.items() if kind.file == str(path)]:
                known.pop(name, None)
        self._functions.update(functions)
        self._types.update({name: node_type_of(function) for name, function in functions.items()})
        others = {key: x for key, x in self._models.items() if x.file != str(path)}
        self._models = others | keys

    def _require_new(
        self, path: Path, what: str, name: str, known: NodeType | NodeModel | None
    ) -> None:
        if known is not None and known.file != str(path):
            raise WorkflowError(
                f"{path}: {what} {name} is declared in {known.file}, too; accepted: each name once"
            )

    def _unserved(self) -> list[NodeType]:
        names = {model.name for model in self.all_models} | {EDIT}
        return [kind for kind in self._types.values() if kind.model not in names]

    def _without_model(self, kind: NodeType) -> str:
        """Leave out a node that no model runs; return the error."""
        del self._types[kind.name], self._functions[kind.name]
        names = sorted({model.name for model in self.all_models})
        return (
            f"{kind.file}: node {kind.name} is run by model {kind.model}, which no file declares"
            f'{nearest(kind.model, names)}; accepted: @node_model("{kind.model}") on a class, or '
            f"{', '.join(names)}"
        )


def signatures(path: Path) -> dict[str, Any]:
    """Return the namespace of a file's signatures.

    Raises:
        WorkflowError: naming the file and line.
    """
    module = types.ModuleType(_module_name(path, "signatures"))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where annotations of its classes are looked up
    namespace = vars(module)
    try:
        tree = _signature_part(ast.parse(path.read_bytes(), str(path)))
        exec(compile(tree, str(path), "exec"), namespace)
    except Exception as error:
        raise WorkflowError(error_of(path, error)) from error
    return namespace


def open_model(model: NodeModel, setup: ModelSetup) -> Nodes:
    """Import a model's file and construct its class.

    Raises:
        WorkflowError: the file cannot be imported; names file and line.
    """
    try:
        cls = vars(_module(Path(model.file)))[model.class_name]
    except Exception as error:
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
    kept = {at: part for at, x in enumerate(tree.body) if (part := _declaration(x)) is not None}
    waiting = list(kept.values())
    needed: set[str] = set()
    while waiting:
        needed |= {x.id for x in ast.walk(waiting.pop()) if isinstance(x, ast.Name)}
        for at, statement in enumerate(tree.body):
            if at not in kept and not needed.isdisjoint(_bound(statement)):
                kept[at] = statement
                waiting.append(statement)
    parts = [_needed_part(kept[at], needed) for at in sorted(kept)]
    futures = [x for x in tree.body if isinstance(x, ast.ImportFrom) and x.module == "__future__"]
    return ast.Module([*futures, *parts], [])


def _declaration(statement: ast.stmt) -> ast.stmt | None:
    """Return a statement under one of our decorators without its body; None: it is another."""
    if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return None
    decorators = [x for x in statement.decorator_list if _called(x) in _DECORATORS]
    if not decorators:
        return None
    text = statement.body[:1] if ast.get_docstring(statement) is not None else []
    body: list[ast.stmt] = text or [ast.copy_location(ast.Pass(), statement)]
    if isinstance(statement, ast.ClassDef):
        part: ast.stmt = ast.ClassDef(statement.name, [], [], body, decorators)  # type: ignore[call-arg,unused-ignore]
    else:
        part = ast.FunctionDef(statement.name, statement.args, body, decorators, statement.returns)  # type: ignore[call-arg,unused-ignore]
    if sys.version_info >= (3, 12):
        vars(part)["type_params"] = []
    return ast.copy_location(part, statement)


def _called(decorator: ast.expr) -> str:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _bound(statement: ast.stmt) -> Iterator[str]:
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
    here = [x for x in namespace.values() if getattr(x, "__module__", "") == name]
    functions = [x for x in here if callable(x) and "node_type" in vars(x)]
    models = [vars(x)["node_model"] for x in here if "node_model" in vars(x)]
    return {function.__name__: function for function in functions}, models


def _check_model(path: Path, what: str, model: str) -> None:
    if not model.isidentifier() or model == EDIT:
        raise WorkflowError(
            f"{path}: {what} names model {model!r}; accepted: letters, digits and _, but not {EDIT}"
        )


def _check_source(path: Path, model: NodeModel) -> None:
    fields = NodesConfig.__struct_fields__
    source = model.source
    if source and source != model.name and (source not in fields or source in _RESERVED):
        raise WorkflowError(
            f"{path}: {model.class_name} has source {source!r}; accepted: {model.name}"
        )
    if source in _RESERVED or (not source and (model.kinds or model.needs)):
        raise WorkflowError(
            f"{path}: {model.class_name} has source {source!r}; accepted: the name of a model that "
            f"is none of {', '.join(sorted(_RESERVED))}"
        )
