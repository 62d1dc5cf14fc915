"""FLUX.1 (dev, schnell, Fill, Kontext): pipelines, defaults, model spec of a folder, counted
work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config import Config
from maskserve_common.config_file import read_json
from maskserve_common.contracts.dense_steps import DenseSteps
from maskserve_common.contracts.semantics import FILL, INPAINT, REFERENCE
from maskserve_engine.planning.flops import BlockWork, FixedWork, ModelWork
from maskserve_engine.spec.mmdit import (
    CONTROL,
    PRECOMPUTED_STEPS,
    VECTORS_AT_ONCE,
    by_block,
    joint_attention,
)
from maskserve_engine.spec.model_spec import (
    ALL_STEPS,
    EditDefaults,
    ModelSpec,
    least_steps,
    one_scale,
)

PIPELINES = {
    "FluxFillPipeline": FILL,
    "FluxInpaintPipeline": INPAINT,
    # Text-to-image pipelines are served with the inpainting semantics of their family, as
    # diffusers' own FluxInpaintPipeline.from_pretrained does.
    "FluxPipeline": INPAINT,
    "FluxImg2ImgPipeline": INPAINT,
    "FluxKontextInpaintPipeline": REFERENCE,
    "FluxKontextPipeline": REFERENCE,
}
"""Served semantics by the class in model_index.json."""
NAME = "FLUX models"
SETTINGS = (
    "model.first_block_threshold",
    "model.t5_weights",
    "model.t5_offload",
    "model.gguf",
    "engine.flux_cuda_graphs",
    "controls.unequal_depths",
)
DEFAULTS = {
    FILL: EditDefaults(num_inference_steps=50, guidance_scale=30.0),
    INPAINT: EditDefaults(num_inference_steps=28, guidance_scale=7.0),
    REFERENCE: EditDefaults(num_inference_steps=28, guidance_scale=3.5),
}
"""Defaults of FluxFillPipeline, FluxInpaintPipeline and FluxKontextInpaintPipeline."""
_FEW_STEPS = 4
"""Steps of FLUX.1-schnell, which is distilled to so many; no pipeline's signature says so. Each has
its own anchor."""
_BLENDED = DenseSteps(prompt=1, side=1)
_DENSE_STEPS = {FILL: DenseSteps(), INPAINT: _BLENDED, REFERENCE: _BLENDED}
REFRESH_STRIDES = {FILL: 0.45, INPAINT: 0.25, REFERENCE: 0.0}
"""Strides of refresh steps; 0 where their effect has not been measured (Kontext, and distilled
models)."""
_REFRESH_GROWTH = {FILL: 1.0, INPAINT: 2.15, REFERENCE: 1.0}
"""A base model's picture round the mask changes faster the more noise there is."""
_REFRESH_RING = {FILL: 2}
"""Cached ring, by semantics. A base model's picture round the mask changes with its noise, so there
the ring is worth computing."""
_STRIDES = {FILL: ALL_STEPS, INPAINT: 7, REFERENCE: 7}
"""FLUX Fill sees the picture round the mask in extra channels, at every step. For other models it
is noised like the rest, and its activations change with the noise."""

_CONTROLS = {FILL: CONTROL, INPAINT: replace(CONTROL, stride=0.25, power=3.0), REFERENCE: None}
"""Where the picture round the mask is noised like the rest, its keys and values change less the
less noise there is."""

_FLUX_TOKEN_WIDTHS = 24
"""Largest number of widths that a token holds, before a single block's attention in plain
operations: the block's input, its joint product (7), queries and keys in float32 (4 widths of half
precision), rotated (4), and the result; one that a dense block left for later cached blocks; and
the state of a row that may skip steps (5)."""

_LAUNCHES = {"double": (14.4, 21.4, 16.4), "single": (7.1, 14.1, 9.1)}
"""Kernels of a block, counted on a device without memory (`bench kernel_table`)."""
_LAUNCHES_OUTSIDE = 11.0
_RECORDED_LAUNCHES = {name: (0.0, counts[1], 2.0) for name, counts in _LAUNCHES.items()}
"""Kernels with CUDA graphs: one that places entries, and the piece of a graph after it. Projected
blocks are not recorded."""
_RECORDED_OUTSIDE = 18.0
_OUT_LAUNCHES = 1.0


def flux_work(
    config: dict[str, Any],
    height: int,
    width: int,
    *,
    recorded: bool = False,
    references: int = 0,
    exact: bool = False,
) -> ModelWork:
    """Return the work of a FluxTransformer2DModel.

    A cached row computes its computed image tokens and all text tokens; these are the queries, and
    keys are all tokens. `kv` reads keys and values of cached tokens after norm and rotary
    embedding; `project` computes them from hidden states, in single blocks too.

    Args:
        config: transformer/config.json.
        height: latent rows (pixels / VAE scale); tokens are 2x2 latents.
        width: latent columns.
        recorded: whether steps are CUDA graphs.
        references: number of reference pictures of the same size.
        exact: whether references do not depend on the row (`Semantics.exact`), instead of being
            context.
    """
    h = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    channels = int(config["in_channels"])
    out = int(config.get("out_channels") or channels) * int(config.get("patch_size", 1)) ** 2
    # Q, K, V and the output are h x h each, the feed-forward is h x 4h and back: (4 + 8) * 2h²,
    # of which K and V are 4h². Single blocks fold the output into the (h + 4h) x h projection.
    double = {
        "row": 2 * 12.0 * h * h,  # AdaLN: h x 6h for the image and again for the text stream
        "token": 24.0 * h * h,
        "text": 24.0 * h * h,
        "spare": 4.0 * h * h,
        "pair": 4.0 * h,
        "cross": 0.0,
    }
    single = {**double, "row": 6.0 * h * h}
    counts = (int(config["num_layers"]), int(config["num_single_layers"]))
    launches = _RECORDED_LAUNCHES if recorded else _LAUNCHES
    outside = _RECORDED_OUTSIDE if recorded else _LAUNCHES_OUTSIDE
    blocks = [
        BlockWork(f"{name}.{i}", stack=0, level=0, width=h, launches=launches[name], **terms)
        for name, terms, count in zip(("double", "single"), (double, single), counts, strict=True)
        for i in range(count)
    ]
    clocks = 2 if config.get("guidance_embeds") else 1
    pooled = int(config["pooled_projection_dim"])
    embed = FixedWork(
        row=clocks * _mlp(256, h) + (_mlp(pooled, h) if pooled else 0.0),
        token=2.0 * channels * h,
        text=2.0 * int(config["joint_attention_dim"]) * h,
    )
    image = (height // 2) * (width // 2)
    context_tokens = image * references
    tokens, fixed_tokens = (image, context_tokens) if exact else (image + context_tokens, 0)
    peak_token = _FLUX_TOKEN_WIDTHS * h + 2.0 * int(
        config["attention_head_dim"]
    )  # and rotary factors, complex
    vectors = (12 * counts[0] + 3 * counts[1] + 2) * h
    return ModelWork(
        family="flux",
        blocks=tuple(blocks),
        tokens=(tokens,),
        context=tokens - image,
        still=fixed_tokens,
        joint=True,
        before=(embed,),
        after=FixedWork(row=4.0 * h * h, token=2.0 * h * out, launches=outside),
        restore_ends=False,
        # Tensors of a block, the model's input and output, and all blocks' shifts, scales, gates.
        peak_row=tokens * (peak_token + channels + out) + PRECOMPUTED_STEPS * vectors,
        peak_text=peak_token,
        peak_once=(VECTORS_AT_ONCE - PRECOMPUTED_STEPS) * vectors,
        heads=int(config["num_attention_heads"]),
    )


def control_work(config: dict[str, Any], height: int, width: int) -> ModelWork:
    """Return the work of a FluxControlNetModel beside its base, from the net's config.json and a
    size in latents. A union net's mode token is not counted.
    """
    base = flux_work(config, height, width)
    h = base.blocks[0].width
    blocks = []
    for block in base.blocks:
        dense, project, cached = (n + _OUT_LAUNCHES for n in block.launches)
        token = block.token + 2.0 * h * h
        blocks.append(replace(block, token=token, launches=(dense, project, cached)))
    [embed] = base.before
    hint = 2.0 * int(config["in_channels"]) * h
    return replace(
        base,
        blocks=tuple(blocks),
        before=(replace(embed, token=embed.token + hint),),
        after=FixedWork(),
        carried_numbers=float(base.tokens[0] * h * (1 + len(blocks))),
    )


_OF_BLOCK = re.compile(r"((?:single_)?transformer_blocks)\.(\d+)\.(.+)")
_BLOCKS = ("transformer_blocks", "single_transformer_blocks")
_OUTSIDE = {
    "x_embedder": ("before", "token"),
    "img_in": ("before", "token"),
    "context_embedder": ("before", "text"),
    "txt_in": ("before", "text"),
    "norm_out": ("after", "row"),
    "proj_out": ("after", "token"),
}
"""Layers outside the blocks: position, and the unit that they run once for. All others embed
something that a row has one of."""


def lora_work(base: ModelWork, layers: Mapping[str, int]) -> ModelWork:
    """Return the work that a LoRA adds. `layers` are the elements of its factors, by dotted layer
    name in FluxTransformer2DModel.
    """
    blocks: list[Counter[str]] = [Counter() for _ in base.blocks]
    outside: dict[str, Counter[str]] = {"before": Counter(), "after": Counter()}
    double = sum(block.name.startswith("double") for block in base.blocks)
    for name, numbers in layers.items():
        match = _OF_BLOCK.fullmatch(name)
        if match is None:
            place, term = _OUTSIDE.get(name.split(".")[0], ("before", "row"))
            outside[place][term] += numbers
            continue
        kind, number, layer = match.groups()
        single = kind == _BLOCKS[1]
        block_terms = blocks[int(number) + double * single]
        if layer.startswith(("norm", "img_mod", "txt_mod")):
            block_terms["row"] += numbers
            continue
        words = any(word in layer for word in ("context", "add_", "txt_"))
        for term in ("token", "text") if single else ("text",) if words else ("token",):
            block_terms[term] += numbers
        if layer in ("attn.to_k", "attn.to_v"):
            block_terms["spare"] += numbers
    return base.lora_work(blocks, outside["before"], outside["after"])


def lora_layers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the elements per rank of a LoRA on every linear layer of the blocks except modulation,
    for `lora_work`.
    """
    h = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    double = joint_attention(h)
    double |= {f"{ff}.net.{n}": 5 * h for ff in ("ff", "ff_context") for n in ("0.proj", "2")}
    single = {
        "attn.to_q": 2 * h,
        "attn.to_k": 2 * h,
        "attn.to_v": 2 * h,
        "proj_mlp": 5 * h,
        "proj_out": 6 * h,
    }
    return by_block(
        {
            "transformer_blocks": (int(config["num_layers"]), double),
            "single_transformer_blocks": (int(config["num_single_layers"]), single),
        }
    )


def _mlp(inputs: int, width: int) -> float:
    """Return the FLOPs of a two-layer embedder, inputs → width → width."""
    return 2.0 * inputs * width + 2.0 * width * width


def read(folder: Path, pipeline: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a FLUX folder. Raises ConfigError if a part is unreadable."""
    semantics, latents = PIPELINES[pipeline], one_scale(folder)
    vae = read_json(folder / "vae" / "config.json")
    sampler = read_json(folder / "scheduler" / "scheduler_config.json")
    transformer = read_json(folder / "transformer" / "config.json")
    patch, embedded = 2, bool(transformer.get("guidance_embeds", False))
    # Base models without a guidance input are distilled to few steps.
    distilled = semantics.blends and not embedded
    semantics_defaults = DEFAULTS[semantics]
    defaults = EditDefaults(
        num_inference_steps=_FEW_STEPS if distilled else semantics_defaults.num_inference_steps,
        guidance_scale=semantics_defaults.guidance_scale if embedded else 0.0,
    )
    return ModelSpec(
        family="flux",
        semantics=semantics,
        latents=latents,
        patch=patch,
        # diffusers' Flux pipelines assume 128 latents a side unless the model says otherwise.
        native_resolution=native_resolution or int(vae.get("sample_size") or 128 * latents.pixels),
        size_multiple=latents.pixels * patch,
        guidance="embedded" if embedded else "none",
        defaults=defaults,
        stride=1 if distilled else _STRIDES[semantics],
        dense_steps=_DENSE_STEPS[semantics],
        refresh_stride=0.0 if distilled else REFRESH_STRIDES[semantics],
        refresh_growth=_REFRESH_GROWTH[semantics],
        second_order_refresh=semantics == INPAINT,
        refreshes_over_template=semantics.blends and not distilled,
        corrects_residuals=semantics.masked_picture,
        refresh_ring=_REFRESH_RING.get(semantics),
        true_cfg=semantics.blends,
        denoiser=transformer,
        control=_CONTROLS[semantics],
        skips_steps=not semantics.reference,
        keeps_placed=True,
        t5=True,
        least_steps=least_steps(sampler),
    )


def recorded_rows(config: Config) -> int:
    """Return the number of dense rows whose tokens fit in a recorded step on GPUs; 0: steps are not
    recorded.
    """
    is_single_device = config.engine.devices == 1 and config.cache.placed_bytes <= 0
    return int(config.engine.flux_cuda_graphs and is_single_device)


def count(
    config: dict[str, Any],
    height: int,
    width: int,
    halo: int,
    *,
    recorded: bool,
    references: int,
    exact: bool = False,
) -> ModelWork:
    """Return `flux_work`. Raises ValueError if a halo is given, but there are no convolutions."""
    if halo:
        raise ValueError("halo: a setting of UNets")
    return flux_work(config, height, width, recorded=recorded, references=references, exact=exact)
