"""Shared parts of reports: the command that ran, JSON files, markdown tables."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def about(hardware: str) -> dict[str, Any]:
    """Return the command, the date and the hardware of this run."""
    return {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
    }


def write_json(report: Any, file: Path | None) -> None:
    """Write a report if there is a file to write to; a list of numbers or words takes one line."""
    if file is not None:
        text = json.dumps(report, indent=2)
        text = re.sub(r"\[\n[^][{}]*\]", lambda match: json.dumps(json.loads(match.group())), text)
        file.write_text(text + "\n", encoding="utf-8")


def table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table."""
    first, *body_lines = ("| " + " | ".join(map(str, line)) + " |" for line in (columns, *rows))
    return "\n".join((first, "|---" * len(columns) + "|", *body_lines))


def write_page(title: str, text: str, report: Mapping[str, Any], file: Path | None) -> None:
    """Write a page of results if there is a file to write to.

    Args:
        title: heading.
        text: the results and what they are.
        report: has the fields of `about`.
        file: Markdown file.
    """
    if file is not None:
        origin = f"`{report['command']}`; {report['hardware']}, {report['date']}."
        file.write_text(f"# {title}\n\n{origin}\n\n{text}\n", encoding="utf-8")
