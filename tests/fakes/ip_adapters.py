"""Tiny IP-Adapters with random weights, in the layout of h94's or XLabs' files, and their image
encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from maskserve_engine.spec.ip_adapters import LAYOUTS
from maskserve_engine.spec.model_spec import ModelSpec

IpForm = Literal["plain", "plus"]
SIDE, HIDDEN, PROJECTED = 32, 24, 16
_INNER, _TOKENS, _DEPTH, _HEAD = 48, 5, 4, 64
"""Width, tokens and layers of the form `plus`, and width of a head, which is fixed."""


def build_image_encoder(folder: Path, seed: int = 0) -> Path:
    """Write a CLIPVisionModelWithProjection to `folder` and return it."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = CLIPVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            projection_dim=PROJECTED,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=8,
            initializer_factor=8.0,  # so that pictures differ
        )
        CLIPVisionModelWithProjection(config).save_pretrained(folder)
    return folder


def build_ip_adapter(file: Path, spec: ModelSpec, form: str, seed: int = 0) -> Path:
    """Write an IP-Adapter of a model to `file` and return it."""
    takes = spec.ip_adapters
    assert takes is not None
    rng, layout, text = np.random.default_rng(seed), LAYOUTS[takes.layout], takes.text
    shapes = _plain(text) if form == "plain" else _plus(text)
    shapes = {f"{layout.projection}{name}": shape for name, shape in shapes.items()}
    for number, width in takes.layers:
        for part in "kv":
            weight, bias = layout.names(number, part)
            shapes[weight] = (width, text)
            if layout.biased:
                shapes[bias] = (width,)
    save_file({name: _random(rng, shape) for name, shape in shapes.items()}, file)
    return file


def load_into(pipeline: Any, file: Path, scale: float) -> None:
    """Load an IP-Adapter beside its `image_encoder` into a pipeline of diffusers."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"shortest_edge": SIDE}, {"height": SIDE, "width": SIDE}
    processor = CLIPImageProcessorPil(size=size[0], crop_size=size[1])  # type: ignore[no-untyped-call]
    pipeline.register_modules(feature_extractor=processor)
    encoder: dict[str, Any] = {}
    if hasattr(pipeline, "transformer"):
        encoder["image_encoder_pretrained_model_name_or_path"] = str(file.parent / "image_encoder")
        encoder["image_encoder_dtype"] = pipeline.dtype
    pipeline.load_ip_adapter(str(file.parent), subfolder="", weight_name=file.name, **encoder)
    pipeline.set_ip_adapter_scale(scale)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    scale = 1.0 if len(shape) == 1 else 2.0 / np.sqrt(shape[-1])
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def _plain(text: int) -> dict[str, tuple[int, ...]]:
    return {
        "proj.weight": (4 * text, PROJECTED),
        "proj.bias": (4 * text,),
        "norm.weight": (text,),
        "norm.bias": (text,),
    }


def _plus(text: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "latents": (1, _TOKENS, _INNER),
        "proj_in.weight": (_INNER, HIDDEN),
        "proj_in.bias": (_INNER,),
        "proj_out.weight": (text, _INNER),
        "proj_out.bias": (text,),
        "norm_out.weight": (text,),
        "norm_out.bias": (text,),
    }
    for layer in range(_DEPTH):
        for norm in ("0.norm1", "0.norm2", "1.0"):
            shapes |= {f"layers.{layer}.{norm}.{part}": (_INNER,) for part in ("weight", "bias")}
        shapes |= {
            f"layers.{layer}.0.to_q.weight": (2 * _HEAD, _INNER),
            f"layers.{layer}.0.to_kv.weight": (4 * _HEAD, _INNER),
            f"layers.{layer}.0.to_out.weight": (_INNER, 2 * _HEAD),
            f"layers.{layer}.1.1.weight": (4 * _INNER, _INNER),
            f"layers.{layer}.1.3.weight": (_INNER, 4 * _INNER),
        }
    return shapes
