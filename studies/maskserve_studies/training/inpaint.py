"""Train a demo model with Inpaint semantics from the one with Fill semantics, for eval_quality.

A Fill model that must repaint the whole picture is a text-to-image model. The picture behind the
mask is blank and the mask is full, so these channels are the same for every token. Their part in
the embedder is a constant that its bias can hold; that is the start. Training then takes some
minutes on whole pictures and their prompts. The same works for the demo UNet (`--model
assets/models/demo-unet`). Its start is no usable model yet, because the UNet has never seen a full
mask.

    # draws the samples
    python scripts/bench train_demo_model --start assets/models/demo --minutes 0 --out /tmp/unused
    python scripts/bench train_inpaint_model --minutes 25 --out build/demo-inpaint
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FluxFillPipeline,
    FluxTransformer2DModel,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import AttnProcessor
from transformers import CLIPTextModel, CLIPTokenizer

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_studies.training import unet, unet_data
from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.data import read_part
from maskserve_studies.training.flux import TOKENS_PER_BATCH
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.sampler import Sampler, encode_prompts
from maskserve_studies.training.transformer import loss_of, optimisers

_PICTURES = 12
"""Pictures in a UNet's batch."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, help="with Fill's")
    add("--data", type=Path, default=CHECKOUT / ".cache/demo-train/data", help="drawn samples")
    add("--out", type=Path, required=True, help="folder to write")
    add("--minutes", type=float, default=25, help="CPU time")
    add("--rate", type=float, default=1e-3, help="peak learning rate")
    return parser.parse_args()


def without_channels(fill: FluxTransformer2DModel, vae: AutoencoderKL) -> FluxTransformer2DModel:
    """The text-to-image model that `fill` is when everything is masked."""
    channels = fill.config.out_channels  # channels of latents as tokens
    side = 8 * 2 ** (len(vae.config.block_out_channels) - 1)
    blank = vae.encode(torch.zeros(1, 3, side, side)).latent_dist.mode()[0, :, 2:4, 2:4]
    latents = ((blank - vae.config.shift_factor) * vae.config.scaling_factor).reshape(-1)
    full = torch.ones(fill.config.in_channels - 2 * channels)
    old = fill.x_embedder
    new = torch.nn.Linear(channels, old.out_features)
    new.weight.copy_(old.weight[:, :channels])
    new.bias.copy_(old.bias + old.weight[:, channels:] @ torch.cat((latents, full)))
    fill.x_embedder = new
    fill.register_to_config(in_channels=channels, out_channels=None)
    return fill


def train(model: FluxTransformer2DModel, sampler: Sampler, seconds: float, rate: float) -> None:
    """Train with flow matching on whole pictures for this much CPU time. The rate
    decays linearly.
    """
    generator = torch.Generator().manual_seed(1)
    model.train().requires_grad_(True)
    model.set_attn_processor(MatmulAttention())

    def take(step: int, progress: float) -> Step:
        kind = ("plain", "relations", "structures")[step % 3]
        batch = sampler.draw(TOKENS_PER_BATCH, kind, None)
        # The model has no condition, and all of the picture counts.
        batch = replace(batch, condition=batch.condition[..., :0])
        loss = loss_of(model, batch, torch.ones(batch.clean.shape[:2]), generator)
        return Step(loss, len(batch.clean), loss.item())

    Training("inpaint", model, optimisers(model, rate), seconds, rate, 30, decay=1.0).run(take)


def unet_without_channels(
    inpainting: UNet2DConditionModel, vae: AutoencoderKL
) -> UNet2DConditionModel:
    """The text-to-image model of a UNet. The constant is only approximate at the border of the
    first convolution.
    """
    channels, side = inpainting.config.out_channels, inpainting.config.sample_size
    pixels = side * 2 ** (len(vae.config.block_out_channels) - 1)
    blank = vae.encode(torch.zeros(1, 3, pixels, pixels)).latent_dist.mode()
    latents = blank[0, :, side // 2, side // 2] * vae.config.scaling_factor
    full, conv = torch.cat((torch.ones(1), latents)), inpainting.conv_in
    base = UNet2DConditionModel.from_config({**inpainting.config, "in_channels": channels})
    weights = inpainting.state_dict()
    weights["conv_in.weight"] = conv.weight[:, :channels].clone()
    weights["conv_in.bias"] = conv.bias + conv.weight[:, channels:].sum(dim=(2, 3)) @ full
    base.load_state_dict(weights)
    return base


def write_unet(args: argparse.Namespace) -> None:
    """Train a base UNet from an inpainting UNet, and write its folder."""
    wide, narrow = (
        AutoencoderKL.from_pretrained(model_folder / "vae").eval()
        for model_folder in (DEMO_MODEL, args.model)
    )
    with torch.no_grad():
        inpainting = UNet2DConditionModel.from_pretrained(args.model / "unet")
        model = unet_without_channels(inpainting, narrow)
    prompts = unet_data.encode_prompts(
        CLIPTokenizer.from_pretrained(args.model / "tokenizer", model_max_length=unet.TEXT_LENGTH),
        CLIPTextModel.from_pretrained(args.model / "text_encoder").eval(),
    )
    [folder] = args.data.glob("plain-128x128")
    samples = unet_data.Sampler(folder, wide, narrow.config.scaling_factor, prompts, 1)
    sampler = DDIMScheduler.from_pretrained(args.model / "scheduler")
    generator = torch.Generator().manual_seed(1)
    model.train().requires_grad_(True)
    model.set_attn_processor(AttnProcessor())

    def take(step: int, progress: float) -> Step:
        batch = samples.draw(_PICTURES, None)
        loss = unet.loss_of(model, batch, sampler, generator, base=True)
        return Step(loss, len(batch.clean), loss.item())

    seconds = 60 * args.minutes
    opts = optimisers(model, args.rate)
    Training("inpaint", model, opts, seconds, args.rate, 30, decay=1.0).run(take)
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("unet"))
    model.save_pretrained(args.out / "unet")


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    if (args.model / "unet").is_dir():
        write_unet(args)
        return 0
    pipe = FluxFillPipeline.from_pretrained(args.model)
    parts = [read_part(marker.parent) for marker in sorted(args.data.glob("*/done"))]
    if not parts:
        raise SystemExit(f"--data: no samples in {args.data}; train_demo_model.py draws them")
    with torch.no_grad():
        sampler = Sampler(parts, encode_prompts(pipe), seed=1)
        model = without_channels(pipe.transformer, pipe.vae)
    train(model, sampler, 60 * args.minutes, args.rate)
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("transformer"))
    index = args.out / "model_index.json"
    values = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps({**values, "_class_name": "FluxInpaintPipeline"}, indent=1) + "\n")
    model.save_pretrained(args.out / "transformer")
    return 0
