"""What is to be run first on a GPU has run here: every line of it, on the CPU and a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maskserve_harness.benchmarks import first_run
from maskserve_harness.benchmarks.first_run_page import write_page
from maskserve_harness.benchmarks.step import rest_time
from maskserve_harness.benchmarks.step_rig import Bench
from maskserve_harness.benchmarks.timing import Timer


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
    assert {
        (row["kind"], row["format"], row["batch"], row["mask_ratio"]) for row in report["steps"]
    } == {
        (kind, format, batch, ratio)
        for kind, format in (*((kind, "int8") for kind in first_run.KINDS), ("kv", "int4"))
        for batch in first_run.BATCHES
        for ratio in first_run.RATIOS
    }
    for row in report["steps"]:
        assert 0 < row["limit_ms"] < row["dense_limit_ms"]
        assert min(row["ms"], row["dense_ms"]) > 0
    assert [row["batch"] for row in report["mixed"]] == list(first_run.MIXED)
    for row in report["asked"]:
        assert 0 < row["asked_ms"] <= row["ms"]
    assert report["attention"] == "one call for each row"
    assert report["gb_per_s"].keys() == {"gathered", "whole", "link"}
    for step in report["memory"]["steps"]:
        assert 0 < step["held"] <= step["counted"]
    assert {each.name for each in tmp_path.iterdir()} == {
        "rehearsal.json",
        "rehearsal.md",
        "rehearsal-steps.png",
        "rehearsal-memory.png",
    }


def test_what_is_not_in_blocks_and_how_long_the_host_asks_are_parts_of_a_step() -> None:
    bench = Bench("demo", (1, 1), torch.float32, torch.device("cpu"), "int8")
    bench.fill_entry("kv")
    assert rest_time(bench, Timer(bench.device), [bench.row(0.2, 0)], "kv") > 0
    for step in first_run.ask_for_steps(bench):
        assert 0 < step["asked_ms"] <= step["ms"]


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
    assert sorted(tmp_path.iterdir()) == [file, file.with_suffix(".md")]
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "tests/gpu passed" in page
    assert "demo, 3 blocks, float32" in page


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    about = {"command": "first_run", "date": "today", "hardware": "a card", "torch": "2"}
    steps = [
        {
            "kind": kind,
            "format": "int8",
            "batch": batch,
            "mask_ratio": ratio,
            "ms": 10 * batch * (ratio + 0.1),
            "dense_ms": 12.0 * batch,
            "limit_ms": 5 * batch * (ratio + 0.1),
            "dense_limit_ms": 6.0 * batch,
        }
        for kind in first_run.KINDS
        for batch in first_run.BATCHES
        for ratio in first_run.RATIOS
    ]
    held = [
        {"batch": 1, "mask_ratio": None, "held": 2**30, "counted": 2**31},
        {"batch": 4, "mask_ratio": 0.05, "held": 2**31, "counted": 2**30},
    ]
    file = tmp_path / "run.json"
    memory = {"weights": 2**33, "total": 2**34, "free": 2**33, "steps": held}
    write_page(
        {**about, "tests_passed": False, "model": "m", "steps": steps, "memory": memory}, file
    )
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "tests/gpu FAILED" in page
    assert "| 4 | 0.05 | kv | int8 | 6.0 | 3.0 | 48.0 | 24.0 | 8.00 |" in page
    assert "| 1 | dense | 1.00 | 2.00 |" in page
    assert "| 4 | 0.05 | 2.00 | 1.00 **more than counted** |" in page
    for plot in ("run-steps.png", "run-memory.png"):
        assert f"({plot})" in page
        assert (tmp_path / plot).stat().st_size > 5000
