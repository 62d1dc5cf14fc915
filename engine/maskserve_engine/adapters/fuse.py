"""LoRAs that a worker fuses into its weights once, at start (Katz §6's patch).

Every edit uses them, at no cost per step. New weights are computed in float32 and rounded once. No
weights change while a worker runs, and the model's files never do, so a start without these LoRAs
has the original weights bit for bit.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maskserve_common.config import Config
from maskserve_engine.adapters.lora_file import LayerChange, changes_of
from maskserve_engine.adapters.oft import OftUpdate
from maskserve_engine.spec.fused_loras import fuse_error, fused_loras
from maskserve_engine.stages.loader import device_of
from maskserve_engine.stages.quantise import form_in_words
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.store import adapter_file, describe_file

_log = logging.getLogger(__name__)


def served_form(config: Config) -> str:
    """Return in words how the served weights differ from the folder's, for the names of entries;
    empty if they do not differ.

    Raises:
        ConfigError: a file cannot be read, is no LoRA, or is for another model.
    """
    words = [form_in_words(config)]
    for path, scale in fused_loras(config):
        words.append(f"fused {_description(path, config)['digest']} {scale!r}")
    return "; ".join(filter(None, words))


@torch.no_grad()
def fuse_configured_loras(config: Config, model: nn.Module, part: str) -> nn.Module:
    """Add the configured LoRAs to the weights of a part of the model, in place, and return it.

    Args:
        config: configuration of the worker.
        model: the loaded part, before it is quantised.
        part: name of the part, of `lora_header.PARTS`; empty: no LoRA changes it.

    Raises:
        ConfigError: a file cannot be read, is no LoRA, or is for another model.
    """
    loras = fused_loras(config) if part and device_of(config).type != "meta" else ()
    for path, scale in loras:
        _description(path, config)  # checks the file
        try:
            base, model_path = BaseLayers.of_folder(config.model.path), config.model.path
            count = 0
            file = adapter_file(path)
            for change in changes_of(file, base, model_path, (part,), fused=True):
                weight = _layer(model, change.layer).weight
                weight.copy_(_new_weight(weight.float(), change, scale))
                count += 1
        except BadAdapter as error:
            raise fuse_error(path, str(error)) from error
        if count:
            _log.info("%s x %g is fused into %d layers of %s", path.name, scale, count, part)
    return model


def _new_weight(weight: torch.Tensor, change: LayerChange, scale: float) -> torch.Tensor:
    """Return a layer's new weight in float32.

    A DoRA or an OFT is fused by its scale's share of the way from the weight to its own at scale 1,
    as LyCORIS and ComfyUI do with a DoRA: (1 - s) W + s m (W + B A) / |W + B A|, with the length of
    each row.
    """
    if isinstance(change.update, OftUpdate):
        return torch.lerp(weight, change.update.applied(weight), scale)
    down, up = change.update
    update = (up.flatten(1) @ down.flatten(1)).view_as(weight).to(weight.device)
    if change.magnitude is None:
        return weight + scale * update
    rows = (weight + update).flatten(1)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    magnitude = change.magnitude.to(weight.device)[:, None]
    return torch.lerp(weight, (rows * (magnitude / lengths)).view_as(weight), scale)


def _description(path: Path, config: Config) -> dict[str, Any]:
    try:
        return describe_file(path, config.model.path, fused=True)
    except OSError as error:
        raise fuse_error(path, f"cannot be read: {error.strerror}") from error
    except BadAdapter as error:
        raise fuse_error(path, str(error)) from error


def _layer(model: nn.Module, name: str) -> nn.Linear | nn.Conv2d:
    """Return the layer of this name; only some versions of transformers prefix names with
    `text_model.`.
    """
    for candidate in (name, f"text_model.{name}", name.removeprefix("text_model.")):
        try:
            module = model.get_submodule(candidate)
        except AttributeError:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d):
            return module
    raise BadAdapter(f"changes {name}, which is not a layer of the model")
