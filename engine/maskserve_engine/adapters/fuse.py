"""LoRAs that a worker adds to its weights once, at start (Katz §6's patch).

Every edit uses them, at no cost per step. New weights are computed in float32 and rounded once. The
folder's files are not changed, so a start without these LoRAs restores the weights bit for bit;
nothing is patched while a worker runs.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from maskserve_common.config import Config, ConfigError
from maskserve_engine.adapters.lora_file import read_lora
from maskserve_engine.stages.loader import device_of
from maskserve_engine.stages.quantise import form_in_words
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import describe_file

_log = logging.getLogger(__name__)


class FusedLora(NamedTuple):
    """One of `[model] fuse_loras`."""

    path: Path
    scale: float


def fused_loras(config: Config) -> tuple[FusedLora, ...]:
    """Return the configured LoRAs, given as FILE or FILE:SCALE.

    Raises:
        ConfigError: a scale is not a number.
    """
    return tuple([_named(text) for text in config.model.fuse_loras])


def served_form(config: Config) -> str:
    """Return everything that makes the served weights differ from the folder's, for the names of
    entries; empty if they do not.

    Raises:
        ConfigError: a file is unreadable, no LoRA, or for another model.
    """
    words = [form_in_words(config)]
    for path, scale in fused_loras(config):
        words.append(f"fused {_spec(path, config)['digest']} {scale!r}")
    return "; ".join(filter(None, words))


@torch.no_grad()
def fused(config: Config, model: nn.Module, part: str) -> nn.Module:
    """Add the configured LoRAs to a part's weights, in place.

    Args:
        config: configuration of the worker.
        model: the loaded part, not yet quantised.
        part: one of `lora_header.PARTS`; empty: none of them.

    Raises:
        ConfigError: a file is unreadable, no LoRA, or for another model.
    """
    loras = fused_loras(config) if part and device_of(config).type != "meta" else ()
    for path, scale in loras:
        _spec(path, config)
        try:
            base = BaseLayers.of_folder(config.model.path)
            layers = read_lora(path, base, config.model.path, only=(part,)).get(part, {})
            for name, (down, up) in layers.items():
                weight = _layer(model, name).weight
                change = (up.flatten(1) @ down.flatten(1)).view_as(weight).to(weight.device)
                weight.copy_(weight.float() + scale * change)
        except BadAdapter as error:
            raise _refused(path, str(error)) from error
        if layers:
            _log.info("%s x %g is fused into %d layers of %s", path.name, scale, len(layers), part)
    return model


def _named(text: str) -> FusedLora:
    path, colon, scale = text.rpartition(":")
    if not colon or os.sep in scale:
        return FusedLora(Path(text), 1.0)
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _refused(Path(path), f"{scale!r} is not a scale; use FILE or FILE:SCALE")
    return FusedLora(Path(path), value)


def _spec(path: Path, config: Config) -> dict[str, Any]:
    try:
        return describe_file(path, config.model.path)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except BadAdapter as error:
        raise _refused(path, str(error)) from error


def _layer(model: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    """Find a layer; only some versions of transformers prefix the names of text models."""
    for candidate in (name, f"text_model.{name}", name.removeprefix("text_model.")):
        try:
            module = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d):
            return module
    raise BadAdapter(f"changes {name}, which is no layer of the model")


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"[model] fuse_loras: {path} {why}")
