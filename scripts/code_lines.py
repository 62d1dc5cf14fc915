#!/usr/bin/env python3
"""Print the code lines of each package: docstrings, comments and blank lines are not counted.

python scripts/code_lines.py
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "engine/maskserve_core",
    "engine/maskserve_engine",
    "router/maskserve_router",
    "client",
    "serving/maskserve_serving",
    "model_repository",
    "services",
)
BESIDE = ("harness", "tests", "scripts")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(text: str) -> int:
    """Lines of a module on which something stands that is neither comment nor docstring."""
    tree, lines = ast.parse(text), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*_NO_CODE, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):  # a string by itself says something of what is above it
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def of_folder(folder: str) -> int:
    return sum(code_lines(p.read_text(encoding="utf-8")) for p in (ROOT / folder).rglob("*.py"))


def main() -> int:
    counts = {folder: of_folder(folder) for folder in (*PRODUCT, *BESIDE)}
    for folder, count in counts.items():
        print(f"{folder:28}{count:8,}")
        if folder == PRODUCT[-1]:
            print(f"{'the product':28}{sum(counts[each] for each in PRODUCT):8,}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
