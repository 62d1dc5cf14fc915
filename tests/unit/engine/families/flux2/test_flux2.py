"""FLUX.2 klein against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_core.imaging.preprocess import mask_for_model
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.stages.latents import to_model
from maskserve_harness.benchmarks.replay import Replay
from tests.fakes.jobs import Case, config_of, encode_case, random_case
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.support import cached_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        config = config_of(folder, model={"outside_noise": "edit", "max_sequence_length": 48})
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit; a base model's is guided every other time."""
        rng = np.random.default_rng(seed)
        if self.adapter.facts.guidance == "none":
            settings = {"guidance_scale": None, **settings}
        elif seed % 2:
            scale = float(rng.uniform(1.5, 6.0))
            settings = {"guidance_scale": scale, "negative_prompt": "", **settings}
        else:
            settings = {"guidance_scale": 1.0, **settings}
        case = random_case(rng, **settings)
        return replace(case, mask=mask_for_model(case.mask, self.adapter.facts))

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline, as the transformer has them."""
        latents = self.pipeline(
            prompt=case.prompt,
            image=Image.fromarray(case.pixels),
            mask_image=Image.fromarray(case.mask),
            num_inference_steps=case.settings.num_inference_steps,
            strength=case.settings.strength,
            guidance_scale=case.settings.guidance_scale or 4.0,
            generator=torch.Generator("cpu").manual_seed(case.seed),
            max_sequence_length=48,
            output_type="latent",
        ).images
        return to_model(latents, self.adapter.facts.latents)[0].numpy()


@pytest.fixture(scope="module", params=["distilled", "base"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models") / request.param
    return Model(build_tiny_flux2(folder, distilled=request.param == "distilled"))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths and guidance of their own, in one batch that rows leave."""
    cases = [model.case(seed) for seed in range(6)]
    rows: list[Any] = [
        model.adapter.dense_row(encode_case(model.encoder, case, str(i)))
        for i, case in enumerate(cases)
    ]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)
    cached_rows.check_step_without_anchor(model.replay, model.encoder, jobs[0])


def test_a_context_that_is_computed_makes_a_cached_row_dense(model: Model) -> None:
    job = model.job(1, num_inference_steps=3, strength=1.0)
    cached_rows.check_all_active(model.replay, model.encoder, job, "dense")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row: Any = cached(model.replay, job, Primed(model.adapter, model.encoder, job))
    dense = result(model.replay, model.adapter.dense_row(job))
    assert np.abs(result(model.replay, row, "kv") - dense).max() > 1e-3
