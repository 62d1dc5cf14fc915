"""The light models never import torch: it would cost each process 5 CPU-seconds and 400 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = ("preprocess", "postprocess", "edit", "edit_stream", "control")
STAGES = ("encoder", "decoder")
OWN_STAGES = "maskserve_triton.stage_models"
"""Imported by stages that run in the worker itself."""
ENGINE = ("maskserve_engine.start.assembly", "maskserve_triton.denoiser")
"""Imported by the denoiser as it opens."""
SENDING_ON = ("maskserve_triton.forwarded_stages", "maskserve_engine.stages.revision")
"""Imported by stages that send their work on to a service."""
HEAVY = ("torch", "diffusers", "transformers", "scipy")

# Runs in a process of its own: this one has imported all sorts of things.
PROBE = """
import importlib.util, json, sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
spec = importlib.util.spec_from_file_location("model", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imported(model: str, *later: str) -> set[str]:
    """Top-level packages that loading a model's Python file brings in, and these modules then."""
    [file] = ROOT.glob(f"*/{model}/1/model.py")
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(file), *later],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "engine")},
    )
    return set(json.loads(result.stdout))


@pytest.mark.parametrize("model", LIGHT)
def test_light_models_stay_light(model: str) -> None:
    packages = imported(model)
    assert "maskserve_common" in packages
    assert packages.isdisjoint(HEAVY)


@pytest.mark.parametrize("model", STAGES)
def test_a_stage_that_only_sends_on_stays_light(model: str) -> None:
    assert imported(model, *SENDING_ON).isdisjoint({*HEAVY, "PIL"})


@pytest.mark.parametrize("model", ["denoiser", "controlnet", "nodes"])
def test_others_import_the_libraries_as_they_open(model: str) -> None:
    """When nothing looks for garbage."""
    assert imported(model).isdisjoint(HEAVY)


@pytest.mark.parametrize(("model", "later"), [("denoiser", ENGINE), ("encoder", (OWN_STAGES,))])
def test_others_import_diffusers_later(model: str, later: tuple[str, ...]) -> None:
    """Else diffusers has seen the libraries before they are hidden, and asks for them in vain."""
    packages = imported(model, *later)
    assert "torch" in packages
    assert "diffusers" not in packages


def test_only_models_import_tritons_python_api() -> None:
    sources = [
        path
        for folder in ("engine", "router", "client", "benchmarks", "studies", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 20
    guilty = [
        path
        for path in sources
        if any(
            line.strip().startswith(("import triton_python_backend", "from triton_python_backend"))
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]
    assert guilty == []


def test_models_are_thin() -> None:
    for path in (ROOT / "model_repository").glob("*/1/model.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path
