#!/usr/bin/env python3
"""Print the code lines of each folder; docstrings, comments and blank lines are not counted."""

from pathlib import Path

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.documents.module_index import code_lines
from maskserve_benchmarks.documents.words import PRODUCT

FOLDERS = (*PRODUCT, "benchmarks", "studies", "tests", "scripts")


def total(folder: Path) -> int:
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


if __name__ == "__main__":
    counts = {folder: total(CHECKOUT / folder) for folder in FOLDERS}
    counts["the product"] = sum(counts[folder] for folder in PRODUCT)
    print("\n".join(f"{folder:20}{count:8,}" for folder, count in counts.items()))
