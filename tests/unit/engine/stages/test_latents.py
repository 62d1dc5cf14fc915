"""Latents between VAE and denoiser: scaled by one number, or by one for each channel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from maskserve_core.config import ConfigError
from maskserve_core.models.facts import LatentSpace, latent_space
from maskserve_engine.stages.latents import to_model, to_vae


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_for_all_channels_rounds_as_in_the_pipelines(dtype: torch.dtype) -> None:
    space, latents = LatentSpace(8, 16, (0.1159,), (0.3611,)), torch.randn(16, 5, 6).to(dtype)
    assert torch.equal(to_model(latents, space), (latents - 0.1159) * 0.3611)
    assert torch.equal(to_vae(latents, space), latents / 0.3611 + 0.1159)


def test_numbers_per_channel_are_those_of_the_vae_that_has_them() -> None:
    """As diffusers' Qwen-Image pipeline scales latents."""
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    mean, std = (tuple(vae.config[f"latents_{name}"]) for name in ("mean", "std"))
    space = LatentSpace(8, len(mean), mean, tuple(1.0 / each for each in std))
    latents = torch.randn(2, len(mean), 5, 6)
    means, scales = torch.tensor(mean).view(-1, 1, 1), 1.0 / torch.tensor(std).view(-1, 1, 1)
    torch.testing.assert_close(to_model(latents, space), (latents - means) * scales)
    torch.testing.assert_close(to_vae(to_model(latents, space), space), latents)


def test_what_diffusers_inpaint_pipelines_treat_in_two_ways_is_refused(tmp_path: Path) -> None:
    config = {"block_out_channels": [8, 8], "latent_channels": 4, "scaling_factor": 0.13025}
    (tmp_path / "vae").mkdir()
    file = tmp_path / "vae" / "config.json"
    file.write_text(json.dumps({**config, "latents_mean": None, "latents_std": None}))
    assert latent_space(tmp_path).scale == (0.13025,)
    file.write_text(json.dumps({**config, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}))
    with pytest.raises(ConfigError, match="latents_mean and latents_std: not served"):
        latent_space(tmp_path)
