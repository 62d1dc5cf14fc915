"""The committed demo edit model is a plain diffusers folder that loads and is served offline."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import Flux2KleinInpaintPipeline
from PIL import Image

from maskserve_benchmarks.checkout import DEMO_EDIT
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages.latents import to_model
from maskserve_studies.demo_model.reference_edits import MAX_LENGTH, named_edits
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case


def test_the_folder_is_small_and_names_no_place_of_its_making() -> None:
    files = [f for f in DEMO_EDIT.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 25_000_000
    assert not [f for f in files if f.suffix == ".json" and "_name_or_path" in f.read_text()]


def test_it_is_a_distilled_klein_with_its_source_as_reference() -> None:
    spec = load_spec(DEMO_EDIT)
    assert (spec.family, spec.guidance, spec.native_resolution) == ("flux2", "none", 128)


def test_the_engine_and_diffusers_make_the_same_edit() -> None:
    (edit,) = named_edits(1)
    config = config_of(DEMO_EDIT, model={"outside_noise": "edit"})
    adapter = load_adapter(config)
    mask = mask_for_model(edit.mask * np.uint8(255), adapter.spec)
    settings = EditSettings(num_inference_steps=4, mask_ring=0)
    case = Case(edit.source, mask, edit.prompt, settings, 3)
    row = adapter.dense_row(encode_case(load_encoder(config), case, "one"))
    while row.step < row.steps:
        adapter.step([row], None)
    pipeline: Any = Flux2KleinInpaintPipeline.from_pretrained(DEMO_EDIT)
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(
        prompt=edit.prompt,
        image=Image.fromarray(edit.source),
        mask_image=Image.fromarray(mask),
        num_inference_steps=4,
        strength=1.0,
        generator=torch.Generator("cpu").manual_seed(3),
        max_sequence_length=MAX_LENGTH,
        output_type="latent",
    ).images
    expected = to_model(latents, adapter.spec.latents)[0].numpy()
    assert np.abs(row.result().array() - expected).max() <= 1e-3
