"""A LoRA file as low-rank updates of the served model's layers, whatever wrote it.

PEFT's, diffusers' and kohya's files name the same layers in other ways. Most spellings are found
in the model itself (`BaseLayers.name_of`). Names of the models' first publishers go through
diffusers' own converters, which also divide what was one layer then and is several now.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
from torch import Tensor

from maskserve_core.adapters.base_layers import BaseLayers
from maskserve_core.adapters.lora_header import PARTS, BadAdapter, Layer, by_module
from maskserve_engine.layers.low_rank import Factors

_log = logging.getLogger(__name__)

_METADATA = "lora_adapter_metadata"


Parts = dict[str, dict[str, Factors]]
"""Updates by part (`lora_header.PARTS`) and the layer's dotted name in the model."""


def read_lora(
    path: Path,
    base: BaseLayers,
    model: str,
    dtype: torch.dtype = torch.float32,
    only: Container[str] = PARTS,
) -> Parts:
    """Read a file on the host.

    Args:
        path: a file that `lora_header.read_header` lets pass.
        base: layers of the served model.
        model: its folder.
        dtype: of the factors; alphas are multiplied in float32 before.
        only: parts that are read.

    Raises:
        BadAdapter: it is for another model, or in a form that diffusers does not know.
        OSError: the file cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            said = opened.metadata() or {}
            tensors = {
                name: opened.get_tensor(name)
                for (part, _), names in by_module(opened.keys()).items()
                for name in names
                if name and part in only
            }
    except BadAdapter:
        raise
    except safetensors.SafetensorError as error:
        raise BadAdapter(f"is no safetensors file: {error}") from error
    if not tensors:
        return {}
    scaled = _with_alphas(tensors, _Metadata(said.get(_METADATA, "")))
    parts: Parts = {}
    published: dict[tuple[str, str], Factors] = {}
    for (part, module), factors in scaled.items():
        name = base.name_of(part, module)
        if name is None:
            published[part, module] = factors
        else:
            _add(parts, base, part, name, factors)
    if published:
        for (part, module), factors in _converted(published, base.denoiser, model).items():
            name = base.name_of(part, module)
            if name is None:
                raise BadAdapter(f"is for another model: diffusers knows no layer {module[:80]}")
            _add(parts, base, part, name, factors)
    return {
        part: {name: Factors(*(x.to(dtype) for x in factors)) for name, factors in layers.items()}
        for part, layers in parts.items()
    }


def _add(parts: Parts, base: BaseLayers, part: str, name: str, factors: Factors) -> None:
    rank, inputs, *kernel = factors.down.shape
    base.check_layer(part, name, Layer(rank, inputs, factors.up.shape[0], tuple(kernel)))
    layers = parts.setdefault(part, {})
    if name in layers:
        raise BadAdapter(f"holds the matrices of {name[:80]} twice, under two spellings")
    layers[name] = factors


class _Metadata:
    """What diffusers writes beside a LoRA's weights: PEFT's configuration of each part.

    Args:
        text: JSON, with keys such as `transformer.lora_alpha`; empty: nothing was said.

    Raises:
        BadAdapter: it is none.
    """

    def __init__(self, text: str) -> None:
        try:
            self._values: dict[str, Any] = msgspec.json.decode(text, type=dict) if text else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadAdapter("has metadata that cannot be read") from error

    def scale(self, part: str, module: str, rank: int) -> float | None:
        """What B A is multiplied by; None: nothing is said.

        Raises:
            BadAdapter: what is said has another form.
        """
        for prefix in ("transformer.", "unet.") if part == "denoiser" else (f"{part}.",):
            alpha = self._values.get(f"{prefix}lora_alpha")
            if alpha is None:
                continue
            patterns = self._values.get(f"{prefix}alpha_pattern") or {}
            try:
                alpha = float(_by_pattern(patterns, module, alpha))
            except BadAdapter:
                raise
            except (TypeError, ValueError, AttributeError) as error:
                raise BadAdapter(
                    f"has metadata about {prefix}lora_alpha of another form"
                ) from error
            rooted = self._values.get(f"{prefix}use_rslora")
            return alpha / (math.sqrt(rank) if rooted else rank)
        return None


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """PEFT's rule: the value of the first pattern that the name ends with. PEFT takes regular
    expressions; files hold names, and others are refused, as matching may take for ever.
    """
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if re.fullmatch(r"[\w.]+", name) is None:
            raise BadAdapter(f"has a pattern in its metadata that is no layer's name: {name[:80]}")
        if module == name or (name is pattern and module.endswith(f".{name}")):
            return value
    return otherwise


def _with_alphas(
    tensors: Mapping[str, Tensor], metadata: _Metadata
) -> dict[tuple[str, str], Factors]:
    """Float32 factors by part and module, with every scale in B."""
    scaled = {}
    for (part, module), names in by_module(tensors).items():
        down, up = tensors[names.down].float(), tensors[names.up].float()
        rank = down.shape[0]
        scale = metadata.scale(part, module, rank)
        if names.alpha:
            if scale is not None:
                raise BadAdapter(f"says the alpha of {module[:80]} twice")
            scale = float(tensors[names.alpha]) / rank
        if scale is not None and not math.isfinite(scale):
            raise BadAdapter(f"has an alpha for {module[:80]} that is no finite number")
        scaled[part, module] = Factors(down, up if scale is None else up * scale)
    return scaled


def _converted(
    factors: Mapping[tuple[str, str], Factors], denoiser: str, model: str
) -> dict[tuple[str, str], Factors]:
    """Updates under the names of diffusers, from those of the model's first publisher."""
    from diffusers.loaders import FluxLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin

    given: dict[str, Tensor] = {}
    for (_, module), (down, up) in factors.items():
        if ".processor." in module:  # x-flux
            given[f"{module}.down.weight"], given[f"{module}.up.weight"] = down, up
        else:
            flat = f"lora_unet_{module.replace('.', '_')}"
            given[f"{flat}.lora_down.weight"], given[f"{flat}.lora_up.weight"] = down, up
    try:
        if denoiser == "transformer":
            named = FluxLoraLoaderMixin.lora_state_dict(given)
        else:
            from diffusers import UNet2DConditionModel

            config = UNet2DConditionModel.load_config(model, subfolder="unet")
            named, _ = StableDiffusionXLLoraLoaderMixin.lora_state_dict(
                given, unet_config=_Fields(config)
            )
    except Exception as error:  # the converters have no errors of their own, and assert
        _log.warning("diffusers cannot convert an adapter", exc_info=error)
        raise BadAdapter(
            "has layers' names of the model's first publisher that diffusers cannot convert"
        ) from error
    return {
        key: Factors(named[names.down], named[names.up]) for key, names in by_module(named).items()
    }


class _Fields(dict[str, Any]):
    """A configuration whose keys are attributes, as diffusers has them."""

    __getattr__ = dict.__getitem__
