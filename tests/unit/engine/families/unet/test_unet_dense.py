"""Dense UNet rows with each sampler against diffusers' own pipelines (design §4, §8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.contracts.request import EditKind
from maskserve_engine.families.unet.adapter import UnetAdapter
from tests.fakes.jobs import Case, unet_case
from tests.fakes.tiny_unet import samplers
from tests.support.cached_rows import assert_equal, result
from tests.support.family_cases import CASES, FamilyModel

pytestmark = pytest.mark.spread("model")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * CASES[name].slow)
        for name in ("sd21-base", "sdxl-fill", "sd21-fill", "sdxl-base")
    ]
)
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


Served = Callable[[str], UnetAdapter]


@pytest.fixture
def served(model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A function that lets the pipeline step with a sampler, and returns an adapter with it."""

    def served(name: str) -> UnetAdapter:
        sampler, unet = samplers()[name], model.adapter
        assert isinstance(unet, UnetAdapter)
        monkeypatch.setattr(model.pipeline, "scheduler", sampler)
        return UnetAdapter(unet.spec, unet.model, sampler, exact_vae=unet.exact_vae)

    return served


def check(model: FamilyModel, adapter: UnetAdapter, edit: Case) -> None:
    """Check that a dense row equals the pipeline."""
    row = adapter.dense_row(model.encoded(edit))
    assert_equal(result(Replay(adapter), row), model.oracle(edit))


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize(("strength", "guidance"), [(1.0, 1.0), (1.0, 7.5), (0.6, 7.5), (0.3, 1.0)])
def test_a_dense_row_equals_the_pipeline(
    model: FamilyModel, served: Served, name: str, strength: float, guidance: float
) -> None:
    rng = np.random.default_rng([len(name), int(10 * strength), int(guidance)])
    edit = unet_case(rng, cache="off", strength=strength, guidance_scale=guidance)
    check(model, served(name), edit)


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize("base", ["sd21-base", pytest.param("sdxl-base", marks=pytest.mark.slow)])
def test_a_row_without_a_mask_equals_the_pipeline(
    family_model: Callable[[str], FamilyModel], base: str, name: str, kind: EditKind
) -> None:
    model, sampler = family_model(base), samplers()[name]
    unet = model.adapter
    assert isinstance(unet, UnetAdapter)
    adapter = UnetAdapter(unet.spec, unet.model, sampler, exact_vae=unet.exact_vae)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.pipeline, "scheduler", sampler)
        check(model, adapter, model.edit(len(name), kind))


@pytest.mark.parametrize("negative", ["", "x"])
def test_a_negative_prompt_matters_and_an_empty_one_is_the_pipelines_default(
    model: FamilyModel, served: Served, negative: str
) -> None:
    settings = {"num_inference_steps": 3, "strength": 1.0, "guidance_scale": 5.0}
    rng = np.random.default_rng(9)
    edit = unet_case(rng, cache="off", negative_prompt=negative, **settings)
    check(model, served("ddim"), edit)


def test_the_estimate_of_the_last_step_is_near_the_result(
    model: FamilyModel, served: Served
) -> None:
    """DDIM's last step goes nearly to the image that the model expects."""
    edit = unet_case(
        np.random.default_rng(4), num_inference_steps=50, strength=1.0, guidance_scale=1.0
    )
    adapter = served("ddim")
    row = adapter.dense_row(model.encoded(edit))
    latents = result(Replay(adapter), row)
    inside = np.abs(row.estimate().array() - latents)[:, edit.mask[::4, ::4] > 0]
    assert inside.mean() < 0.1 * np.abs(latents).mean() + 0.05
