"""Write the tables of modules in docs/modules.md: each module with its docstring's first line.

python scripts/module_index.py            # after a change
python scripts/module_index.py --check    # exit code 1 if the tables are not the code's
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from maskserve_harness.checkout import CHECKOUT

DOCUMENT = CHECKOUT / "docs" / "modules.md"


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
    """The document with the table under each heading `## folder` made anew."""

    def section(match: re.Match[str]) -> str:
        return f"## {match[1]}\n\n{table(CHECKOUT / match[1])}"

    return re.sub(r"^## (\S+)\n\n(?:\|.*\n)+", section, text, flags=re.MULTILINE)


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        return int(updated(text) != text)
    DOCUMENT.write_text(updated(text), encoding="utf-8")
    return 0
