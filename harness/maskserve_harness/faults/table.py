"""Trials as the tables of docs/reliability.md."""

from __future__ import annotations

from typing import Any

_SHOWN = 110


def worker_table(trials: list[dict[str, Any]]) -> str:
    """Fault → what a client sees → times, as Markdown. Seconds from the fault."""
    lines = [
        "| fault | what a client sees | all answered | `control` says so | not ready "
        "| serves again | of it loading |",
        "|---|---|---|---|---|---|---|",
    ]
    for trial in trials:
        seen = "<br>".join(f"`{_short(message)}`" for message in trial["seen"])
        times = ("answered_s", "not_well_s", "not_ready_s", "serves_s", "load_s")
        lines.append(
            f"| {trial['fault']} | {seen} | "
            + " | ".join(f"{trial[name]:.1f} s" for name in times)
            + " |"
        )
    return "\n".join(lines)


def client_table(trials: list[dict[str, Any]]) -> str:
    """Way to leave → steps the row went on for, as Markdown."""
    lines = ["| a client leaves | further steps of its row | freed after | a step |"]
    lines.append("|---|---|---|---|")
    for trial in trials:
        lines.append(
            f"| {trial['fault']} | {trial['steps']} | {1e3 * trial['freed_s']:.0f} ms "
            f"| {trial['step_ms']:.0f} ms |"
        )
    return "\n".join(lines)


def _short(message: str) -> str:
    line = " ".join(message.replace("`", "'").replace("|", "/").split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
