"""Find names and docstrings that a reader has to guess at: names that are pronouns or participles,
docstrings that open with a riddle, `Args:` lines that point elsewhere.

scripts/bench check_words                     # all code
scripts/bench check_words router/maskserve_router

Each finding is printed with its file and line; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT

PRODUCT = ("engine", "router", "client", "serving", "model_repository", "services")
FOLDERS = (*PRODUCT, "benchmarks", "studies", "scripts", "tests")
"""The folders that `make lint` checks."""
_WORDS = (
    "asked asks beside both bring brought came come coming each found given gives gone "
    "had held here hers his kept lacks made meant others ours own said says seen shown "
    "taken tell tells theirs there these those told wanted wants what whose"
)
NAMES = frozenset(_WORDS.split())
"""Names that say nothing of what they hold."""
_PUBLIC = frozenset(
    {
        ("maskserve_workflows/definition.py", "each"),
        ("maskserve_workflows/definition.py", "gives"),
        ("maskserve_workflows/plan.py", "gives"),
        ("contracts/memory_table.py", "others"),
        ("contracts/memory_table.py", "own"),
        ("contracts/status_record.py", "own"),
        ("jobs/tables.py", "tell"),
        ("jobs/store.py", "told"),
    }
)
"""Names of the workflow language, of records and of database columns, with folder and file."""
_OPENING = re.compile(r"(Of|Likewise|Theirs|Whoever|Whose|What|As of)\b")
_ELLIPTICAL = re.compile(r":\s+(as of `|likewise\b|theirs\b|its\.?$)")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each odd name and docstring of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = f"{path.parent.name}/{path.name}"
    for line, name in _names(tree):
        if name.strip("_") in NAMES and (where, name) not in _PUBLIC:
            yield line, f"the name `{name}` does not say what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield from _complaints(text, node.lineno)


def _complaints(text: str, first: int) -> Iterator[tuple[int, str]]:
    if opening := _OPENING.match(text):
        yield first, f"a docstring opens with {opening[0]!r}"
    for number, line in enumerate(text.splitlines()):
        if _ELLIPTICAL.search(line):
            yield first + number, f"an argument points elsewhere: {line.strip()}"


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every definition: classes, functions, arguments and bindings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    help_text = "folders to check (default: all code)"
    parser.add_argument("folders", nargs="*", type=Path, help=help_text)
    result = 0
    for folder in parser.parse_args(arguments).folders or [CHECKOUT / name for name in FOLDERS]:
        for path in sorted(folder.rglob("*.py")):
            label = path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path
            for line, complaint in findings(path):
                print(f"{label}:{line}: {complaint}")
                result = 1
    return result
