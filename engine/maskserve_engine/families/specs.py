"""The model families that are served. The content of a folder determines its family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from maskserve_common.config import Config, ConfigError
from maskserve_engine.families.chroma import spec as chroma
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.families.flux3 import spec as flux3
from maskserve_engine.families.joyimage import spec as joyimage
from maskserve_engine.families.longcat import spec as longcat
from maskserve_engine.families.qwen_image import spec as qwen_image
from maskserve_engine.families.qwen_image21 import spec as qwen_image21
from maskserve_engine.families.sd3 import spec as sd3
from maskserve_engine.families.unet import spec as unet
from maskserve_engine.families.unserved import UNSERVED
from maskserve_engine.families.z_image import spec as z_image
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.family import FamilyModule, family_work
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.spec.model_spec import ModelSpec

FAMILIES: dict[str, FamilyModule] = {
    "chroma": chroma,
    "flux": flux,
    "flux2": flux2,
    "flux3": flux3,
    "joyimage": joyimage,
    "longcat": longcat,
    "qwen_image": qwen_image,
    "qwen_image21": qwen_image21,
    "sd3": sd3,
    "unet": unet,
    "z_image": z_image,
}


DENSE_ONLY = "this model is served dense only, as its second attentions have no entries"


def check_family(config: Config, spec: ModelSpec) -> None:
    """Check that the configuration has no setting that the model does not have.

    Raises:
        ConfigError: it is a setting of other families, the cache of a model without one, or
            another number of steps than the model's only one.
    """
    if config.cache.enabled and not spec.caches:
        raise ConfigError(f"[cache] enabled: {DENSE_ONLY}; use false")
    if spec.sigmas and config.model.num_inference_steps not in (0, len(spec.sigmas)):
        raise ConfigError(
            f"[model] num_inference_steps: this model has {len(spec.sigmas)} of its own; use 0"
        )
    if config.model.step_interval > 1 and not spec.predicts_steps:
        raise ConfigError("[model] step_interval: not a setting of this model; use 1")
    family_settings = FAMILIES[spec.family].SETTINGS
    foreign_settings = {
        name for family in FAMILIES.values() for name in family.SETTINGS
    }.difference(family_settings)
    for name in sorted(foreign_settings):
        section, key = name.split(".")
        default, set_to = (getattr(getattr(owner, section), key) for owner in (Config(), config))
        if set_to != default:
            owners = ", ".join(owner.NAME for owner in FAMILIES.values() if name in owner.SETTINGS)
            use = json.dumps(default) if default != "" else "none"
            raise ConfigError(f"[{section}] {key}: a setting of {owners}; use {use}")


_GROUP = 32
"""Elements of a token that share a scale in int4 (`cache.entries` of the engine)."""


def check_widths(config: Config, spec: ModelSpec) -> None:
    """Check that the widths of a model's tokens fit its storage formats.

    Raises:
        ConfigError: they do not.
    """
    cache, side = config.cache, spec.native_resolution // spec.vae_scale_factor
    formats = {"entry_format": cache.entry_format, "own_format": cache.own_format}
    if not cache.enabled:
        del formats["entry_format"]
    int4_keys = [key for key, form in formats.items() if form == "int4"]
    if not int4_keys:
        return
    work = counted_work(spec, side, side)
    maps: Sequence[int] = spec.denoiser.get("block_out_channels", ())
    odd = [width for width in (*(block.width for block in work.blocks), *maps) if width % _GROUP]
    if odd:
        raise ConfigError(
            f"[cache] {int4_keys[0]}: int4 has a scale per {_GROUP} numbers, and this model's "
            "tokens "
            f"have {min(odd)}; use int8"
        )


def recorded_rows(spec: ModelSpec, config: Config) -> float:
    """Return the number of dense rows whose tokens fit in a recorded step on GPUs; 0: steps are not
    recorded.
    """
    return FAMILIES[spec.family].recorded_rows(spec, config)


def load_spec(folder: str | Path, native_resolution: int = 0) -> ModelSpec:
    """Read the model spec of a diffusers-format folder; `native_resolution`, in pixels, overrides
    its own.

    Raises:
        ConfigError: it is no model folder, or its family is not served.
    """
    folder = Path(folder)
    pipeline = read_model_index(folder).get("_class_name")
    for family in FAMILIES.values():
        if pipeline in family.PIPELINES:
            return family.read(folder, str(pipeline), native_resolution)
    served = [name for family in FAMILIES.values() for name in family.PIPELINES]
    like = ", ".join(get_close_matches(str(pipeline), served, n=4, cutoff=0.0))
    clause = UNSERVED.get(str(pipeline), "")
    raise ConfigError(
        f"[model] path: {pipeline} is not served; served: {like} and others (docs/models.md)"
        + f"; {clause}" * bool(clause)
    )


def counted_work(
    spec: ModelSpec, height: int, width: int, *, halo: int = 0, recorded: bool = False
) -> ModelWork:
    """Return a model's work on one picture, whose size is in latents (pixels / VAE scale)."""
    family = FAMILIES[spec.family]
    return family_work(family, spec, height, width, halo=halo, recorded=recorded)


def control_work(spec: ModelSpec, config: Mapping[str, Any], height: int, width: int) -> ModelWork:
    """Return a ControlNet's work on one picture; `config` is the net's config.json, the size is in
    latents.

    Raises:
        KeyError: the config lacks a size.
    """
    return FAMILIES[spec.family].control_work(dict(config), height, width)


_FILLS = 2.0**25
"""FLOPs of an operation that a thread computes in about 0.3 ms."""


def filled_threads(config: Config, spec: ModelSpec) -> int:
    """Return the number of CPU threads that a model's operations keep busy.

    For a small model it is 1. An operation ends with its last thread. Where operations take
    microseconds, threads mostly wait for one another and for cores, which encoder and decoder need,
    too.
    """
    side = spec.native_resolution // spec.vae_scale_factor
    work = counted_work(spec, side, side)
    row = work.row_at(1.0, spec.text_tokens(config.model.max_sequence_length))
    operations = work.batch_launches(("dense",) * len(work.blocks))
    return max(1, int(work.step_flops([row], "dense") / operations / _FILLS))
