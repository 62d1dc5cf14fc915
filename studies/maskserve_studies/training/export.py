"""Assemble the trained parts into one diffusers folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, FluxFillPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from maskserve_studies.training.transformer import build_scheduler

STEPS = 20


def assemble(
    vae: AutoencoderKL, text_folder: Path, transformer: FluxTransformer2DModel
) -> FluxFillPipeline:
    """A pipeline of the given parts and the text parts under `text_folder`."""
    return FluxFillPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=CLIPTextModel.from_pretrained(text_folder / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(text_folder / "tokenizer"),
        text_encoder_2=T5EncoderModel.from_pretrained(text_folder / "text_encoder_2"),
        tokenizer_2=T5TokenizerFast.from_pretrained(text_folder / "tokenizer_2"),
        transformer=transformer,
    )


def export(
    pipe: DiffusionPipeline,
    folder: Path,
    max_sequence_length: int,
    *,
    halved: tuple[str, ...] = (),
    steps: int = STEPS,
    **more: float,
) -> None:
    """Write `pipe` as safetensors, and beside it the server's call arguments, including `steps` and
    `more`. The parts in `halved` are stored as bf16, all others as fp32.
    """
    pipe.to(torch.float32)
    for part in halved:
        getattr(pipe, part).to(torch.bfloat16)
    pipe.save_pretrained(folder, safe_serialization=True)
    for config in folder.glob("*/config.json"):  # removes paths of the build
        parts = json.loads(config.read_text())
        parts.pop("_name_or_path", None)
        config.write_text(json.dumps(parts, indent=2, sort_keys=True) + "\n")
    (folder / "maskserve.toml").write_text(
        "[model]\n"
        f"max_sequence_length = {max_sequence_length}\n"
        f"native_resolution = {int(pipe.vae.config.sample_size)}\n"
        f"num_inference_steps = {steps}\n" + "".join(f"{k} = {v}\n" for k, v in more.items())
    )
