"""Specs of model families are those of diffusers' own pipelines and of the folders."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
from diffusers import AutoencoderKL
from msgspec import structs

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config import CacheConfig, Config, ConfigError, EngineConfig
from maskserve_common.contracts.semantics import FILL, INPAINT
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.joyimage import spec as joyimage
from maskserve_engine.families.longcat import spec as longcat
from maskserve_engine.families.registry import FAMILIES as ENGINE_FAMILIES
from maskserve_engine.families.specs import FAMILIES, check_widths, load_spec
from maskserve_engine.families.unet import spec as unet
from maskserve_engine.families.unserved import UNSERVED
from maskserve_engine.families.z_image import spec as z_image
from maskserve_engine.spec.model_spec import (
    EditDefaults,
    promised_fidelity,
    refresh_stride,
    refreshes_by_error,
    text_shares,
)


def defaults_of(pipeline: str) -> EditDefaults:
    parameters = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    return EditDefaults(
        parameters["num_inference_steps"].default, parameters["guidance_scale"].default
    )


@pytest.mark.parametrize(
    ("pipeline", "defaults"),
    [
        ("FluxFillPipeline", flux.DEFAULTS[FILL]),
        ("FluxInpaintPipeline", flux.DEFAULTS[INPAINT]),
        ("StableDiffusionInpaintPipeline", unet.DEFAULTS),
        ("StableDiffusionXLInpaintPipeline", unet.DEFAULTS),
        ("ZImageInpaintPipeline", z_image.DEFAULTS),
        ("JoyImageEditPipeline", joyimage.DEFAULTS),
        ("LongCatImagePipeline", longcat.DEFAULTS),
        ("LongCatImageEditPipeline", longcat.DEFAULTS),
    ],
)
def test_defaults_are_those_of_the_pipeline(pipeline: str, defaults: EditDefaults) -> None:
    assert defaults_of(pipeline) == defaults


def test_every_pipeline_is_one_of_diffusers_and_belongs_to_one_family() -> None:
    names = [name for family in FAMILIES.values() for name in family.PIPELINES]
    assert len(set(names)) == len(names)
    assert all(hasattr(diffusers, name) for name in names)
    assert set(FAMILIES) == set(ENGINE_FAMILIES)


@pytest.mark.parametrize(
    "pipeline",
    [
        *UNSERVED,
        "QwenImageControlNetPipeline",
        "QwenImageControlNetInpaintPipeline",
        "ZImageOmniPipeline",
        "ZImageControlNetPipeline",
        "ZImageControlNetInpaintPipeline",
    ],
)
def test_pipelines_beside_those_that_are_served_are_refused(pipeline: str, tmp_path: Path) -> None:
    assert hasattr(diffusers, pipeline)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), "utf-8")
    with pytest.raises(ConfigError, match=f"{pipeline} is not served; served: ") as error:
        load_spec(tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(UNSERVED.get(pipeline, "(docs/models.md)"))


def changed(folder: Path, to: Path, part: str, **values: Any) -> Path:
    """A copy of a folder, one JSON of which says something else."""
    model_copy = Path(shutil.copytree(folder, to / "model"))
    path = model_copy / part
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return model_copy


@pytest.mark.parametrize(("embedded", "steps", "guidance"), [(True, 28, 7.0), (False, 4, 0.0)])
def test_a_flux_base_model_has_the_inpaint_pipelines_defaults_and_schnell_its_four_steps(
    tiny_inpaint: Path, tmp_path: Path, embedded: bool, steps: int, guidance: float
) -> None:
    folder = changed(tiny_inpaint, tmp_path, "transformer/config.json", guidance_embeds=embedded)
    spec = load_spec(folder)
    assert (spec.steps_default(0), spec.guidance_default(0.0)) == (steps, guidance)
    assert (spec.steps_default(9), spec.guidance_default(2.5)) == (9, 2.5)


def test_the_latent_space_is_the_vaes(tiny_fill: Path, tiny_unets: dict[str, Path]) -> None:
    for folder in (tiny_fill, *tiny_unets.values()):
        vae, space = AutoencoderKL.from_pretrained(folder / "vae"), load_spec(folder).latents
        config = vae.config
        assert space.scale == (config.scaling_factor,)
        assert space.shift == (config.shift_factor or 0.0,)
        assert space.channels == config.latent_channels
        assert space.pixels == 2 ** (len(config.block_out_channels) - 1)


@pytest.mark.parametrize(
    ("folder", "template"),
    [("flux1-fill-shapes", 3 / 28), ("sdxl-shapes", 1.0), ("qwen-image-edit-shapes", 1.0)],
)
def test_text_is_left_out_where_rows_leave_it_out(folder: str, template: float) -> None:
    """Not where none stands among the tokens, nor where a template has most of it."""
    spec = load_spec(CHECKOUT / "assets" / "models" / folder)
    shares = text_shares(Config(cache=CacheConfig(own_anchors=0.45)), spec, 28, shared=False)
    assert shares.template == template
    assert (shares.lookahead > 0) is (template < 1.0)


def test_first_edits_of_unmeasured_models_refresh_by_their_errors() -> None:
    """Klein's too. Others' do where an edit asks for it, and none where places are configured."""
    for folder in sorted((CHECKOUT / "assets" / "models").glob("*-shapes")):
        spec = load_spec(folder)
        is_open = spec.refresh.stride == 0.0 or spec.refresh.by_error
        for fidelity in (-1.0, 0.0, 33.0):
            config = Config(cache=CacheConfig(fidelity=fidelity))
            expected = fidelity if fidelity >= 0 else 40.0
            assert promised_fidelity(config, spec) == expected * is_open
            assert promised_fidelity(config, spec, 25.0) == 25.0
        for own_anchors in (0.0, 0.3):
            config = Config(cache=CacheConfig(own_anchors=own_anchors))
            assert not refreshes_by_error(config, spec)
            assert promised_fidelity(config, spec, 25.0) <= 100.0 * own_anchors
        together = Config(engine=EngineConfig(devices=2, policy="rounds"))
        assert promised_fidelity(together, spec, 25.0) == 0.0
        assert refresh_stride(together, spec) == (spec.refresh.stride or 0.0)


@pytest.mark.parametrize("key", ["entry_format", "own_format"])
def test_int4_is_refused_at_start_of_a_width_that_it_does_not_divide(
    tiny_fill: Path, key: str
) -> None:
    """Keys and values have a scale for each 32 numbers of a token."""
    spec = load_spec(tiny_fill)
    narrow = replace(spec, denoiser={**spec.denoiser, "num_attention_heads": 3,
                                      "attention_head_dim": 8})  # fmt: skip
    fits = {"entry_format": "int8", "own_format": "int8"}
    check_widths(with_cache(**fits), narrow)
    with pytest.raises(ConfigError, match=rf"\[cache\] {key}: int4 .* have 24; use int8"):
        check_widths(with_cache(**{**fits, key: "int4"}), narrow)
    check_widths(with_cache(**{**fits, key: "int4"}), spec)
    check_widths(with_cache(enabled=False), narrow)


def test_int4_is_refused_at_start_of_such_feature_maps(tiny_unets: dict[str, Path]) -> None:
    spec = load_spec(tiny_unets["sdxl-base"])
    channels = [48, *spec.denoiser["block_out_channels"][1:]]
    odd = replace(spec, denoiser={**spec.denoiser, "block_out_channels": channels})
    with pytest.raises(ConfigError, match="have 48"):
        check_widths(Config(), odd)


def with_cache(**cache: Any) -> Config:
    plain = Config()
    return structs.replace(plain, cache=structs.replace(plain.cache, **cache))
