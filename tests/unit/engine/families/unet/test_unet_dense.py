"""Dense UNet rows against diffusers' own pipelines, alone and in any mix (design §4, §8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.rows import UnetRow
from tests.fakes.jobs import Case, config_of, encode_case, tolerance, unet_case
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_unet import EACH_SORT, samplers

pytestmark = pytest.mark.spread("model")


class Model:
    """One tiny model: diffusers' pipeline and our adapter over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import StableDiffusionInpaintPipeline, StableDiffusionXLInpaintPipeline

        xl = (folder / "text_encoder_2").exists()
        cls = StableDiffusionXLInpaintPipeline if xl else StableDiffusionInpaintPipeline
        self.pipeline: Any = cls.from_pretrained(folder, **({} if xl else {"safety_checker": None}))
        self.pipeline.set_progress_bar_config(disable=True)
        self.default = self.pipeline.scheduler
        self.encoder = load_encoder(config_of(folder))
        adapter = load_adapter(config_of(folder))
        assert isinstance(adapter, UnetAdapter)
        self.adapter = adapter

    def use(self, sampler: Any) -> None:
        """Have both step with `sampler`."""
        self.pipeline.scheduler = sampler
        old = self.adapter
        self.adapter = UnetAdapter(
            old.spec,
            old.model,
            sampler,
            exact_vae=old.exact_vae,
        )

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] latents of the diffusers pipeline."""
        latents: Any = diffusers_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            output_type="latent",
        )  # fmt: skip
        answer: NDArray[np.float32] = latents[0].numpy()
        return answer

    def row(self, case: Case, name: str = "r") -> UnetRow:
        return self.adapter.dense_row(encode_case(self.encoder, case, name))

    def alone(self, case: Case) -> NDArray[np.float32]:
        row = self.row(case)
        while row.step < row.steps:
            self.adapter.step([row], None)
        return row.result().array()

    def check(self, case: Case) -> None:
        expected = self.oracle(case)
        assert np.abs(self.alone(case) - expected).max() <= tolerance(expected)


@pytest.fixture(scope="module", params=EACH_SORT)
def model(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Model:
    return Model(tiny_unets[request.param])


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize(("strength", "guidance"), [(1.0, 1.0), (1.0, 7.5), (0.6, 7.5), (0.3, 1.0)])
def test_a_dense_row_equals_the_pipeline(
    model: Model, name: str, strength: float, guidance: float
) -> None:
    model.use(samplers()[name])
    rng = np.random.default_rng([len(name), int(10 * strength), int(guidance)])
    model.check(unet_case(rng, cache="off", strength=strength, guidance_scale=guidance))


@pytest.mark.parametrize("negative", ["", "x"])
def test_a_negative_prompt_matters_and_an_empty_one_is_the_pipelines_default(
    model: Model, negative: str
) -> None:
    model.use(samplers()["ddim"])
    asked = {"num_inference_steps": 3, "strength": 1.0, "guidance_scale": 5.0}
    model.check(unet_case(np.random.default_rng(9), cache="off", negative_prompt=negative, **asked))


def test_rows_that_join_and_leave_at_any_step_do_not_change_one_another(model: Model) -> None:
    model.use(samplers()["dpm2m"])  # it remembers the step before
    rng = np.random.default_rng(100)
    first = unet_case(rng, cache="off")
    cases = [
        replace(
            unet_case(rng, cache="off"),
            pixels=first.pixels,
            mask=np.roll(first.mask, 3 * i, axis=1),
        )
        for i in range(5)
    ]
    waiting = [model.row(case, str(i)) for i, case in enumerate(cases)]
    running: list[Any] = []
    done: dict[str, NDArray[np.float32]] = {}
    while waiting or running:
        if waiting:
            running.append(waiting.pop(0))
        rng.shuffle(running)
        model.adapter.step(running, None)
        done |= {row.request_id: row.result().array() for row in running if row.step == row.steps}
        running = [row for row in running if row.step < row.steps]
    for number, case in enumerate(cases):
        expected = model.oracle(case)
        assert np.abs(done[str(number)] - expected).max() <= tolerance(expected)


def test_the_estimate_of_the_last_step_is_near_the_result(model: Model) -> None:
    """DDIM's last step goes nearly to the image that the model expects."""
    model.use(samplers()["ddim"])
    case = unet_case(
        np.random.default_rng(4), num_inference_steps=50, strength=1.0, guidance_scale=1.0
    )
    row = model.row(case)
    while row.step < row.steps:
        model.adapter.step([row], None)
    inside = np.abs(row.estimate().array() - row.result().array())[:, case.mask[::4, ::4] > 0]
    assert inside.mean() < 0.1 * np.abs(row.result().array()).mean() + 0.05
