"""Tests stand alone: what they share lies in tests/support and tests/fakes. Those of e2e are
collected without torch, which not each of their processes needs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SHARED = ("tests.support", "tests.fakes")
ROOTS = (
    TESTS.parent,
    *(
        TESTS.parent / name
        for name in ("engine", "router", "client", "serving", "benchmarks", "studies")
    ),
)
HEAVY = {"torch", "diffusers", "transformers", "matplotlib"}
COMMANDS = {path.stem for path in (TESTS.parent / "scripts").glob("*.py")}


def imported(source: str) -> Iterator[str]:
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def forbidden(source: str) -> list[str]:
    """Imports of other tests and of commands."""
    return [
        name
        for name in imported(source)
        if name.split(".")[0] in COMMANDS
        or (name.split(".")[0] in ("tests", "") and not name.startswith(SHARED))
    ]


def test_tests_import_neither_one_another_nor_scripts() -> None:
    violations = {
        path.relative_to(TESTS).as_posix(): names
        for path in TESTS.rglob("*.py")
        if (names := forbidden(path.read_text(encoding="utf-8")))
    }
    assert violations == {}


def test_the_check_sees_what_is_forbidden() -> None:
    for line in ("from tests.unit.test_x import y", "from . import y", "import check_host"):
        assert forbidden(line), line
    assert not forbidden("from tests.support.calls import Grpc")


def begins_with(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that are imported with the module that has this body."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from begins_with(node.body + node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from begins_with(node.body)


@cache
def directly(name: str) -> tuple[str, ...]:
    """Modules that one of ours imports as it is imported; of others none."""
    places = (root / name.replace(".", "/") for root in ROOTS)
    files = (file for at in places for file in (at.with_suffix(".py"), at / "__init__.py"))
    module_file = next((file for file in files if file.is_file()), None)
    return tuple(begins_with(ast.parse(module_file.read_text("utf-8")).body)) if module_file else ()


def heavy(name: str) -> list[str]:
    """How a module comes to a heavy library as it is imported; empty: it does not."""
    ways = {name: [name]}
    for module in (pending_modules := [name]):  # which grows
        if module.partition(".")[0] in HEAVY:
            return ways[module]
        for imported in directly(module):
            if imported not in ways:
                ways[imported] = [*ways[module], imported]
                pending_modules.append(imported)
    return []


def test_tests_of_e2e_are_collected_without_torch() -> None:
    files = sorted((TESTS / "e2e").glob("*.py"))
    assert [way for file in files if (way := heavy(f"tests.e2e.{file.stem}"))] == []
    encoder = "maskserve_engine.families.encoder"
    assert heavy(encoder) == [encoder, "torch"]
