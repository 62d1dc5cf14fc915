"""Edits of each family at all mask sizes and numbers of steps end as they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import CHECKOUT
from tests.fakes.tiny_families import FAMILIES
from tests.support.draws import fresh_seed

GRID = "--ratios 0.05 0.11 0.35 0.69 0.81 1.0 --steps 1 2 4 6 8 20 50 --large-steps 4"


# tests/unit/engine/requests/test_execution_plans.py has the ways of an edit without a server, and
# families/test_family_contract.py the pictures.
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_edit_ends_with_a_right_picture_or_a_sentence(name: str, tmp_path: Path) -> None:
    """With LoRAs, ControlNets and each use of the cache, four edits at a time."""
    build = [sys.executable, "-m", "tests.fakes.tiny_families", str(tmp_path), name]
    subprocess.run(build, cwd=CHECKOUT, check=True)
    folders = [f"--{kind}={tmp_path / kind}" for kind in ("adapters", "controlnets")]
    file = tmp_path / "summary.json"
    options = [f"--models={tmp_path / 'models' / name}", *folders, f"--json={file}", *GRID.split()]
    command = [sys.executable, "scripts/bench", "every_edit", *options, f"--seed={fresh_seed()}"]
    ended = subprocess.run(command, cwd=CHECKOUT)
    summary = json.loads(file.read_text("utf-8"))[name]
    assert summary["faults"] == []
    assert ended.returncode == 0
    assert summary["pictures"] > summary["edits"] / 3  # the others ask for what the model has not
