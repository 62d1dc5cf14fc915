"""Tests stand alone: what they share lies in tests/support and tests/fakes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SHARED = ("tests.support", "tests.fakes")
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
    found = {
        path.relative_to(TESTS).as_posix(): names
        for path in TESTS.rglob("*.py")
        if (names := forbidden(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_the_check_sees_what_is_forbidden() -> None:
    for line in ("from tests.unit.test_x import y", "from . import y", "import check_host"):
        assert forbidden(line), line
    assert not forbidden("from tests.support.calls import Grpc")
