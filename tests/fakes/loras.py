"""Random LoRAs as files, made anew for each test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

WIDTH = 128
"""Width of the demo model's tokens."""
LAYERS: Mapping[str, tuple[int, int]] = {
    "transformer_blocks.0.attn.to_q": (WIDTH, WIDTH),
    "transformer_blocks.1.ff.net.2": (4 * WIDTH, WIDTH),
    "single_transformer_blocks.0.attn.to_k": (WIDTH, WIDTH),
}
"""Some of the demo model's layers, with their input and output widths."""
OTHER_MODEL: Mapping[str, tuple[int, int]] = {"down_blocks.0.attentions.0.proj_in": (8, 8)}
"""A layer that the demo model lacks."""


def lora(
    layers: Mapping[str, tuple[int, int]] = LAYERS,
    rank: int = 4,
    prefix: str = "transformer.",
    dtype: Any = np.float32,
    forms: tuple[str, str] = ("lora_A", "lora_B"),
    seed: int | None = None,
) -> Arrays:
    """Tensors of a LoRA, with names in PEFT's form or another (`forms`)."""
    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    for name, (inputs, outputs) in layers.items():
        for form, shape in zip(forms, ((rank, inputs), (outputs, rank)), strict=True):
            drawn = rng.standard_normal(shape).astype(dtype)
            tensors[f"{prefix}{name}.{form}.weight"] = drawn
    return tensors


def write(path: Path, tensors: Arrays | None = None, **metadata: str) -> bytes:
    """Write a file of these tensors (default: a LoRA of the demo model) and return its bytes."""
    raw: bytes = safetensors.numpy.save(lora() if tensors is None else tensors, metadata or None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return raw


def of_model(
    net: Any, seed: int, form: str = "transformer.{}.lora_A.weight"
) -> dict[str, NDArray[np.float32]]:
    """A random LoRA of every layer of a model that multiplies, as diffusers lists them.

    Args:
        net: diffusers' module.
        seed: of the numbers.
        form: of the first factor's name: lora_A, or lora_down with its alpha beside it. Names
            behind a prefix with an underscore have underscores.
    """
    from torch import nn

    rng, tensors = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for name, layer in net.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d) or ".lora_" in name:
            continue
        out, *inner = layer.weight.shape
        name = name.removesuffix(".base_layer")  # left by an earlier LoRA of the module
        flat = form.partition("{}")[0].endswith("_")
        first = form.format(name.replace(".", "_") if flat else name)
        second = first.replace("lora_A", "lora_B").replace("lora_down", "lora_up")
        down = rng.standard_normal((2, *inner)) / np.prod(inner)
        tensors[first] = down.astype("f4")
        tensors[second] = rng.standard_normal((out, 2, *[1] * (len(inner) - 1))).astype("f4")
        if "lora_down" in form:
            tensors[first.replace("lora_down.weight", "alpha")] = np.array(1.0, "f4")
    return tensors
