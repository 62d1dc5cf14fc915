"""The committed demo model is a plain diffusers folder that loads and edits offline."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline
from PIL import Image

from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_studies.demo_model.edit_classes import edits_of
from maskserve_studies.demo_model.evaluation import run_edits, verdicts_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets/models/demo"
CALL = tomllib.loads((MODEL / "maskserve.toml").read_text())["model"]


@pytest.fixture(scope="module")
def pipe():
    pipe = FluxFillPipeline.from_pretrained(MODEL, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_folder_is_small():
    assert sum(f.stat().st_size for f in MODEL.rglob("*") if f.is_file()) <= 25_000_000


def test_its_shape_is_what_the_server_expects(pipe):
    assert pipe.vae_scale_factor == 4
    channels = pipe.vae.config.latent_channels
    config = pipe.transformer.config
    assert config.in_channels == 8 * channels + 4 * pipe.vae_scale_factor**2
    assert config.out_channels == 4 * channels
    assert not config.guidance_embeds
    assert CALL == {"max_sequence_length": 16, "native_resolution": 128, "num_inference_steps": 20}


@pytest.mark.parametrize(
    "prompt",
    ["", "a red star", "Ein rötlicher Stern", "赤い星", "🟥⭐ \x00\n", "x" * 500, "star " * 300],
)
def test_any_text_encodes(pipe, prompt):
    states, pooled, _ = pipe.encode_prompt(
        prompt=prompt, prompt_2=None, max_sequence_length=CALL["max_sequence_length"]
    )
    assert states.shape[:2] == (1, 16)
    assert torch.isfinite(states).all()
    assert torch.isfinite(pooled).all()


@pytest.mark.parametrize("size", [(128, 128), (152, 104)])
def test_one_edit_runs(pipe, size):
    edit = held_out_edits(1)[0]
    image = pipe(
        prompt=edit.prompt,
        image=Image.fromarray(edit.source).resize(size),
        mask_image=Image.fromarray(edit.mask).resize(size),
        width=size[0],
        height=size[1],
        num_inference_steps=2,
        max_sequence_length=CALL["max_sequence_length"],
        generator=torch.Generator("cpu").manual_seed(0),
        output_type="np",
    ).images[0]
    assert image.shape == (size[1], size[0], 3)
    assert np.isfinite(image).all()


def test_it_finds_the_colour_of_a_far_object(pipe):
    """A guess of one of eight colours is right three times in four in 1 of 100 trials."""
    edits = edits_of("same_colour", 4)
    pictures = run_edits(pipe, edits, 8, 4)
    verdicts = verdicts_of(edits, pictures)
    right = [v.colour == e.colour for e, v in zip(edits, verdicts, strict=True)]
    assert sum(right) >= 3
