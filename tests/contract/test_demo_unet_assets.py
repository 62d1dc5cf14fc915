"""The committed demo UNet is a plain diffusers folder that loads and is served offline."""

from pathlib import Path

import numpy as np
import pytest
from diffusers import StableDiffusionInpaintPipeline

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_engine.families.specs import load_spec
from tests.fakes.jobs import Case, config_of, encode_case
from tests.fakes.pipelines import diffusers_edit

MODEL: Path = DEMO_MODEL.with_name("demo-unet")


def test_the_folder_is_small_and_names_no_place_of_its_making() -> None:
    files = [f for f in MODEL.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 25_000_000
    assert not [f for f in files if f.suffix == ".json" and "_name_or_path" in f.read_text()]


def test_it_is_an_inpainting_model_of_the_unet_family() -> None:
    spec = load_spec(MODEL)
    assert (spec.family, spec.semantics.name) == ("unet", "fill")
    assert (spec.vae_scale_factor, spec.native_resolution) == (4, 128)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_engine_and_diffusers_make_the_same_edit(guidance: float) -> None:
    from maskserve_common.contracts.settings import EditSettings
    from maskserve_engine.families.registry import load_adapter, load_encoder

    (edit,) = held_out_edits(1)
    config = config_of(MODEL)
    settings = EditSettings(
        num_inference_steps=2,
        guidance_scale=guidance,
        mask_ring=0,
        negative_prompt="" if guidance > 1 else None,
    )
    case = Case(edit.source, edit.mask * np.uint8(255), edit.prompt, settings, 3)
    adapter = load_adapter(config)
    row = adapter.dense_row(encode_case(load_encoder(config), case, "one"))
    while row.step < row.steps:
        adapter.step([row], None)
    pipeline = StableDiffusionInpaintPipeline.from_pretrained(MODEL, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    expected = diffusers_edit(
        pipeline, case.pixels, case.mask, case.prompt, settings, 3, output_type="latent"
    )[0].numpy()
    assert np.abs(row.result().array() - expected).max() <= 1e-3
