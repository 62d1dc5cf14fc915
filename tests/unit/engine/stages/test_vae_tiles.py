"""Large pictures through the VAE in tiles: diffusers' own, with the same option."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.families.registry import load_adapter, load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.fitting.memory import image_bytes
from maskserve_engine.spec.model_spec import one_scale
from maskserve_engine.stages.vae import in_tiles, is_tiled
from tests.fakes.jobs import Case, config_of, encode_case
from tests.fakes.pipelines import diffusers_edit
from tests.support.draws import fresh_rng

NATIVE = 128
"""Native side of the model here; its VAE's tiles have 64 pixels a side."""


def tiled(folder: Path, **stages: Any) -> Any:
    return config_of(
        folder,
        model={"native_resolution": NATIVE, "outside_noise": "edit"},
        stages={"vae_tiles": "on", **stages},
    )


def test_latents_and_pixels_are_the_vaes_own_in_tiles(tiny_fill: Path) -> None:
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(tiny_fill / "vae")
    vae.to(memory_format=torch.channels_last)  # as ours lies: sums are then rounded alike
    vae.enable_tiling()
    decoder, encoder = load_decoder(tiled(tiny_fill)), load_encoder(tiled(tiny_fill))
    whole = load_decoder(config_of(tiny_fill))
    rng = fresh_rng()
    for size in ((16, 16), (32, 24), (9, 27)):
        latents = rng.standard_normal((4, *size), dtype=np.float32)
        with torch.inference_mode():
            space = decoder.latents
            x = torch.from_numpy(latents)[None] / space.scale[0] + space.shift[0]
            image = (vae.decode(x)[0][0] * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0)
        expected = (image.numpy() * 255).round().astype(np.uint8)
        text = decoder.decode(latents)
        assert np.array_equal(text, expected)
        assert is_tiled(decoder.vae, size, space) == (max(size) > 16)
        assert decoder.takes_pieces(size) == (max(size) <= 16)
        assert np.array_equal(text, whole.decode(latents)) == (max(size) <= 16)

        pixels = rng.integers(0, 256, (4 * size[0], 4 * size[1], 3), dtype=np.uint8)
        with torch.inference_mode():
            image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
            moments = vae.encode(image / 255.0 * 2.0 - 1.0).latent_dist.parameters[0]
        template = encoder.template(pixels)
        assert np.abs(template.moments - moments.numpy()).max() < 1e-5
        assert (template.sums is None) == (max(size) > 16)


def test_edits_are_the_pipelines_with_tiling(tiny_fill: Path) -> None:
    from diffusers import FluxFillPipeline

    pipeline: Any = FluxFillPipeline.from_pretrained(tiny_fill)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling()
    rng = fresh_rng()
    pixels = rng.integers(0, 256, (NATIVE, NATIVE - 32, 3), dtype=np.uint8)
    mask = np.zeros(pixels.shape[:2], np.uint8)
    mask[30:100, 20:70] = 255
    settings = EditSettings(num_inference_steps=2, guidance_scale=3.0, mask_ring=0)
    case = Case(pixels, mask, "a red star", settings, 5)
    config = tiled(tiny_fill)
    encoder, adapter = load_encoder(config), load_adapter(config)
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    text = load_decoder(config).decode(row.result().array())
    of_pipeline = diffusers_edit(
        pipeline, pixels, mask, case.prompt, settings, case.seed, max_sequence_length=16
    )[0]
    expected = np.asarray(of_pipeline).astype(int)
    assert np.abs(text.astype(int) - expected).max() <= 1


@pytest.mark.parametrize(
    ("setting", "native", "expected"),
    [
        ("auto", 1024, False),
        ("auto", 1536, False),
        ("auto", 2048, True),
        ("off", 2048, False),
        ("on", 64, True),
    ],
)
def test_by_default_it_goes_by_size(
    tiny_fill: Path, setting: str, native: int, expected: bool
) -> None:
    model = {"native_resolution": native}
    config = config_of(tiny_fill, model=model, stages={"vae_tiles": setting})
    assert in_tiles(config, load_spec(tiny_fill, native)) is expected


def test_memory_is_a_tiles_and_not_the_pictures(tiny_fill: Path, tmp_path: Path) -> None:
    counts = []
    for native in (1024, 2048, 4096):
        folder = tmp_path / str(native)
        shutil.copytree(tiny_fill / "vae", folder / "vae")
        about = folder / "vae" / "config.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "sample_size": 1024}))
        spec = replace(load_spec(tiny_fill, native), latents=one_scale(folder))
        for stage in ("encoder", "decoder"):
            of = [
                image_bytes(
                    config_of(folder, stages={"vae_tiles": name}),
                    stage,  # type: ignore[arg-type]
                    spec,
                )
                for name in ("off", "on")
            ]
            counts.append(of[1] / of[0])
    assert counts[4] < counts[2] < 0.75 < 1.0 < counts[0] < 1.5
    assert counts[5] < counts[3] < 0.9
