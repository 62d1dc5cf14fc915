"""Pages of measured edits, services and monoliths."""

from __future__ import annotations

from maskserve_studies.adapters.served_edits import CASES, SIDES, served_text
from maskserve_studies.workflows.services_page import services_text


def test_a_page_has_the_parts_that_were_measured() -> None:
    killed = {"replicas_edits_ratio": 1.5, "killed_edits": 8, "killed_lost": 0, "killed_wrong": 0}
    due = {"due_apart_points": {"0.8": {"slack": [1.0, -2.0]}}}
    text = services_text(killed)
    assert "| 1.5 |" in text
    assert "| 8, 0, 0 |" in text
    assert "MiB" not in text
    assert "| -0.5 |" in services_text(due)


def test_a_side_is_so_many_times_as_fast_as_diffusers() -> None:
    ms = dict.fromkeys(SIDES, 50.0) | {"diffusers": 100.0}
    report = {
        "served_side": 64,
        "served_steps": 2,
        "served_ms": {case.name: ms for case in CASES},
        "served_apart": 0,
        "diffusers_apart": 0.1,
    }
    assert served_text(report).count("50 (2.00)") == len(CASES) * (len(SIDES) - 1)
