"""The weight changes of a LoRA file, by diffusers and by our code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskserve_engine.adapters.lora_file import Parts, read_lora
from maskserve_engine.spec.model_index import read_model_index
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import PARTS


def deltas(parts: Parts) -> dict[str, Tensor]:
    """B A of each layer, by part and name."""
    result = {}
    for part, layers in parts.items():
        for name, (down, up) in layers.items():
            product = up.flatten(1).double() @ down.flatten(1).double()
            result[f"{part}/{name}"] = product.reshape(up.shape[0], *down.shape[1:])
    return result


def assert_same(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-5 * max(1.0, float(value.abs().max()))
        assert float((result[name] - value).abs().max()) <= bound, name


def read(path: Path, model: Path, dtype: torch.dtype = torch.float32) -> Parts:
    base = BaseLayers.of_folder(model)
    return read_lora(path, base, str(model), dtype)


def by_diffusers(path: Path, model: Path) -> dict[str, Tensor]:
    """B A of each layer in the model's own pipeline, which loads the file itself."""
    import diffusers
    from peft.tuners.lora import LoraLayer

    index = read_model_index(model)
    plain = {"safety_checker": None} if index["_class_name"].startswith("StableDiffusionIn") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe: Any = getattr(diffusers, index["_class_name"]).from_pretrained(model, **plain)
        pipe.load_lora_weights(str(path), adapter_name="x")
    parts = {"denoiser": getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)}
    parts |= {part: getattr(pipe, part, None) for part in PARTS[1:]}
    result = {}
    for part, module in parts.items():
        if isinstance(module, nn.Module):
            for name, layer in module.named_modules():
                if isinstance(layer, LoraLayer) and "x" in layer.scaling:
                    own_layer: Any = layer
                    result[f"{part}/{name}"] = own_layer.get_delta_weight("x").detach().double()
    return result
