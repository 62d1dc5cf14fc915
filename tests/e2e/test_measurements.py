"""Commands that measure real servers, at their smallest: they end, and nothing is lost or wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maskserve_benchmarks.checkout import CHECKOUT

pytestmark = pytest.mark.slow


def measured(folder: Path, *command: str) -> dict[str, Any]:
    file = folder / "report.json"
    whole = [sys.executable, "scripts/bench", *command, "--tiny", "--json", str(file)]
    subprocess.run(whole, cwd=CHECKOUT, check=True, timeout=600)
    summary: dict[str, Any] = json.loads(file.read_text())["summary"]
    return summary


def test_edits_with_adapters_are_those_of_diffusers(tmp_path: Path) -> None:
    summary = measured(tmp_path, "bench_adapters", "--only", "served", "--repeat", "1")
    assert summary["served_apart"] <= 1
    assert summary["diffusers_apart"] < 1.0
    assert all(min(sides.values()) > 0.0 for sides in summary["served_ms"].values())


def test_no_edit_is_lost_or_wrong_where_a_replica_dies(tmp_path: Path) -> None:
    summary = measured(tmp_path, "workflows", "--only", "replicas", "monoliths", "--rounds", "1")
    assert (summary["killed_lost"], summary["killed_wrong"]) == (0, 0)
    assert summary["shared_of_monoliths_mib"] < 1.0
