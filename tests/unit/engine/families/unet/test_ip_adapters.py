"""UNet rows with IP-Adapters against diffusers' own pipelines, alone and in any mix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from maskserve_common.contracts.request import EditKind
from maskserve_engine.adapters import ip_adapter
from maskserve_engine.adapters.ip_adapter import IpAdapterEncoder
from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.picture_tokens import picture_keys_of
from maskserve_engine.families.unet import adapter as unet_adapter
from tests.fakes.control_nets import random_unet_net
from tests.fakes.ip_adapters import IpForm, load_into
from tests.fakes.jobs import Case, tolerance, unet_case, without_mask
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_edit, whole_picture
from tests.fakes.tiny_unet import EACH_SORT
from tests.support.cached_rows import (
    Primed,
    assert_equal,
    check_all_active,
    check_mixed_batch,
)
from tests.support.draws import fresh_rng
from tests.support.family_cases import unet_pipeline
from tests.support.ip_models import LORA, IpModel, Pixels, picture_of

pytestmark = pytest.mark.spread("model")

FORMS: tuple[IpForm, ...] = ("plain", "plus")


class Model(IpModel):
    def oracle(self, case: Case, picture: Pixels, name: str, scale: float) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline of the edit's kind."""
        import diffusers

        pipeline: Any = unet_pipeline(self.folder)
        if case.kind != "inpaint":
            plain = type(pipeline).__name__.removesuffix("InpaintPipeline")
            kind = "Img2ImgPipeline" if case.kind == "edit" else "Pipeline"
            pipeline = getattr(diffusers, plain + kind).from_pipe(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        load_into(pipeline, self.ip_folder / f"{name}.safetensors", scale)
        images = {"ip_adapter_image": Image.fromarray(picture)}
        if case.kind != "inpaint":
            return np.asarray(whole_picture(pipeline, case, **images)[0].numpy())
        args = case.pixels, case.mask, case.prompt, case.settings, case.seed
        latents = diffusers_edit(pipeline, *args, output_type="latent", **images)
        return np.asarray(latents[0].numpy())


@pytest.fixture(scope="module", params=EACH_SORT)
def model(
    request: pytest.FixtureRequest,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Model:
    return Model(tiny_unets[request.param], tmp_path_factory.mktemp("ip"))


@pytest.fixture(scope="module")
def make_model(
    tiny_unets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Model]:
    return lambda name: Model(tiny_unets[name], tmp_path_factory.mktemp("ip"))


def edit(rng: np.random.Generator, **settings: Any) -> Case:
    """A random edit whose mask is whole latents, as a base model's grows to."""
    case = unet_case(rng, **settings)
    mask = np.zeros_like(case.mask)
    mask[8:24, 8:24] = 255
    return replace(case, mask=mask)


@pytest.mark.each_value
@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("form", FORMS)
def test_a_dense_row_equals_the_pipeline(model: Model, form: IpForm, guidance: float) -> None:
    rng = fresh_rng()
    case = edit(rng, num_inference_steps=5, strength=1.0, guidance_scale=guidance)
    picture, scale = picture_of(rng), float(rng.uniform(0.4, 1.2))
    expected = model.oracle(case, picture, form, scale)
    latents = model.alone(model.job(case, picture, form, scale))
    assert_equal(latents, expected)
    for other in (
        model.job(case),
        model.job(case, picture_of(rng), form, scale),
        model.job(case, picture, form, -scale),
    ):
        assert np.abs(model.alone(other) - expected).max() > 10 * tolerance(expected)


@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize("base", ["sd-base", pytest.param("sdxl-base", marks=pytest.mark.slow)])
def test_a_row_without_a_mask_equals_the_pipeline(
    make_model: Callable[[str], Model], base: str, kind: EditKind
) -> None:
    rng, model = fresh_rng(), make_model(base)
    strength = 0.7 if kind == "edit" else 1.0
    case = edit(rng, num_inference_steps=6, strength=strength, guidance_scale=7.5)
    case, picture = without_mask(case, kind), picture_of(rng)
    expected = model.oracle(case, picture, "plain", 0.8)
    assert_equal(model.alone(model.job(case, picture, "plain", 0.8)), expected)


def test_a_picture_a_lora_and_a_controlnet_together_equal_the_pipeline(
    model: Model, tmp_path: Path
) -> None:
    """Alone, and in a batch with edits that have none, or some, of them."""
    import diffusers

    rng, lora = fresh_rng(), tmp_path / "lora.safetensors"
    case = edit(rng, num_inference_steps=4, strength=1.0, guidance_scale=5.0)
    picture, hint = picture_of(rng), rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
    plain = type(unet_pipeline(model.folder)).__name__.removesuffix("InpaintPipeline")
    parts = {} if "XL" in plain else {"safety_checker": None}
    pipeline: Any = getattr(diffusers, f"{plain}ControlNetInpaintPipeline").from_pretrained(
        model.folder, controlnet=random_unet_net(model.adapter.model, 1), **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    write(lora, of_model(pipeline.unet, 3, "unet.{}.lora_A.weight"))
    pipeline.load_lora_weights(str(lora), adapter_name="x")
    pipeline.set_adapters("x", LORA)
    load_into(pipeline, model.ip_folder / "plus.safetensors", 0.7)
    inputs = {
        "control_image": Image.fromarray(hint),
        "controlnet_conditioning_scale": 0.8,
        "ip_adapter_image": Image.fromarray(picture),
    }
    args = case.pixels, case.mask, case.prompt, case.settings, case.seed
    latents = diffusers_edit(pipeline, *args, output_type="latent", **inputs)
    expected = np.asarray(latents[0].numpy())

    controls = (ControlInput("net", hint, 0.8),)
    plain_job, adapted = model.job(case), model.job(case, picture, "plus", 0.7)
    nets = {"net": model.adapter.control_net(pipeline.controlnet)}
    model.check_together(adapted, plain_job, controls, lora, nets, expected)


@pytest.mark.parametrize("rival", ["scale ignored", "tokens beside the text"])
def test_a_rival_differs_from_the_pipeline(
    make_model: Callable[[str], Model], rival: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison sees a scale that is ignored, and one attention over text and picture."""
    rng, model = fresh_rng(), make_model("sd-base")
    case = edit(rng, num_inference_steps=4, strength=1.0, guidance_scale=1.0)
    picture = picture_of(rng)
    expected = model.oracle(case, picture, "plain", 0.5)
    if rival == "scale ignored":
        monkeypatch.setattr(
            unet_adapter,
            "picture_keys_of",
            lambda packed, widths, scale: picture_keys_of(packed, widths, 1.0),
        )
        job = model.job(case, picture, "plain", 0.5)
    else:
        tokens = lambda adapter, embeds: {"tokens": adapter.projection(embeds)[0].numpy()}  # noqa: E731
        monkeypatch.setattr(ip_adapter, "_keys_of", tokens)
        arrays = model.job(case, picture, "plain", 0.5).conditioning
        text = np.concatenate([arrays["prompt_embeds"], 0.5 * arrays["tokens"]])
        job = replace(model.job(case), conditioning={"prompt_embeds": text})
    assert np.abs(model.alone(job) - expected).max() > 10 * tolerance(expected)


def test_a_scale_of_0_is_as_without_bit_for_bit(model: Model) -> None:
    rng = fresh_rng()
    case = edit(rng, num_inference_steps=3, strength=1.0)
    without = model.alone(model.job(case))
    assert np.array_equal(model.alone(model.job(case, picture_of(rng), "plus", 0.0)), without)


def test_a_cached_row_that_computes_all_tokens_equals_the_dense_row(model: Model) -> None:
    rng = fresh_rng()
    job = model.job(edit(rng, num_inference_steps=4, strength=1.0), picture_of(rng), "plus", 0.9)
    check_all_active(model.replay, model.encoder, job, "dense", "project", "kv")


@pytest.mark.parametrize("kind", ["project", "kv"])
def test_rows_with_and_without_pictures_do_not_change_each_other(model: Model, kind: str) -> None:
    rng = fresh_rng()
    first = edit(rng, num_inference_steps=4, strength=1.0)
    jobs = []
    for number in range(6):
        case = edit(rng, num_inference_steps=4, strength=1.0, guidance_scale=[1.0, 7.5][number % 2])
        size = first.pixels.shape
        case = replace(
            case,
            pixels=rng.integers(0, 256, size, dtype=np.uint8),
            mask=first.mask,
        )
        form, picture = FORMS[number % 4 // 2], picture_of(rng) if number % 3 else None
        jobs.append(model.job(case, picture, form, float(rng.uniform(0.3, 1.2))))
    primed = [Primed(model.adapter, model.encoder, job) for job in jobs]
    check_mixed_batch(model.replay, jobs, primed, kind)


def test_a_picture_is_encoded_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = fresh_rng()
    case, picture = edit(rng), picture_of(rng)
    encoded, real = list[str](), IpAdapterEncoder.encode

    def encode(self: IpAdapterEncoder, file: Any, pixels: Pixels) -> Any:
        encoded.append(file.name)
        return real(self, file, pixels)

    monkeypatch.setattr(IpAdapterEncoder, "encode", encode)
    for form in ("plain", "plain", "plus", "plain"):
        model.job(case, picture, form)
    assert encoded == ["plain", "plus"]
