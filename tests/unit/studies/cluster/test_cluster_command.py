"""The command that simulates a cluster."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from maskserve_common.routing import POLICIES
from maskserve_studies.cluster.command import main


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--edits", "60", "--workers", "2", "--steps", "8", "--json"]
    assert main([*arguments, str(tmp_path / "a.json")]) == 0
    assert main([*arguments, str(tmp_path / "b.json")]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert report == json.loads((tmp_path / "b.json").read_text())
    assert {r["policy"] for r in report["results"]} == set(POLICIES)
    assert all(math.isfinite(r["p95"]) for r in report["results"])
    assert "mask_aware" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--workers", "257"], ["--load", "0"], ["--mix", "none"]])
def test_arguments_out_of_range_are_refused(wrong: list[str]):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
