"""A base model made of the demo UNet, to measure Inpaint semantics on a UNet.

An inpainting model that is told that all of its picture is masked paints from the prompt alone: it
is a base model. What its extra channels add is then the same for every edit and nearly the same at
every position, so it goes into the first convolution's bias, and the channels are left out.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor


def write_base(inpainting: Path, folder: Path) -> Path:
    """Write the base model of an inpainting UNet's folder; the folder.

    Args:
        inpainting: a folder of Stable Diffusion inpainting.
        folder: to be made.
    """
    shutil.copytree(inpainting, folder, ignore=shutil.ignore_patterns("unet"))
    unet = UNet2DConditionModel.from_pretrained(inpainting / "unet")
    vae = AutoencoderKL.from_pretrained(inpainting / "vae")
    channels = int(unet.config["out_channels"])
    with torch.inference_mode():
        condition = _all_masked(vae, int(unet.config["sample_size"]))
        conv = unet.conv_in
        added = conv.weight[:, channels:].sum(dim=(2, 3)) @ condition
        base = UNet2DConditionModel.from_config({**unet.config, "in_channels": channels})
        weights = unet.state_dict()
        weights["conv_in.weight"] = conv.weight[:, :channels].clone()
        weights["conv_in.bias"] = conv.bias + added
        base.load_state_dict(weights)
    base.save_pretrained(folder / "unet")
    return folder


def _all_masked(vae: AutoencoderKL, side: int) -> Tensor:
    """[1 + C] mask and latents of a masked picture that is blank, at the picture's middle."""
    pixels = side * 2 ** (len(vae.config["block_out_channels"]) - 1)
    blank = vae.encode(torch.zeros(1, 3, pixels, pixels)).latent_dist.mode()
    latents = blank[0, :, side // 2, side // 2] * vae.config["scaling_factor"]
    return torch.cat((torch.ones(1), latents))
