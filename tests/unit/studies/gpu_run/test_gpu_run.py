"""The run for a GPU machine: its parts on a CPU, its limits, its page, and what travels."""

from __future__ import annotations

import json
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.edits.edit import production_edits
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_engine.families.specs import load_spec
from maskserve_studies.gpu_run import bundle, command
from maskserve_studies.gpu_run.page import write_page
from maskserve_studies.gpu_run.parts import FIRST, HIT
from maskserve_studies.gpu_run.random_model import write_random_model
from maskserve_studies.gpu_run.run import Run, StepTimeout, time_limit
from maskserve_studies.gpu_run.sides import Rival, poisson, static_batches

ABOUT = {"command": "c", "hardware": "h", "date": "d", "torch": "2", "on_gpu": False}


def test_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """Without Triton and compilers, which the slow test has."""
    file = tmp_path / "results.json"
    plan = replace(
        command.TINY,
        fill=replace(command.TINY.fill, steps=(4,)),
        rivals={"a": ("as it is", "crop and stitch"), "b": ("as it is",), "c": ()},
        triton=False,
        at_once=(1,),
        arrivals=3,
    )
    flags = ["--tiny", "--json", str(file), "--models", str(tmp_path / "models")]
    for part in "abc":
        assert command.main([*flags, "--part", part], tiny=plan) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert list(report) == ["a", "b", "c"]
    assert not any("why" in step for part in report.values() for step in part["steps"].values())
    for part in report.values():
        assert part["command"].startswith("scripts/bench gpu_run --tiny")
        assert part["hardware"]
        assert part["date"]
        assert not part["on_gpu"]
    figures = report["a"]["steps"]["bf16, 4 steps, 1 at once"]["figures"]
    names = {FIRST, HIT, "diffusers, as it is", "diffusers, crop and stitch"}
    assert figures.keys() == names | {"times"}
    for name in names:
        assert figures[name]["edits_per_s"] > 0 < figures[name]["of_limit"]
        assert figures[name]["tflops"] > 0
    assert (
        figures["diffusers, crop and stitch"]["tflops"] < figures["diffusers, as it is"]["tflops"]
    )
    arrivals = report["b"]["steps"]["Poisson arrivals beside static batches"]["figures"]
    assert arrivals["maskserve"]["p95_s"] >= arrivals["maskserve"]["mean_s"] > 0
    rows = report["c"]["steps"]["batch sizes"]["figures"]
    assert [row["batch"] for row in rows] == [1, 1, 2, 2]
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    assert "It has not run on a GPU" in page
    assert "| maskserve, hit |" in page
    rate = figures["diffusers, as it is"]["edits_per_s"]
    assert f"| {rate:g} |" in page.split("### ")[0], "the rates of a part stand above its cases"
    assert "tflops" not in page


def test_the_plain_pipeline_stands_in_for_rivals_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_of = Rival.batch

    def batch(self: Rival, edits: list[Edit]) -> object:
        if self.form == "fp8":
            raise RuntimeError("no compiler")
        return batch_of(self, edits)

    monkeypatch.setattr(Rival, "batch", batch)
    file = tmp_path / "results.json"
    plan = replace(
        command.TINY,
        fill=replace(command.TINY.fill, steps=(4,)),
        rivals={"b": ("fp8, compiled",)},
        triton=False,
        arrivals=2,
        at_once=(1,),
    )
    assert command.main(["--tiny", "--json", str(file), "--part", "b"], tiny=plan) == 0
    steps = json.loads(file.read_text(encoding="utf-8"))["b"]["steps"]
    assert steps["before: diffusers, fp8, compiled"]["why"] == "RuntimeError: no compiler"
    assert "diffusers, as it is" in steps["int8, 4 steps, 1 at once"]["figures"]
    assert steps["Poisson arrivals beside static batches"]["figures"]["edits"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_runs_on_a_cpu_through_triton(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert command.main(["--tiny", "--json", str(file)]) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    for part in report.values():
        steps = part["steps"].items()
        failed = [name for name, step in steps if "why" in step and "compiled" not in name]
        assert failed == []  # a compiler may take all of its time
        assert "start: maskserve through Triton" in part["steps"]
        assert part["seconds"] < part["limit_s"] + 20
    assert sum(part["seconds"] for part in report.values()) < 300


def test_without_a_gpu_only_the_tiny_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        command.main(["--part", "a"])
    assert "there is no CUDA device that torch can use" in capsys.readouterr().err


def test_a_step_has_a_limit_and_the_next_one_begins(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"b": {**ABOUT, "seconds": 1.0, "steps": {}}}), encoding="utf-8")
    run = Run("a", file, ABOUT, 5.0)
    try:

        def killed() -> None:
            steps = json.loads(file.read_text(encoding="utf-8"))["a"]["steps"]
            assert steps["first"]["figures"] == {"s": 1}
            assert steps["killed"] == {"why": "the run ended during this step"}

        assert run.step("first", 1.0, lambda: {"s": 1}) == {"s": 1}
        run.step("killed", 1.0, killed)
        assert run.step("endless", 0.05, lambda: time.sleep(4)) is None
        assert run.step("broken", 1.0, lambda: 1 / 0) is None
        run.step("last", 1.0, lambda: [{"ms": 1.5}])
    finally:
        run.close()
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report.keys() == {"a", "b"}
    steps = report["a"]["steps"]
    assert steps["endless"]["why"] == "StepTimeout: it took more than 0 s"
    assert steps["broken"]["why"] == "ZeroDivisionError: division by zero"
    assert steps["last"]["figures"] == [{"ms": 1.5}]
    assert "why" not in steps["killed"]
    page = write_page(file).read_text(encoding="utf-8")
    assert "- broken: ZeroDivisionError: division by zero" in page


def test_an_outer_limit_stays_in_force() -> None:
    def outlast() -> None:
        with time_limit(0.2):
            with time_limit(5.0):
                pass
            time.sleep(2)

    with pytest.raises(StepTimeout, match="more than 0 s"):
        outlast()


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    page = write_page(tmp_path / "none.json").read_text(encoding="utf-8")
    assert "There is no number until it has." in page


def test_random_weights_are_read_by_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxFillPipeline

    monkeypatch.setattr("maskserve_studies.gpu_run.random_model._SHARD", 2**20)  # several files
    folders = [tmp_path / name for name in ("one", "other")]
    settings = {"native_resolution": 128, "max_sequence_length": 16, "num_inference_steps": 4}
    for folder in folders:
        sizes = write_random_model(DEMO_MODEL, DEMO_MODEL, folder, settings, torch.device("cpu"))
        assert sizes.keys() == {"transformer", "text_encoder", "text_encoder_2", "vae"}
    assert (folders[0] / "transformer" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    models = [FluxFillPipeline.from_pretrained(folder).transformer for folder in folders]
    of_demo = FluxFillPipeline.from_pretrained(DEMO_MODEL).transformer.state_dict()
    first, second = (model.state_dict() for model in models)
    assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in of_demo.items()}
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert load_spec(str(folders[0])).native_resolution == 128
    assert not write_random_model(DEMO_MODEL, DEMO_MODEL, folders[0], {}, torch.device("cpu"))


def test_static_batches_take_what_waits() -> None:
    edits, batches = production_edits(32, 4, 1), list[int]()

    def batch(edits: object) -> None:
        batches.append(len(edits))  # type: ignore[arg-type]
        time.sleep(0.3)

    took = static_batches(batch, edits, [0.0, 0.05, 0.05, 0.05], 2)
    assert batches == [1, 2, 1]
    assert took[0] < took[1] < took[3]

    class Side:
        def one(self, edit: object) -> None:
            time.sleep(0.05)

    assert all(seconds >= 0.05 for seconds in poisson(Side(), edits, [0.0] * 4))  # type: ignore[arg-type]


def test_no_weights_travel_and_the_archive_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("pack/code.py", "pack/tests/test_code.py", "torchao/kernel.so",
                     "pytriton/tritonserver/python_backend_stubs/3.9/stub"):  # fmt: skip
            archive.writestr(name, "x")
    packed = bundle.write_bundle(tmp_path / "gpu", [wheel])
    with tarfile.open(packed) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert not any(name.endswith(".safetensors") for name in names)
    assert {"gpu_run.sh", "scripts/bench", "site/pack/code.py", "pyproject.toml"} <= names
    assert "assets/models/flux1-fill-shapes/transformer/config.json" in names
    assert "assets/models/demo/tokenizer/tokenizer.json" in names
    assert not {"site/pack/tests/test_code.py", "site/torchao/kernel.so"} & names
    assert not any("python_backend_stubs/3.9/stub" in name for name in names)
    report = json.loads((tmp_path / "gpu" / "bundle.json").read_text(encoding="utf-8"))
    assert report["archive"] == packed.stat().st_size <= bundle.MOST
    assert f"| site/pack | {report['items']['site/pack']} |" in capsys.readouterr().out
    monkeypatch.setattr(bundle, "MOST", 1000)
    monkeypatch.setattr(bundle, "checkout_files", lambda: [Path("README.md")])
    with pytest.raises(bundle.BundleError, match=r"bytes, and 1000 may travel$"):
        bundle.write_bundle(tmp_path / "gpu", [wheel])
    assert not packed.exists()
