"""Latents between VAE and denoiser, of any class of VAE: what its config.json says, and diffusers'
own calls and scales on tiny models.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage
from torch.utils.flop_counter import FlopCounterMode

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.spec.latents import LatentSpace, latent_space
from maskserve_engine.spec.model_spec import ModelSpec, one_scale
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.stages.latents import Posterior, to_model, to_vae
from maskserve_engine.stages.vae import images_of, is_tiled, load_vae, moments_of
from tests.fakes.jobs import config_of
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.tiny_qwen_image import VAE
from tests.support.cached_rows import assert_equal
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.each_value


class Vaes(Encoder):
    """An encoder of pictures alone."""

    text_encoders = {}  # noqa: RUF012
    text_models = {}  # noqa: RUF012

    def encode_prompts(self, prompts: Any) -> list[Any]:
        raise NotImplementedError


def kl() -> Any:
    """With a mean and deviation of each channel, as Stable Diffusion XL's refiners could have."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        latents_mean=[0.3, -0.2, 0.1, 0.7],
        latents_std=[1.5, 0.5, 2.0, 1.2],
        scaling_factor=0.6,
    )


def qwen_image() -> Any:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.3, -0.2, 0.1, 0.7],
        latents_std=[1.5, 0.5, 2.0, 1.2],
    )


def served(vae: Any, folder: Path, **stages: Any) -> tuple[Any, ModelSpec]:
    """As a worker has it from its folder."""
    vae.save_pretrained(folder / "vae")
    space = latent_space(read_json(folder / "vae" / "config.json"))
    spec = replace(FILL_SPEC, latents=space)
    return load_vae(config_of(folder, stages=stages), spec), spec


@pytest.mark.parametrize("tiles", ["off", "on"])
@pytest.mark.parametrize("make", [kl, qwen_image])
def test_pictures_go_in_and_out_as_diffusers_has_it(make: Any, tiles: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    requires_grad = make().eval().requires_grad_(False)
    if make is kl:
        requires_grad.to(
            memory_format=torch.channels_last
        )  # as ours lies: sums are then rounded alike
    if tiles == "on":
        requires_grad.enable_tiling()
    vae, spec = served(requires_grad, tmp_path, vae_tiles=tiles)
    space, frames = spec.latents, isinstance(requires_grad, AutoencoderKLQwenImage)
    assert type(vae) is type(requires_grad)
    assert (space.pixels, space.channels, space.frames) == (2, 4, frames)
    side = space.tile + 16
    assert is_tiled(vae, (side // 2, 8), space) == (tiles == "on")
    assert not is_tiled(vae, (space.tile // 2, 8), space)

    rng = fresh_rng()
    pixels = rng.integers(0, 256, (side, 16, 3), dtype=np.uint8)
    moments = Vaes(spec, vae).moments(pixels)
    image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None] / 255.0 * 2.0 - 1.0
    with torch.inference_mode():
        posterior = requires_grad.encode(image[:, :, None] if frames else image).latent_dist
    mean = posterior.mode()[0, :, 0] if frames else posterior.mode()[0]
    if frames:  # ours computes no frames of zeros
        assert_equal(moments[:4], mean.numpy())
    else:
        assert np.array_equal(moments[:4], mean.numpy())

    # StableDiffusionXLImg2ImgPipeline and QwenImageImg2ImgPipeline.
    means, stds = (
        torch.tensor(requires_grad.config[f"latents_{n}"])[:, None, None] for n in ("mean", "std")
    )
    scale = 1.0 if frames else requires_grad.config.scaling_factor
    latents = Posterior(moments, space, torch.float32).mode()
    torch.testing.assert_close(latents, (mean - means) * scale / stds)

    standard_normal = rng.standard_normal((2, 4, side // 2, 8), dtype=np.float32)
    pictures: list[Any] = list(Decoder(vae, space).decode_all(list(standard_normal)))
    with torch.inference_mode():
        x = torch.from_numpy(standard_normal) * stds / scale + means
        images = (
            requires_grad.decode(x[:, :, None]).sample[:, :, 0]
            if frames
            else requires_grad.decode(x).sample
        )
    expected = ((images * 0.5 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 1).numpy()
    assert np.abs(np.stack(pictures) - expected).max() <= 0.51  # each rounds by itself
    naive = to_vae(torch.from_numpy(standard_normal), replace(space, shift=(0.0,), scale=(scale,)))
    assert (naive - x).abs().max() > 0.1  # one scale for all would be seen


def test_pieces_are_of_the_vaes_that_they_know(tmp_path: Path) -> None:
    for make, known in ((kl, True), (qwen_image, False)):
        vae, spec = served(make(), tmp_path / str(known))
        assert Decoder(vae, spec.latents).has_pieces == known
        assert Vaes(spec, vae).has_pieces == known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_for_all_channels_rounds_as_in_the_pipelines(dtype: torch.dtype) -> None:
    space, latents = LatentSpace(8, 16, (0.1159,), (0.3611,)), torch.randn(16, 5, 6).to(dtype)
    assert torch.equal(to_model(latents, space), (latents - 0.1159) * 0.3611)
    assert torch.equal(to_vae(latents, space), latents / 0.3611 + 0.1159)


def test_numbers_may_be_those_of_patches() -> None:
    """As Flux2Pipeline scales latents, by statistics of packed channels."""
    torch.manual_seed(0)
    vae: Any = AutoencoderKLFlux2(
        block_out_channels=(8,) * 4, latent_channels=2, norm_num_groups=4, layers_per_block=1
    )
    mean, std = torch.randn(8), torch.rand(8) + 0.5
    vae.bn.running_mean.copy_(mean)
    vae.bn.running_var.copy_(std.square())
    space = LatentSpace(8, 2, tuple(mean.tolist()), tuple((1.0 / std).tolist()), patch=2)
    latents = torch.randn(3, 2, 4, 6)
    patches = latents.unflatten(3, (3, 2)).unflatten(2, (2, 2)).permute(0, 1, 3, 5, 2, 4)
    vae.bn.eps = 0.0
    scaled = vae.bn.eval()(patches.flatten(1, 3)).unflatten(1, (2, 2, 2))
    expected = scaled.permute(0, 1, 4, 2, 5, 3).reshape(latents.shape)
    torch.testing.assert_close(to_model(latents, space), expected)
    torch.testing.assert_close(to_vae(to_model(latents, space), space), latents)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """So is a VAE that diffusers' inpaint pipelines of FLUX and SD treat in two ways."""
    config = {"block_out_channels": [8, 8], "latent_channels": 4, "scaling_factor": 0.13025}
    (tmp_path / "vae").mkdir()
    file = tmp_path / "vae" / "config.json"
    file.write_text(json.dumps({**config, "latents_mean": None, "latents_std": None}))
    assert one_scale(tmp_path).scale == (0.13025,)
    file.write_text(json.dumps({**config, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}))
    with pytest.raises(ConfigError, match="latents_mean and latents_std: not served"):
        one_scale(tmp_path)
    with pytest.raises(ConfigError, match="vae: AutoencoderDC is not served; served: AutoencoderK"):
        latent_space({"_class_name": "AutoencoderDC"})
    with pytest.raises(ConfigError, match=r"vae/config.json: z_dim is missing"):
        latent_space({"_class_name": "AutoencoderKLQwenImage", "temperal_downsample": []})


@pytest.mark.parametrize("name", ["AutoencoderKLQwenImage", "AutoencoderKLWan"])
def test_a_vae_of_films_computes_one_frame_of_a_picture(name: str, tmp_path: Path) -> None:
    """As diffusers' own does, whose frames before it are zeros."""
    whole = getattr(diffusers, name)(**VAE).eval()
    whole.save_pretrained(tmp_path / "vae")
    space = latent_space(read_json(tmp_path / "vae" / "config.json"))
    cut = load_vae(config_of(tmp_path), replace(FILL_SPEC, latents=space))
    rng, flops, answers = fresh_rng(), list[int](), list[Any]()
    image = torch.from_numpy(rng.uniform(-1, 1, (1, 3, 48, 32)).astype(np.float32))
    latents = torch.from_numpy(rng.standard_normal((1, 4, 12, 8), np.float32))
    for vae in (whole, cut):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            answers.append((moments_of(vae, image, space), images_of(vae, latents, space)))
        flops.append(counter.get_total_flops())
    for one, other in zip(*answers, strict=True):
        assert_equal(one.numpy(), other.numpy())
    assert flops[1] < 0.4 * flops[0]
