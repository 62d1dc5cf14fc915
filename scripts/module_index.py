"""Write the tables of modules in docs/architecture.md: each module with its docstring's first line.

A test holds the tables to what this prints: `python scripts/module_index.py` after a change.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"


def table(package: Path) -> str:
    """The markdown table of a package's modules."""
    rows = []
    for path in sorted(package.rglob("*.py")):
        if path.name == "__init__.py" or "__pycache__" in path.parts:
            continue
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = says.split("\n\n")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| `{path.relative_to(package).as_posix()}` | {first} |")
    return "\n".join(["| module | |", "|---|---|", *rows, ""])


def updated(text: str) -> str:
    """The document with the table under each heading `### folder` made anew."""

    def section(match: re.Match[str]) -> str:
        return f"### {match[1]}\n\n{table(ROOT / match[1])}"

    return re.sub(r"^### (\S+)\n\n(?:\|.*\n)+", section, text, flags=re.MULTILINE)


def main() -> None:
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
