"""How long an edit may go without its LoRA: the largest K whose pictures agree, from 1 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_engine.requests.loras import read_profiles
from maskserve_studies.profile_lora.command import (
    Profiler,
    Run,
    draw,
    keep,
    likeness,
    profile_lora,
    steps_by_cosine,
)
from tests.fakes.loras import LAYERS, lora, write

STEPS = 4


def drawn(path: Path, strength: float) -> Path:
    tensors = {name: array * np.float32(strength) for name, array in lora(LAYERS, rank=4).items()}
    write(path, tensors)
    return path


@pytest.fixture(scope="module")
def profiler() -> Profiler:
    return Profiler(DEMO_MODEL, STEPS)


def test_what_changes_nothing_may_come_last_and_what_changes_all_is_waited_for(
    profiler: Profiler, tmp_path: Path
) -> None:
    edits = held_out_edits(2)
    faint = profile_lora(profiler, drawn(tmp_path / "faint.safetensors", 1e-4), edits)
    strong = profile_lora(profiler, drawn(tmp_path / "strong.safetensors", 0.5), edits)
    sigmas = [sigma for sigma, _ in profiler.adapter.sigmas(profiler.jobs(edits)[0])]
    assert faint["k"] == STEPS - 1
    assert faint["sigma"] == sigmas[STEPS - 1]
    assert sum(sigma > faint["sigma"] for sigma in sigmas) == faint["k"]  # as the engine counts
    assert strong["k"] == 0
    assert strong["sigma"] is None


def test_what_is_written_is_what_the_engine_reads(tmp_path: Path) -> None:
    profiles: dict[str, dict[str, Any]] = {
        "a": {"k": 2, "sigma": 0.7},
        "b": {"k": 0, "sigma": None},
    }
    out = tmp_path / "profiles.json"
    out.write_text('{"b": 0.5, "other": 0.9}')
    keep(profiles, out)
    assert read_profiles(str(out)) == {"other": 0.9, "a": 0.7}


def test_the_paper_s_rule_counts_steps_that_are_alike() -> None:
    vector = np.array([1.0, 0.0], np.float32)
    near, far = np.array([1.0, 0.1], np.float32), np.array([1.0, 0.5], np.float32)
    reference = Run([], [[vector]] * 3)
    assert steps_by_cosine(likeness(reference, Run([], [[near], [near], [far]]))) == 2
    assert steps_by_cosine(likeness(reference, Run([], [[near]] * 3))) == 3


def test_a_plot_has_a_column_for_each_lora(tmp_path: Path) -> None:
    profile = {
        "steps": 3, "k": 1, "katz_k": 3, "sigmas": [1.0, 0.7, 0.3], "cosines": [1.0, 0.999, 0.99],
        "psnr_in_mask": {1: {"mean": 45.0, "worst": 33.0}, 2: {"mean": 35.0, "worst": 28.0}},
    }  # fmt: skip
    sizes = []
    for names in (["a"], ["a", "b"]):
        draw(dict.fromkeys(names, profile), tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as picture:
            sizes.append(picture.size)
    assert sizes[1] == (2 * sizes[0][0], sizes[0][1])
