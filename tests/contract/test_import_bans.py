"""The light models never import torch: it would cost each process 5 CPU-seconds and 400 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
for name in sys.argv[1:]:
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("model", name)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    else:
        importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imported(models: Sequence[str], *later: str) -> set[str]:
    """Top-level packages that loading models' Python files brings in, and these modules then."""
    files = [str(file) for model in models for file in ROOT.glob(f"*/{model}/1/model.py")]
    assert len(files) == len(models)
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *files, *later],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "engine")},
    )
    return set(json.loads(result.stdout))


def test_light_models_stay_light() -> None:
    packages = imported(LIGHT)
    assert "maskserve_common" in packages
    assert packages.isdisjoint(HEAVY)


def test_a_stage_that_only_sends_on_stays_light() -> None:
    assert imported(STAGES, *SENDING_ON).isdisjoint({*HEAVY, "PIL"})


def test_others_import_the_libraries_as_they_open() -> None:
    """When nothing looks for garbage."""
    assert imported(("denoiser", "controlnet", "nodes")).isdisjoint(HEAVY)


def test_others_import_diffusers_later() -> None:
    """Else diffusers has seen the libraries before they are hidden, and asks for them in vain."""
    packages = imported(("denoiser", "encoder"), *ENGINE, OWN_STAGES)
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
