"""Shared parts of reports: the command that ran, JSON files, markdown tables."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def about(hardware: str) -> dict[str, Any]:
    """What was run, when and on what."""
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
    }


def write_json(report: Any, file: Path | None) -> None:
    """Write a report where one is asked for; a list of numbers or words is a line."""
    if file is not None:
        text = json.dumps(report, indent=2)
        text = re.sub(r"\[\n[^][{}]*\]", lambda found: json.dumps(json.loads(found.group())), text)
        file.write_text(text + "\n", encoding="utf-8")


def table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    first, *body_lines = ("| " + " | ".join(map(str, line)) + " |" for line in (columns, *rows))
    return "\n".join((first, "|---" * len(columns) + "|", *body_lines))
