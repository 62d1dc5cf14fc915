"""What is to be run first on a GPU has run here: every line of it, on the CPU and a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maskserve_harness.benchmarks import first_run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_measures_all_that_a_gpu_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rehearsal.json"
    asked = ["--device", "cpu", "--preset", "demo", "--repeat", "1", "--json", str(file)]
    assert first_run.main(asked) == 0, capfd.readouterr().out[-3000:]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["tests_passed"] is True
    assert {(row["kind"], row["batch"], row["mask_ratio"]) for row in report["steps"]} == {
        (kind, batch, ratio)
        for kind in first_run.KINDS
        for batch in first_run.BATCHES
        for ratio in first_run.RATIOS
    }
    for row in report["steps"]:
        assert 0 < row["limit_ms"] < row["dense_limit_ms"]
        assert min(row["ms"], row["dense_ms"]) > 0
    assert report["gb_per_s"].keys() == {"gathered", "whole", "link"}
    for step in report["memory"]["steps"]:
        assert 0 < step["held"] <= step["counted"]


def test_without_a_gpu_it_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if first_run.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        first_run.main(["--json", str(tmp_path / "x.json")])
    assert "--device cpu rehearses" in capsys.readouterr().err


def test_what_was_found_stays_if_a_later_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(first_run, "run_tests", lambda device: True)
    monkeypatch.setattr(first_run, "_SENT", 2**20)
    monkeypatch.setattr(first_run, "time_steps", fails)
    file = tmp_path / "run.json"
    asked = ["--device", "cpu", "--preset", "demo", "--blocks", "1", "2", "--json", str(file)]
    with pytest.raises(RuntimeError, match="out of memory"):
        first_run.main(asked)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["tests_passed"] is True
    assert report["model"] == "demo, 3 blocks, float32"
    assert report["memory"]["weights"] > 0
    assert report["gb_per_s"].keys() == {"gathered", "whole", "link"}
    assert list(tmp_path.iterdir()) == [file]
