"""Z-Image (base, Turbo): pipelines, defaults, model spec of a folder, counted work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import INPAINT, DenseSteps
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shapes
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    ControlNetSpec,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    least_steps,
    one_scale,
)

PIPELINES = {
    "ZImageInpaintPipeline": INPAINT,
    "ZImageImg2ImgPipeline": INPAINT,
    "ZImagePipeline": INPAINT,
}
"""Served semantics by the class in model_index.json."""
NAME = "Z-Image models"
SETTINGS = ()
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=5.0)
_TURBO = EditDefaults(num_inference_steps=8, guidance_scale=0.0)
"""The publisher's settings for the distilled model, which its pipeline's class does not
identify."""
_TURBO_SHIFT = 3.0
"""Shift of its schedule, which identifies it."""
_STRIDE = 7
_PATCH = 2
PADDED_TO = 32
"""Prompt and picture are each padded to a multiple of this number of tokens."""
_TIME, _TIME_WIDTH = 256, 1024
_SORT = f"{_PATCH}-1"
"""Key of the embedders and last layers for pictures: side and frames of a patch."""

_LAUNCHES, _LAUNCHES_OUTSIDE = (16.8, 26.8, 20.8), 14.6
"""Kernels of a block and outside, counted on a device without memory."""

CONTROL = ControlNetSpec(
    net="ZImageControlNetModel",
    latents=True,
    guided=True,
    equal=("dim", "n_heads", "n_refiner_layers", "qk_norm"),
)
recorded_rows = mmdit.recorded_rows


def pads_of(tokens: int) -> int:
    return -tokens % PADDED_TO


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Z-Image folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    latents = one_scale(folder)
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    if transformer.get("siglip_feat_dim") is not None:
        raise ConfigError(
            "[model] path: siglip_feat_dim: Z-Image with SigLIP features is not served; "
            "use a model without"
        )
    if list(transformer.get("all_patch_size", [_PATCH])) != [_PATCH]:
        raise ConfigError(
            f"[model] path: all_patch_size: {transformer['all_patch_size']} is not served; "
            f"served: [{_PATCH}]"
        )
    turbo = sampler.get("shift") == _TURBO_SHIFT and not sampler.get("use_dynamic_shifting")
    return ModelSpec(
        family="z_image",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        guidance="cfg",
        guides_above=0.0,
        defaults=_TURBO if turbo else DEFAULTS,
        stride=1 if turbo else _STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(
            stride=0.0,
            leaves_text=False,  # its first blocks do not see the text
        ),
        true_cfg=False,
        denoiser=as_flux(transformer),
        control=CONTROL,
        edit_kinds=ALL_KINDS,
        keeps_placed=True,
        padded_to=PADDED_TO,
        least_steps=least_steps(sampler),
    )


def as_flux(transformer: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = int(transformer["dim"]), int(transformer["n_heads"])
    return {
        **transformer,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "joint_attention_dim": int(transformer["cap_feat_dim"]),
    }


def control_work(config: Mapping[str, Any], height: int, width: int) -> ModelWork:
    """Return the work of a ZImageControlNetModel beside its base, from the net's config.json and a
    size in latents: its blocks, and the base's that see the picture only.
    """
    layers, refiners = len(config["control_layers_places"]), int(config["n_refiner_layers"])
    again = layers if config.get("add_control_noise_refiner") == "control_layers" else refiners
    channels = int(config["control_in_dim"])
    sizes = {
        **config,
        "n_layers": layers,
        "n_refiner_layers": refiners + again,
        "in_channels": channels,
        "cap_feat_dim": 0,
    }
    work = count(as_flux(sizes), StepPicture(height, width))
    return mmdit.control_work(work, channels * _PATCH**2)


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of a ZImageTransformer2DModel: blocks with the same layers for text and
    picture. The first blocks do not see the text; attention counts it nevertheless. A prompt is
    embedded once.
    """
    h = mmdit.width_of(config)
    inner, patch = int(h / 3 * 8), int(config["in_channels"]) * _PATCH**2
    time = min(h, _TIME)
    token: Shapes = {
        **mmdit.attention(h, mmdit.IMAGE, "attention"),
        "feed_forward.w1": (h, inner),
        "feed_forward.w2": (inner, h),
        "feed_forward.w3": (h, inner),
    }
    image: Layers = {
        "row": {"adaLN_modulation.0": (time, 4 * h)},
        "token": token,
        "spare": mmdit.attention(h, mmdit.KEYS, "attention"),
    }
    stacks: dict[str, tuple[str, Layers]] = {
        "noise_refiner": ("n_refiner_layers", image),
        "layers": ("n_layers", {**image, "text": token}),
    }
    blocks = {
        name: block
        for stack, (number, layers) in stacks.items()
        for name, block in mmdit.stack(
            stack,
            int(config[number]),
            mmdit.BlockLayers.single(layers)._replace(launches=_LAUNCHES),
        ).items()
    }
    before: Layers = {
        "row": {"t_embedder.mlp.0": (_TIME, _TIME_WIDTH), "t_embedder.mlp.2": (_TIME_WIDTH, time)},
        "token": {f"all_x_embedder.{_SORT}": (patch, h)},
    }
    after: Layers = {
        "row": {f"all_final_layer.{_SORT}.adaLN_modulation.1": (time, h)},
        "token": {f"all_final_layer.{_SORT}.linear": (h, patch)},
    }
    model = mmdit.TransformerLayers(blocks, before, after, _LAUNCHES_OUTSIDE)
    return model.work("z_image", config, picture)
