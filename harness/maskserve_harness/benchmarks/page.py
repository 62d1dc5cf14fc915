"""A page of docs/benchmarks, written by the command that measured what it shows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from maskserve_harness.benchmarks.machine import machine

Rows = Sequence[Mapping[str, object]]


def write_page(
    path: Path, title: str, text: str, tables: Sequence[Rows], picture: Path | None = None
) -> None:
    """Write what was measured, and by which command, where and when.

    Args:
        path: of the page.
        title: its heading.
        text: what is shown.
        tables: one after the other; a row names its columns.
        picture: in the page's folder.
    """
    parts = [
        f"# {title}",
        text.strip(),
        f"`python {sys.argv[0]} {shlex.join(sys.argv[1:])}`, {machine()}, CPU only, "
        f"{date.today().isoformat()}.",
        *(_table(rows) for rows in tables),
    ]
    if picture is not None:
        parts.append(f"![{title}]({picture.name})")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _table(rows: Rows) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([_cell(v) for v in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
