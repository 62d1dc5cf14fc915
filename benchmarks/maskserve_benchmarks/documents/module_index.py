"""Print a table of each package's modules, with lines of code and the first line of each docstring.

scripts/bench module_index                    # all packages
scripts/bench module_index engine/maskserve_engine
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT


def packages() -> list[Path]:
    """Return the packages of the product, of benchmarks and of studies."""
    return sorted(path for path in CHECKOUT.glob("*/maskserve_*") if any(path.rglob("[!_]*.py")))


def modules(package: Path) -> dict[str, str]:
    """Return path within the package → first paragraph of the module's docstring; empty without
    one.
    """
    summaries = {}
    for path in sorted(package.rglob("*.py")):
        if path.name != "__init__.py":
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            summary = docstring.split("\n\n")[0].replace("\n", " ").rstrip(".")
            summaries[path.relative_to(package).as_posix()] = summary
    return summaries


def code_lines(text: str) -> int:
    """Count a module's lines of code: neither blank lines nor comments nor docstrings."""
    docstring_lines = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    token_lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.string.strip() and token.type != tokenize.COMMENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(token_lines - docstring_lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("packages", nargs="*", type=Path, help="folders (default: all packages)")
    for package in parser.parse_args().packages or packages():
        print(
            f"## {package.absolute().relative_to(CHECKOUT)}\n\n| module | lines | |\n|---|---|---|"
        )
        for name, summary in modules(package).items():
            lines = code_lines((package / name).read_text(encoding="utf-8"))
            print(f"| `{name}` | {lines} | {summary} |")
        print()
    return 0
