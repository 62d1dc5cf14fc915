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
"""Of the demo model's tokens."""
LAYERS: Mapping[str, tuple[int, int]] = {
    "transformer_blocks.0.attn.to_q": (WIDTH, WIDTH),
    "transformer_blocks.1.ff.net.2": (4 * WIDTH, WIDTH),
    "single_transformer_blocks.0.attn.to_k": (WIDTH, WIDTH),
}
"""Some of the demo model's layers: inputs and outputs."""
OTHER_MODEL: Mapping[str, tuple[int, int]] = {"down_blocks.0.attentions.0.proj_in": (8, 8)}
"""A layer that it has not."""


def lora(
    layers: Mapping[str, tuple[int, int]] = LAYERS,
    rank: int = 4,
    prefix: str = "transformer.",
    dtype: Any = np.float32,
    forms: tuple[str, str] = ("lora_A", "lora_B"),
    seed: int | None = None,
) -> Arrays:
    """Tensors of a LoRA, under names of PEFT's form or another (`forms`)."""
    rng = np.random.default_rng(seed)
    tensors: Arrays = {}
    for name, (inputs, outputs) in layers.items():
        for form, shape in zip(forms, ((rank, inputs), (outputs, rank)), strict=True):
            drawn = rng.standard_normal(shape).astype(dtype)
            tensors[f"{prefix}{name}.{form}.weight"] = drawn
    return tensors


def write(path: Path, tensors: Arrays | None = None, **metadata: str) -> bytes:
    """A file of these tensors, by default of a LoRA of the demo model; returns its bytes."""
    raw: bytes = safetensors.numpy.save(lora() if tensors is None else tensors, metadata or None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return raw


def of_blocks(places: Mapping[str, Any], form: str, seed: int) -> dict[str, NDArray[np.float32]]:
    """A random LoRA of every layer of a transformer's blocks.

    Args:
        places: of a family's weights, by the layer's dotted name.
        form: of the first factor's name: lora_A, or lora_down, which has its alpha beside it.
        seed: of the numbers.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, NDArray[np.float32]]()
    for name, place in places.items():
        if "transformer_blocks" not in name:
            continue
        out, inside = place.shape
        first = form.format(name)
        second = first.replace("lora_A", "lora_B").replace("lora_down", "lora_up")
        tensors[first] = (rng.standard_normal((2, inside)) / inside).astype("f4")
        tensors[second] = rng.standard_normal((out, 2)).astype("f4")
        if "lora_down" in form:
            tensors[f"{name}.alpha"] = np.array(1.0, "f4")
    return tensors
