"""Train the demo UNet beside the demo model and write it as a diffusers folder.

Stages, each skipped when its result lies in the work folder: the VAE's decoder, the drawn
samples, the UNet (resumes from its checkpoint). Then export.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionInpaintPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import AttnProcessor
from diffusers.utils import logging
from transformers import CLIPTextModel, CLIPTokenizer

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL, DEMO_UNET
from maskserve_studies.training import data
from maskserve_studies.training.export import export
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.transformer import optimisers
from maskserve_studies.training.unet import (
    TEXT_LENGTH,
    build_sampler,
    build_unet,
    loss_of,
    narrow_vae,
)
from maskserve_studies.training.unet_data import Sampler, encode_prompts
from maskserve_studies.training.vae import train_decoder

GUIDANCE: Final = 2.5
_LATENTS_PER_BATCH: Final = 12_288
_WINDOWS: Final[tuple[int | None, ...]] = (8, 11, None)  # tokens a side; None = whole picture
_MIX: Final = (  # windows' shares of batches, from this progress on
    (0.0, (0.9, 0.1, 0.0)),
    (0.4, (0.6, 0.3, 0.1)),
    (0.7, (0.3, 0.3, 0.4)),
    (0.9, (0.1, 0.2, 0.7)),  # GroupNorm reads the whole picture, so training needs whole pictures
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--demo", type=Path, default=DEMO_MODEL, help="the demo model's folder")
    add("--work", type=Path, default=CHECKOUT / ".cache/demo-unet-train", help="work folder")
    add("--out", type=Path, default=DEMO_UNET, help="folder to export to")
    add("--scenes", type=int, default=10_000, help="scenes to draw, with three wishes each")
    add("--vae-minutes", type=float, default=5, help="training time of the VAE's decoder")
    add("--minutes", type=float, default=60, help="CPU minutes of the UNet's training in all")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--export-only", action="store_true", help="export the latest checkpoint and stop")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    wide = AutoencoderKL.from_pretrained(args.demo / "vae").eval()
    narrow = _vae(args, wide)
    tokenizer = CLIPTokenizer.from_pretrained(args.demo / "tokenizer", model_max_length=TEXT_LENGTH)
    encoder = CLIPTextModel.from_pretrained(args.demo / "text_encoder").eval()
    torch.manual_seed(0)
    unet, sampler = build_unet(), build_sampler()
    checkpoint = args.work / "unet.pt"
    if not args.export_only:
        folder = args.work / "data"
        data.write_part(wide, folder, "plain", (128, 128), args.scenes, 0)
        samples = Sampler(
            folder, wide, narrow.config.scaling_factor, encode_prompts(tokenizer, encoder), 1
        )
        train(unet, sampler, samples, checkpoint, 60 * args.minutes, args.rate)
    state = torch.load(checkpoint, weights_only=True)
    unet.load_state_dict(state["ema"])
    pipe = StableDiffusionInpaintPipeline(
        vae=narrow,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=sampler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    export(pipe, args.out, TEXT_LENGTH, guidance_scale=GUIDANCE)
    print(f"exported to {args.out} after {state['samples']} samples")
    return 0


def train(
    model: UNet2DConditionModel,
    sampler: DDIMScheduler,
    data: Sampler,
    checkpoint: Path,
    seconds: float,
    rate: float,
) -> None:
    """Train `model` in place: small windows first, whole pictures last.

    Args:
        model: to train.
        sampler: its noise schedule.
        data: source of batches.
        checkpoint: file of the checkpoint; an existing one is resumed.
        seconds: CPU time of this process in all, with resumed runs.
        rate: peak learning rate.
    """
    rng = np.random.default_rng(int(time.time()))
    generator = torch.Generator().manual_seed(int(time.time()))
    model.train()
    # PyTorch's fused attention is slow backwards on CPUs; plain matrix products are not.
    model.set_attn_processor(AttnProcessor())

    def make_step(step: int, progress: float) -> Step:
        shares = next(mix for begin, mix in reversed(_MIX) if progress >= begin)
        window = _WINDOWS[int(rng.choice(len(_WINDOWS), p=shares))]
        side = 32 if window is None else 2 * window
        batch = data.draw(_LATENTS_PER_BATCH // side**2, window)
        loss = loss_of(model, batch, sampler, generator)
        return Step(loss, len(batch.clean), loss.item())

    opts = optimisers(model, rate)
    Training("unet", model, opts, seconds, rate, 100, averaged=model, checkpoint=checkpoint).run(
        make_step
    )


def _vae(args: argparse.Namespace, wide: AutoencoderKL) -> AutoencoderKL:
    folder = args.work / "vae"
    if not (folder / "config.json").exists():
        narrow = narrow_vae(wide)
        train_decoder(narrow, folder, args.vae_minutes * 60)
    return AutoencoderKL.from_pretrained(folder).eval()
