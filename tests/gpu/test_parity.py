"""Edits on the device against diffusers' own pipelines there, and against float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline
from diffusers.models.autoencoders import vae
from diffusers.pipelines.flux import pipeline_flux_fill, pipeline_flux_inpaint
from diffusers.utils.torch_utils import randn_tensor
from numpy.typing import NDArray

from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.jobs import Case, config_of, encode_case, random_case
from tests.fakes.pipelines import diffusers_latents
from tests.support.engines import edit, job, make_engine

STEPS = {"num_inference_steps": 4, "strength": 1.0, "cache": "off"}


@dataclass
class Place:
    """One tiny model at one place: diffusers' pipeline and our parts."""

    folder: Path
    device: torch.device
    dtype: str

    def latents(self, case: Case) -> NDArray[np.float32]:
        where = {"device": str(self.device), "dtype": self.dtype}
        config = config_of(self.folder, model=where)
        adapter = load_adapter(config)
        row = adapter.dense_row(encode_case(load_encoder(config), case, "it"))
        while row.step < row.steps:
            adapter.step([row], None)
        return row.result().array()

    def diffusers(self, case: Case) -> NDArray[np.float32]:
        classes = {"tiny-fill": FluxFillPipeline, "tiny-inpaint": FluxInpaintPipeline}
        pipeline: Any = (
            classes[self.folder.name]
            .from_pretrained(self.folder, torch_dtype=getattr(torch, self.dtype))
            .to(self.device)
        )
        pipeline.set_progress_bar_config(disable=True)
        return diffusers_latents(pipeline, case)


@pytest.fixture(params=["tiny_fill", "tiny_inpaint"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def off(result: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Relative, in the mean."""
    return float(np.abs(result - exact).mean() / np.abs(exact).mean())


@contextmanager
def drawn_in(dtype: torch.dtype) -> Iterator[None]:
    """Diffusers' noise has the numbers that it has in `dtype`: one seed gives others in each."""

    def draw(shape: Any, *, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        return randn_tensor(shape, dtype=drawn, **options).to(dtype)

    drawn = dtype
    with pytest.MonkeyPatch.context() as patch:
        for module in (vae, pipeline_flux_fill, pipeline_flux_inpaint):
            patch.setattr(module, "randn_tensor", draw)
        yield


@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_as_near_to_float32_as_diffusers_own(
    folder: Path, device: torch.device, seed: int
) -> None:
    case = random_case(np.random.default_rng(seed), **STEPS)
    with drawn_in(torch.bfloat16):
        exact = Place(folder, torch.device("cpu"), "float32").diffusers(case)
    place = Place(folder, device, "bfloat16")
    diffusers_error, engine_error = (
        off(place.diffusers(case), exact),
        off(place.latents(case), exact),
    )
    assert 0 < diffusers_error < 0.1, "the tiny model is good enough to tell"
    assert engine_error <= 1.5 * diffusers_error


def test_float32_agrees_with_diffusers(folder: Path, device: torch.device) -> None:
    case = random_case(np.random.default_rng(5), **STEPS)
    place = Place(folder, device, "float32")
    assert off(place.latents(case), place.diffusers(case)) < 1e-3


def test_cached_edits_come_out_as_on_the_cpu(tiny_fill: Path, device: torch.device) -> None:
    """Primed, hit and loaded there: the whole engine, in float32."""
    results = []
    for where in (torch.device("cpu"), device):
        encoder = load_encoder(config_of(tiny_fill))
        engine = make_engine(tiny_fill, encoder, model={"device": str(where), "dtype": "float32"})
        final = edit(engine, job(encoder, 7, "it", cache="require"))
        engine.close(5.0)
        assert final.meta["cache"] == "hit"
        assert final.meta["kinds"].get("kv", 0) > 0
        results.append(final.latents)
    assert off(results[1], results[0]) < 1e-3
