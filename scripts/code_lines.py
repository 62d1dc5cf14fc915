#!/usr/bin/env python3
"""Print the code lines of each folder; docstrings, comments and blank lines are not counted."""

import ast
import io
import tokenize
from pathlib import Path

PRODUCT = ("engine", "router", "client", "serving", "model_repository", "services")
BESIDE = ("benchmarks", "studies", "tests", "scripts")


def code_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    files = {each: [p.read_text("utf-8") for p in (root / each).rglob("*.py")] for each in
             (*PRODUCT, *BESIDE)}  # fmt: skip
    counts = {folder: sum(map(code_lines, texts)) for folder, texts in files.items()}
    counts["the product"] = sum(counts[folder] for folder in PRODUCT)
    print("\n".join(f"{folder:20}{count:8,}" for folder, count in counts.items()))
