"""A reader who meets a class by its name alone knows which it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "router", "client", "serving")


def test_each_public_class_name_has_one_meaning() -> None:
    files_by_class: dict[str, list[str]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files_by_class[node.name].append(str(path.relative_to(ROOT)))
    assert len(files_by_class) > 300
    assert {name: places for name, places in files_by_class.items() if len(places) > 1} == {}
