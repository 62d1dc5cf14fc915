"""Weights of transformer blocks in fewer bits, by torchao.

Only the products of transformer blocks change: they hold nearly all of a model's weights. What
leads in and out, embeddings and convolutions stay as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from maskserve_core.config import Config, ConfigError
from maskserve_engine.stages.loader import device_of, load_part

_BLOCKS = "transformer_blocks."
_FP8_CAPABILITY = (8, 9)
"""From here on a GPU multiplies numbers of 8 bits in floating point."""


def load_denoiser(config: Config, name: str, cls: Any) -> Any:
    """As `load_part`, in the form that `[model] weights` names. Layer by layer: the device never
    holds the weights in their first form.

    Raises:
        ConfigError: the part cannot be read, is quantised already, the form's library is missing,
            or blocks of that form are to be compiled.
    """
    form = config.model.weights
    if form == "bf16":
        return load_part(config, name, cls)
    if config.model.compile:
        raise ConfigError(f'[model] compile: not with weights = "{form}"; use "bf16"')
    try:
        importlib.import_module("torchao")
    except ImportError as error:
        raise ConfigError(
            f'[model] weights: "{form}" needs torchao: pip install "maskserve[quantised]"'
        ) from error
    model = load_part(config, name, cls, device=torch.device("cpu"))
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f'[model] weights: {name} is quantised already; use "bf16"')
    quantise(model, form, device_of(config))
    return model.to(device_of(config))


def quantise(model: nn.Module, form: str, device: torch.device) -> None:
    """Replace the products of transformer blocks in place.

    Args:
        model: its layers are torch's own.
        form: `int8`: one scale per output, products in the model's dtype; `fp8`: likewise, and
            where the device multiplies FP8 each token has a scale, too.
        device: where the replaced products go to.
    """
    layers = [
        layer
        for path, layer in model.named_modules()
        if _BLOCKS in path and type(layer) is nn.Linear
    ]
    for layer in layers:
        _by_torchao(layer.to(device), form)


def form_in_words(config: Config) -> str:
    """For the names of entries: all that decides what the served products compute; empty for
    weights as the folder has them.
    """
    form = config.model.weights
    if form == "bf16":
        return ""
    return f"{form} {_torchao_config(form, device_of(config))}"


def _by_torchao(layer: nn.Linear, form: str) -> None:
    from torchao.quantization import quantize_

    quantize_(layer, _torchao_config(form, layer.weight.device))


def _torchao_config(form: str, device: torch.device) -> Any:
    from torchao import quantization

    if form == "int8":
        return quantization.Int8WeightOnlyConfig()
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY:
        return quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=quantization.PerRow()
        )
    return quantization.Float8WeightOnlyConfig()
