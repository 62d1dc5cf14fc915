"""Stable Diffusion models through a real Triton, against diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.settings import EditSettings
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, scene
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_unet import FACTOR
from tests.support.calls import (
    Grpc,
    InferenceServerException,
    Pixels,
    edit_inputs,
    pixels,
    plain_edit,
)

SIDE = 64
SOURCE = scene(SIDE, SIDE)
# Of whole latents: others are grown to them, where the pipeline takes the nearest pixel.
MASK = np.kron(blob_mask(SIDE // FACTOR, SIDE // FACTOR), np.ones((FACTOR,) * 2, np.uint8))
DEFAULTS: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 3.0}
ASKED: tuple[dict[str, Any], ...] = (
    {"seed": 3},
    {"seed": 4, "strength": 0.6, "num_inference_steps": 6, "guidance_scale": 7.5},
    {"seed": 5, "negative_prompt": "blue circle"},
    {"seed": 6, "guidance_scale": 1.0},
)


class Served:
    """A worker of one model and diffusers' pipeline over the same folder."""

    def __init__(self, folder: Path, client: Grpc) -> None:
        from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

        self.client = client
        if (folder / "text_encoder_2").exists():
            self.pipeline: Any = StableDiffusionXLInpaintPipeline.from_pretrained(folder)
            self.calls = 4
        else:
            self.pipeline = StableDiffusionInpaintPipeline.from_pretrained(
                folder, safety_checker=None
            )
            self.calls = 5  # PNDM: one more than it has steps
        self.pipeline.set_progress_bar_config(disable=True)

    def expected(self, options: dict[str, Any]) -> Pixels:
        settings = EditSettings(**{**DEFAULTS, **options})
        images = diffusers_edit(
            self.pipeline, SOURCE, MASK, "a red star", settings, options["seed"]
        )
        return np.asarray(images[0])


SLOW = ("sd-fill", "sd-base on two devices")
"""Rows of these are held beside the pipeline, and pairs of processes beside one, in tests/unit."""


@pytest.fixture(
    scope="module",
    params=["sdxl-base", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def served(
    request: pytest.FixtureRequest,
    unet_worker: WorkerProcess,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    name, _, devices = request.param.partition(" ")
    folder = tiny_unets[name]
    with ExitStack() as running:
        if name == "sdxl-base":
            url = unet_worker.grpc_url
        else:
            config = tmp_path_factory.mktemp("unet") / "worker.toml"
            config.write_text('[model]\noutside_noise = "edit"  # as the pipeline draws it\n')
            options = ServeOptions(
                config=config,
                model=str(folder),
                cfg_devices="cpu,cpu" if devices else "",
                base_port=free_base_port(),
                log_dir=tmp_path_factory.mktemp("unet-logs"),
            )
            url = running.enter_context(Supervisor(options)).workers[0].grpc_url
        yield Served(folder, running.enter_context(closing(Grpc(url))))


def test_edits_are_those_of_the_pipeline_and_spare_the_outside(served: Served) -> None:
    """All at once, so that guided and plain rows share a batch."""
    pending = [
        served.client.begin(edit_inputs(SOURCE, MASK, **{**DEFAULTS, **overrides}))
        for overrides in ASKED
    ]
    edit = MASK > 0
    for overrides, answer in zip(ASKED, pending, strict=True):
        image, meta = answer.wait(240)
        edited, expected = pixels(image), served.expected(overrides)
        assert np.array_equal(edited[~edit], SOURCE[~edit])
        difference = np.abs(edited[edit].astype(int) - expected[edit])
        assert difference.max() <= 1, overrides  # a level: rounding at another batch shape
        assert meta["seed"] == overrides["seed"]
    assert meta["steps"] == served.calls


def test_a_cached_edit_computes_active_tokens_only_and_repeats_itself(served: Served) -> None:
    edit_settings = {**DEFAULTS, "cache": "require", "reproducible": True}
    edited, meta = served.client.edit(plain_edit(SIDE, SIDE, **edit_settings))
    second, _ = served.client.edit(plain_edit(SIDE, SIDE, **edit_settings))
    assert meta["cache"] == "hit"
    assert meta["active_tokens"] < meta["total_tokens"]
    assert edited == second


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"true_cfg_scale": 2.0}, "SETTINGS.true_cfg_scale"),
        ({"negative_prompt": "x", "guidance_scale": 1.0}, "SETTINGS.negative_prompt"),
        ({"strength": 0.1, "num_inference_steps": 4}, "SETTINGS.strength"),
    ],
)
def test_what_the_family_cannot_do_is_refused(
    served: Served, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InferenceServerException, match=rf"\[INVALID_REQUEST\] {field}"):
        served.client.edit(plain_edit(SIDE, SIDE, **options))
