"""A machine is measured here: every line, on the CPU and a small model."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from maskserve_benchmarks.steps.step import rest_time
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.timing import Timer
from maskserve_engine.cache.reserve import Reserve
from maskserve_studies.gpu_run import command, machine, machine_page, machine_parts
from maskserve_studies.gpu_run.machine_page import write_page
from maskserve_studies.gpu_run.machine_parts import (
    RIVALS,
    answer_of,
    inputs_of,
    rival_of,
    time_attention,
    time_loads,
    time_placing,
    time_rivals,
)
from maskserve_studies.gpu_run.run import STUCK_S
from maskserve_studies.kernels.fake_cuda import FakeCuda

CPU = torch.device("cpu")


def measured(file: Path, *flags: str, device: torch.device = CPU, **parts: Any) -> int:
    """Run `gpu_run --machine` with flags."""
    args = command.options().parse_args(["--machine", *flags])
    return machine.measure_machine(args, file, device, "c", **parts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_measures_all_that_a_gpu_is_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rehearsal.json"
    assert measured(file, "--tiny", "--repeat", "1") == 0, capfd.readouterr().out[-3000:]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["tests_passed"] is True
    assert {
        (row["kind"], row["format"], row["batch"], row["mask_ratio"]) for row in report["steps"]
    } == {
        (kind, format, batch, ratio)
        for kind, format, batches in (
            *((kind, "int8", machine.BATCHES) for kind in machine.KINDS),
            ("kv", "int4", machine.BATCHES[:1]),
        )
        for batch in batches
        for ratio in machine.RATIOS
    }
    assert all(row["ms"] > 0 for row in report["served"])
    for row in report["steps"]:
        assert 0 < row["limit_ms"] < row["dense_limit_ms"]
        assert min(row["ms"], row["dense_ms"]) > 0
    assert [row["batch"] for row in report["mixed"]] == list(machine.MIXED)
    for row in report["asked"]:
        assert 0 < row["asked_ms"] <= row["ms"]
    assert report["attention"] == "one call for each row"
    assert report["gb_per_s"].keys() == {"gathered", "whole", "link"}
    for step in report["held"]:
        assert 0 < step["held"] <= step["counted"]
    assert {(item["way"], item["batch"]) for item in report["loads"]} == {("gathered", 1)}
    assert {item["who"] for item in report["rivals"]} >= set(RIVALS)
    assert all(item["ms"] > 0 for item in report["rivals"])
    assert min(report["stages"][name] for name in ("t5_ms", "encode_ms", "decode_ms")) > 0
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    for title in ("Steps that load", "Beside diffusers", "T5 and the VAE"):
        assert f"## {title}" in page
    assert {item.name for item in tmp_path.iterdir()} == {
        "rehearsal.json",
        "rehearsal.md",
        "rehearsal-steps.png",
        "rehearsal-memory.png",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_device_that_computes_nothing_every_part_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """FLUX.1's and SDXL's sizes: nothing is on the wrong device. Its times mean nothing. Without
    steps that load: the loader has threads, and torch's fake tensors are for one.
    """
    file = tmp_path / "run.json"
    flags = "--blocks", "1", "1", "--repeat", "1"
    with FakeCuda() as cuda:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: cuda.catch_up())
        monkeypatch.setattr(machine, "time_loads", lambda *_: [])
        # Fake operations take this machine's time, not a GPU's.
        monkeypatch.setattr(machine, "LIMITS_S", dict.fromkeys(machine.LIMITS_S, 900.0))
        monkeypatch.setattr(machine, "WHOLE_S", 900.0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _=None: 0)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _=None: 0)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _=None: None)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _=None: {})
        code = measured(file, *flags, device=torch.device("cuda", 0), tests=lambda device: True)
        assert code == 0, capfd.readouterr().out[-3000:]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["failed"] == {}
    assert {item["who"] for item in report["rivals"]} >= set(RIVALS)
    assert {item["kind"] for item in report["steps"]} == set(machine.KINDS)
    assert report["unet_steps"]
    assert all(item["ms"] > 0 for item in report["unet_own"])


def test_what_is_not_in_blocks_and_how_long_the_host_asks_are_parts_of_a_step() -> None:
    bench = Bench("demo", (1, 1), torch.float32, torch.device("cpu"), "int8")
    bench.fill_entry("kv")
    assert rest_time(bench, Timer(bench.device), [bench.row(0.2, 0)], "kv") > 0
    for step in machine.time_launches(bench):
        assert 0 < step["asked_ms"] <= step["ms"]


def test_steps_are_timed_as_a_worker_takes_them(tmp_path: Path) -> None:
    bench = Bench("demo", (1, 1), torch.float32, torch.device("cpu"), "int8", steps=8)
    served_steps = machine.time_served_steps(bench, 1)
    assert [(step["batch"], step["kind"], step["mask_ratio"]) for step in served_steps] == [
        (batch, kind, ratio)
        for batch in machine.SERVED
        for kind in ("kv", "no-text")
        for ratio in machine.RATIOS
    ]
    assert all(step["ms"] > 0 and "asked_ms" not in step for step in served_steps)  # on a CPU
    assert [("anchor_ms" in step) for step in served_steps] == [
        s["kind"] == "no-text" for s in served_steps
    ]
    assert sum("edit_times" in step for step in served_steps) == len(machine.RATIOS)
    served_steps[0]["asked_ms"] = 2.25
    report = {"hardware": "x", "command": "y", "date": "z", "torch": "2", "served": served_steps}
    write_page(report, tmp_path / "run.json")
    page = (tmp_path / "run.md").read_text(encoding="utf-8")
    assert (
        f"| 1 | kv | 0.05 | {served_steps[0]['dense_ms']:.1f} | {served_steps[0]['ms']:.1f} |"
        in page
    )
    assert f"| {served_steps[0]['of_limit']:.2f} | 2.2 |" in page


def test_what_steps_are_made_of_is_timed_by_itself(tmp_path: Path) -> None:
    bench = Bench("demo", (1, 1), torch.float32, torch.device("cpu"), "int8")
    attention = time_attention(bench, (1, 2), (0.2,))
    assert [(s["batch"], s["queries"], s["keys"]) for s in attention] == [
        (1, 56, 272),
        (2, 56, 272),
    ]
    assert all(s["sdpa_ms"] > 0 and "varlen_ms" not in s for s in attention)  # on a CPU
    placing = time_placing(bench, (2,))
    assert len(placing) == 6
    assert all(s["ms"] > 0 <= s["gb_per_s"] for s in placing)  # rounded: 0 where all wait
    report = {"hardware": "x", "command": "y", "date": "z", "torch": "2", "placing": placing}
    write_page({**report, "attention_ms": attention}, tmp_path / "run.json")
    page = (tmp_path / "run.md").read_text(encoding="utf-8")
    assert "| 2 | 56 | 272 |" in page
    assert "| 2 | int4 | 2 |" in page


def test_parts_are_asked_for_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert measured(file, "gb_per_s", "--tiny", "--blocks", "1", "1", sent=2**20) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert "gb_per_s" in report
    assert not {"tests_passed", "steps", "served"} & report.keys()


@pytest.mark.slow  # the test below lets parts fail that come first
def test_a_part_that_fails_says_why_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("out of memory\nand a page of more")

    monkeypatch.setattr(machine, "time_rivals", fails)
    file = tmp_path / "run.json"
    flags = "--tiny", "--blocks", "1", "2", "--repeat", "1"
    passed: dict[str, Any] = {"tests": lambda device: True, "sent": 2**20}
    assert measured(file, *flags, steps=fails, **passed) == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["tests_passed"] is True
    assert report["model"]["name"] == "demo, 3 blocks, float32"
    assert report["model"]["weights"] > 0
    assert report["gb_per_s"].keys() == {"gathered", "whole", "link"}
    why = "RuntimeError: out of memory"
    assert report["failed"] == {"steps": why, "rivals": why}
    assert {"mixed", "asked", "held", "loads", "stages"} <= report.keys()
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "tests/gpu passed" in page
    assert "demo, 3 blocks, float32" in page
    assert f"- Steps; Beside diffusers: {why}\n" in page
    assert f"steps FAILED: {why}" in capfd.readouterr().out


def test_a_part_that_takes_too_long_says_so_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a library catches every error of what it calls."""

    def caught(*_: object, **__: object) -> None:
        with contextlib.suppress(Exception):
            time.sleep(60)

    monkeypatch.setattr(machine, "_ENDLESS_S", 1.0)
    monkeypatch.setattr(machine, "load_gb_per_s", caught)
    stages = {"tokens": 8, "side": 64, "t5_ms": 1.0, "encode_ms": 1.0, "decode_ms": 1.0}
    monkeypatch.setattr(machine, "time_stages", lambda *_, **__: stages)
    file = tmp_path / "run.json"
    assert measured(file, "gb_per_s", "stages", "--tiny") == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["failed"]["gb_per_s"] == "StepTimeout: it took more than 1 s"
    assert report["stages"] == stages


def test_every_part_has_a_limit_and_all_of_them_one_that_a_command_keeps() -> None:
    assert machine.WHOLE_S + STUCK_S < 600
    page_parts = {"unet", "model"} | set(machine_page._SECTIONS) | set(machine_page._FACTS)
    assert page_parts - {"unet"} <= set(machine.LIMITS_S)


def test_without_a_model_the_parts_that_need_none_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results stay from part to part."""
    saved_keys: list[set[str]] = []

    def fails(*_: object) -> NoReturn:
        saved_keys.append(set(json.loads(file.read_text(encoding="utf-8"))))
        raise torch.OutOfMemoryError("no room")

    file = tmp_path / "run.json"
    for name in ("Bench", "time_stages"):
        monkeypatch.setattr(machine, name, lambda *_, **__: fails())
    assert measured(file, "--tiny", tests=lambda device: True, sent=2**20) == 1
    assert {"attention", "gb_per_s"} <= saved_keys[0]
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["failed"].keys() == {"model", "stages"}
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "- model: none, OutOfMemoryError: no room" in page
    assert "## Steps" not in page


def test_the_page_says_what_the_report_says(tmp_path: Path) -> None:
    about = {"command": "gpu_run", "date": "today", "hardware": "a card", "torch": "2"}
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
        for kind in machine.KINDS
        for batch in machine.BATCHES
        for ratio in machine.RATIOS
    ]
    memory_rows = [
        {"batch": 1, "mask_ratio": None, "held": 2**30, "counted": 2**31},
        {"batch": 4, "mask_ratio": 0.05, "held": 2**31, "counted": 2**30},
    ]
    file = tmp_path / "run.json"
    model = {"name": "m", "weights": 2**33, "total": 2**34, "free": 2**33}
    write_page(
        {**about, "tests_passed": False, "model": model, "steps": steps, "held": memory_rows}, file
    )
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "tests/gpu FAILED" in page
    assert "| 4 | 0.05 | kv | int8 | 6.0 | 3.0 | 48.0 | 24.0 | 8.00 |" in page
    assert "| 1 | dense | 1.00 | 2.00 |" in page
    assert "| 4 | 0.05 | 2.00 | 1.00 **more than counted** |" in page
    for plot in ("run-steps.png", "run-memory.png"):
        assert f"({plot})" in page
        assert (tmp_path / plot).stat().st_size > 5000


def small_bench() -> Bench:
    return Bench("demo", (1, 1), torch.float32, torch.device("cpu"), "int8")


def test_steps_are_timed_while_their_entries_come() -> None:
    [load_times] = time_loads(small_bench(), [2])
    assert load_times["way"] == "gathered"
    assert load_times["bytes"] > 0
    assert min(load_times[name] for name in ("alone_ms", "beside_ms", "load_ms", "gb_per_s")) > 0


def test_loads_that_are_timed_are_cut_of_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; with room for less than two steps' loads, it says so."""
    reserves: list[Reserve] = []

    def reserve(mover: object, nbytes: int) -> Reserve:
        reserves.append(Reserve(nbytes, torch.device("cpu")))
        return reserves[-1]

    monkeypatch.setattr(machine_parts, "open_reserve", reserve)
    time_loads(small_bench(), [1, 2])
    assert reserves[0].free == len(reserves[0].memory)
    monkeypatch.setattr(machine_parts, "_LOADS", 1)
    with pytest.raises(AssertionError, match="no room in the reserve"):
        time_loads(small_bench(), [2])


def test_a_rival_that_cannot_run_says_why_and_the_others_are_timed() -> None:
    """Rivals share the weights: what is quantised of one is not of another."""

    def refuses(*_: object) -> NoReturn:
        raise RuntimeError("no such kernel\nand a page of more")

    few = ("eager", "fp8")
    bench = small_bench()
    initial_weights = [item.clone() for item in bench.model.parameters()]
    rival_times = time_rivals(bench, [1, 2], 1, few)
    assert {(item["batch"], item["who"]) for item in rival_times} == {
        (batch, rival)
        for batch in (1, 2)
        for rival in ("ours, dense", "ours, m = 0.11", "eager", "fp8")
    }
    assert all(map(torch.equal, initial_weights, bench.model.parameters()))
    rival_times = time_rivals(bench, [1], 1, few, refuses)
    assert rival_times[-1] == {"who": "fp8", "why": "RuntimeError: no such kernel"}
    assert [item["who"] for item in rival_times[:-1]] == ["ours, dense", "ours, m = 0.11", "eager"]


def test_a_rival_answers_all_tokens_of_the_step() -> None:
    bench = small_bench()
    model, inputs = rival_of(bench, "eager"), inputs_of(bench, 2)
    answer = answer_of(model, inputs)
    assert answer.shape == (2, 256, bench.config["out_channels"] or bench.config["in_channels"])
    assert bool(answer.isfinite().all())


def test_the_command_writes_the_page_of_the_machine(tmp_path: Path) -> None:
    """It was the page of whole edits."""
    report = {"hardware": "x", "command": "y", "date": "z", "torch": "2"}
    write_page(report, tmp_path / "run.json")
    expected = (tmp_path / "run.md").read_text(encoding="utf-8")
    file = tmp_path / "again.json"
    file.write_text(json.dumps(report))
    assert command.main(["--machine", "--page", "--json", str(file)]) == 0
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert page.replace("again", "run") == expected


def test_a_rival_that_cannot_run_has_a_reason_on_the_page(tmp_path: Path) -> None:
    report = {
        "hardware": "x", "command": "y", "date": "z", "torch": "2",
        "rivals": [{"who": "fp8", "why": "no such kernel"}],
    }  # fmt: skip
    write_page(report, tmp_path / "run.json")
    page = (tmp_path / "run.md").read_text(encoding="utf-8")
    assert "| – | fp8 | none: no such kernel |" in page
