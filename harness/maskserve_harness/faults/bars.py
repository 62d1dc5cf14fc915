"""What must hold of trials."""

from __future__ import annotations

from typing import Any

from maskserve_harness.faults.client_faults import STEPS_BAR
from maskserve_harness.faults.worker_faults import RETURN_BAR_S


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What did not go as promised, in words."""
    missed = []
    for trial in report["worker_faults"]:
        if not trial["as_told"]:
            missed.append(f"{trial['fault']}: after {trial['answered_s']} s {trial['seen']}")
        if trial["serves_s"] > trial["load_s"] + RETURN_BAR_S:
            missed.append(f"{trial['fault']}: served again after {trial['serves_s']} s")
    for trial in report["client_faults"]:
        if trial["steps"] > STEPS_BAR:
            missed.append(f"{trial['fault']}: its row went on for {trial['steps']} steps")
    return missed
