"""Stable Diffusion 3.5 (medium, large): pipelines, defaults, model spec of a folder, counted
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskserve_common.config import Config
from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import INPAINT, DenseSteps
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape
from maskserve_engine.spec import mmdit
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    ControlNetSpec,
    EditDefaults,
    ModelSpec,
    RefreshSpec,
    check_served,
    least_steps,
    one_scale,
)

PIPELINES = {
    "StableDiffusion3InpaintPipeline": INPAINT,
    "StableDiffusion3Img2ImgPipeline": INPAINT,
    "StableDiffusion3Pipeline": INPAINT,
}
"""Served semantics by the class in model_index.json."""
NAME = "Stable Diffusion 3.5 models"
SETTINGS = ("model.t5_weights", "model.t5_offload")
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=7.0)
"""Defaults of StableDiffusion3InpaintPipeline."""
_STRIDE = 7
_PATCH = 2
_CLIP = 77
"""Tokens of the CLIPs, which precede the T5's."""
_SECOND = "dual_attention_layers"

CONTROL = ControlNetSpec(
    net="SD3ControlNetModel",
    latents=True,
    patched=False,
    guided=True,
    equal=(
        "patch_size",
        "num_attention_heads",
        "attention_head_dim",
        "joint_attention_dim",
        "pooled_projection_dim",
        "pos_embed_max_size",
    ),
    without=("extra_conditioning_channels",),
)


def recorded_rows(spec: ModelSpec, config: Config) -> float:
    """Return `mmdit.recorded_rows`; 0 for medium, whose second attention has each picture's own
    length.
    """
    return 0 if spec.denoiser.get(_SECOND) else mmdit.recorded_rows(spec, config)


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Stable Diffusion 3.5 folder.

    Raises:
        ConfigError: a part is unreadable or not served.
    """
    latents = one_scale(folder)
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    check_served(
        ("transformer: qk_norm", transformer.get("qk_norm"), "rms_norm"),
        ("transformer: in_channels", transformer.get("in_channels"), latents.channels),
        ("transformer: patch_size", transformer.get("patch_size"), _PATCH),
        ("scheduler: use_dynamic_shifting", sampler.get("use_dynamic_shifting", False), False),
    )
    return ModelSpec(
        family="sd3",
        semantics=PIPELINES[pipeline],
        latents=latents,
        patch=_PATCH,
        native_resolution=native_resolution or 128 * latents.pixels,
        size_multiple=latents.pixels * _PATCH,
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        dense_steps=DenseSteps(prompt=1, side=1),
        refresh=RefreshSpec(stride=None if transformer.get(_SECOND) else 0.0),
        true_cfg=False,
        denoiser=transformer,
        control=CONTROL,
        edit_kinds=ALL_KINDS,
        keeps_placed=True,
        padded_to=1,
        caches=not transformer.get(_SECOND),
        t5=True,
        text_besides=_CLIP,
        least_steps=least_steps(sampler),
    )


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return the work of an SD3Transformer2DModel: FLUX.1's double blocks, some with a second
    attention, of the picture, which is counted as if it saw the text. The last one drops its text.
    """
    h, blocks = mmdit.width_of(config), _blocks(config)
    last = f"transformer_blocks.{len(blocks) - 1}"
    layers = blocks[last].layers
    blocks[last] = blocks[last]._replace(
        layers={
            **layers,
            "row": {**layers["row"], "norm1_context.linear": (h, 2 * h)},
            "text": mmdit.attention(h, mmdit.TEXT[:-1]),
        }
    )
    model = mmdit.TransformerLayers(blocks, _before(config), mmdit.last_layers(config))
    return model.work("sd3", config, picture)


def control_work(config: Mapping[str, Any], height: int, width: int) -> ModelWork:
    """Return the work of an SD3ControlNetModel beside its base, from the net's config.json and a
    size in latents. One that does not read the prompt is counted as if it attended to it.
    """
    blocks, before = _blocks(config), _before(config)
    if config.get("joint_attention_dim") is None:
        before = {**before, "text": {}}
        blocks = {
            name: block._replace(layers={**block.layers, "row": _of_row(block), "text": {}})
            for name, block in blocks.items()
        }
    model = mmdit.TransformerLayers(blocks, before, mmdit.last_layers(config))
    work = model.work("sd3", config, StepPicture(height, width))
    return mmdit.control_work(work, int(config["in_channels"]) * _PATCH**2)


def _of_row(block: mmdit.BlockLayers) -> dict[str, Shape]:
    """Return a block's layers for each row, without those of the text."""
    return {name: shape for name, shape in block.layers["row"].items() if "context" not in name}


def _blocks(config: Mapping[str, Any]) -> dict[str, mmdit.BlockLayers]:
    """Return blocks that all keep their text."""
    h, number = mmdit.width_of(config), int(config["num_layers"])
    row: dict[str, Shape] = {"norm1.linear": (h, 6 * h), "norm1_context.linear": (h, 6 * h)}
    token = mmdit.attention(h, mmdit.IMAGE) | mmdit.feed_forward("ff", h)
    text = mmdit.attention(h, mmdit.TEXT) | mmdit.feed_forward("ff_context", h)
    layers: Layers = {
        "row": row, "token": token, "text": text, "spare": mmdit.attention(h, mmdit.KEYS)
    }  # fmt: skip
    blocks = mmdit.stack("transformer_blocks", number, mmdit.BlockLayers(layers))
    for dual in config.get(_SECOND) or ():
        second = mmdit.attention(h, mmdit.IMAGE, "attn2")
        two = {**layers, "row": {**row, "norm1.linear": (h, 9 * h)}, "token": token | second}
        blocks[f"transformer_blocks.{dual}"] = mmdit.BlockLayers(two, attentions=2)
    return blocks


def _before(config: Mapping[str, Any]) -> Layers:
    h, pooled = mmdit.width_of(config), int(config["pooled_projection_dim"])
    return {
        "row": mmdit.embedder("time_text_embed.timestep_embedder", 256, h)
        | mmdit.embedder("time_text_embed.text_embedder", pooled, h),
        "token": {"pos_embed.proj": (int(config["in_channels"]) * _PATCH**2, h)},
        "text": {"context_embedder": (int(config["joint_attention_dim"] or 0), h)},
    }
