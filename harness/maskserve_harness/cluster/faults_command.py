"""Do harm to two real workers behind a router and count what becomes of their edits."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.cluster.faults import faults, measure
from maskserve_harness.machine import machine


def main() -> int:
    """Harm, count, and fail if an edit was lost or wrong."""
    options = _parser().parse_args()
    report: dict[str, Any]
    if options.show:
        report = json.loads(options.show.read_text())
    else:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "hardware": machine(),
            "date": date.today().isoformat(),
            "trials": [],
        }

        def tell(trial: dict[str, Any]) -> None:
            """Written as they come: a long run that is ended leaves what it had."""
            report["trials"].append(trial)
            print(json.dumps(trial), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=2) + "\n")

        chosen = [one for one in faults(options.overload) if options.only in one.name]
        asyncio.run(measure(options.model, chosen, tell))
    print(table(report["trials"]))
    return 1 if any(trial["lost"] or trial["wrong"] for trial in report["trials"]) else 0


def table(trials: list[dict[str, Any]]) -> str:
    """The trials as docs/reliability.md has them."""
    lines = [
        "| harm | edits sent | right | wrong | lost | an error | both workers again | P95 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in trials:
        errors = ", ".join(f"{count} x {name}" for name, count in t["errors"].items()) or "0"
        left = f", {t['left']} left" if t["left"] else ""
        p95 = "" if t["p95_s"] is None else f"{t['p95_s']:.2f} s"
        lines.append(
            f"| {t['fault']} | {t['sent']}{left} | {t['right']} | {t['wrong']} | {t['lost']} "
            f"| {errors} | {t['whole_again_s']:.0f} s | {p95} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Two real workers behind a router, under a load whose every answer is compared "
        "with a reference: processes are killed, stopped and drained, clients leave or come in "
        "tenfold, and strangers send rubbish. Exit code 1 when an edit was lost or wrong."
    )
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, help="folder in diffusers format")
    add("--only", default="", help="only harms whose names hold this text")
    add("--overload", type=float, default=60.0, help="seconds of the overload (default 60)")
    add("--json", type=Path, metavar="FILE", help="where to write the figures")
    add("--show", type=Path, metavar="FILE", help="print the table of a figures file; no run")
    return parser
