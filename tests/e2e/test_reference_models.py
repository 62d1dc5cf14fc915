"""Models that see the source as reference, each through a Triton of its own, behind one router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_core.contracts.settings import EditSettings
from maskserve_harness.router_site import RouterSite
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import blob_mask, scene
from tests.fakes.pipelines import blended_edit, diffusers_edit
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    Pixels,
    edit_inputs,
    eventually,
    pixels,
)

SIDE, CELL = 64, 8
SOURCE = scene(SIDE, SIDE)
# Of whole tokens: others are grown to them, where the pipelines take a share.
MASK = np.kron(blob_mask(SIDE // CELL, SIDE // CELL), np.ones((CELL, CELL), np.uint8))
MODELS = ("tiny-kontext", "klein", "klein-kv")
STEPS = 4


@pytest.fixture(scope="module")
def folders(tiny_kontext: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = (build_tiny_flux2(root / MODELS[1]), build_tiny_flux2(root / MODELS[2], exact=True))
    return dict(zip(MODELS, (tiny_kontext, *made), strict=True))


@pytest.fixture(scope="module")
def router(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterSite]:
    root = tmp_path_factory.mktemp("serving")
    config = root / "worker.toml"
    config.write_text('[model]\noutside_noise = "edit"  # as the pipelines draw it\n')
    with ExitStack() as running:
        urls = []
        for folder in folders.values():
            options = ServeOptions(
                config=config, model=str(folder), base_port=free_base_port(), log_dir=root
            )
            worker = running.enter_context(Supervisor(options)).workers[0]
            urls.append(worker.grpc_url)
        site = running.enter_context(RouterSite(urls, root / "router"))
        eventually("all serve", lambda: states(site) == ["ready"] * len(MODELS))
        yield site


def states(site: RouterSite) -> list[str]:
    return [worker["state"] for worker in json.loads(site.read("/workers"))["workers"].values()]


@pytest.fixture
def grpc(router: RouterSite) -> Iterator[Grpc]:
    with closing(Grpc(router.grpc_url)) as client:
        yield client


def expected(folder: Path, settings: EditSettings) -> Pixels:
    """The pipeline's own picture."""
    from diffusers import DiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    asked: dict[str, Any] = {"max_sequence_length": 48}
    run = blended_edit if type(pipeline).__name__.endswith("KVPipeline") else diffusers_edit
    if type(pipeline).__name__.startswith("FluxKontext"):
        asked = {"max_sequence_length": 16, "_auto_resize": False}
    [image] = run(pipeline, SOURCE, MASK, "a red star", settings, 1, **asked)
    return np.asarray(image)


@pytest.mark.parametrize("name", MODELS)
def test_an_edit_is_the_pipelines_and_spares_the_outside(
    grpc: Grpc, folders: dict[str, Path], name: str
) -> None:
    asked = {"num_inference_steps": STEPS, "strength": 1.0}
    picture, meta = grpc.edit(edit_inputs(SOURCE, MASK, model=name, **asked))
    scale = 3.0 if name == MODELS[0] else 4.0  # which distilled models do not have
    found, at = pixels(picture), MASK > 0
    wanted = expected(folders[name], EditSettings(guidance_scale=scale, **asked))
    assert np.array_equal(found[~at], SOURCE[~at])
    assert np.abs(found[at].astype(int) - wanted[at]).max() <= 1
    assert (meta["model"], meta["cache"], meta["steps"]) == (name, "off", STEPS)


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_edit_computes_its_mask_and_repeats_itself(grpc: Grpc, name: str) -> None:
    """Of all defaults, steps and guidance among them."""
    asked = {"model": name, "cache": "require", "num_inference_steps": None}
    first, meta = grpc.edit(edit_inputs(SOURCE, MASK, **asked))
    again, _ = grpc.edit(edit_inputs(SOURCE, MASK, **asked))
    assert (meta["cache"], meta["steps"]) == ("hit", STEPS)
    assert meta["active_tokens"] < meta["total_tokens"] == (SIDE // CELL) ** 2
    assert np.array_equal(pixels(first), pixels(again))
    assert np.array_equal(pixels(first)[MASK == 0], SOURCE[MASK == 0])


@pytest.mark.parametrize(
    ("name", "asked", "field"),
    [
        ("klein", {"negative_prompt": "x"}, "negative_prompt"),
        ("klein-kv", {"guidance_scale": 4.0}, "guidance_scale"),
        ("klein-kv", {"first_block_threshold": 0.1}, "first_block_threshold"),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    grpc: Grpc, name: str, asked: dict[str, Any], field: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        grpc.edit(edit_inputs(SOURCE, MASK, model=name, **asked))
    assert f"[INVALID_REQUEST] SETTINGS.{field}" in refused.value.message()
