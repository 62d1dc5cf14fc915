"""Stable Diffusion and SDXL: pipelines, defaults, the model spec of a folder, and the counted work
of a UNet2DConditionModel.

Only the stacks (Transformer2DModels) are sparse: convolutions, ResNets, proj_in and proj_out run on
all positions of every row, or with a halo on those of a tile. The work between two stacks is fixed,
which is where the load stream gets ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskserve_common.config import Config, ConfigError
from maskserve_common.config_file import read_json
from maskserve_common.contracts.semantics import FILL, INPAINT, Semantics
from maskserve_engine.planning.flops import BlockWork, FeatureMap, FixedWork, ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape, Shapes, layer_flops
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import (
    ALL_KINDS,
    INPAINT_ONLY,
    ControlNetSpec,
    EditDefaults,
    IpAdapterSpec,
    ModelSpec,
    RefreshSpec,
    one_scale,
)

PIPELINES = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
)
"""A UNet's input channels decide its semantics, whatever pipeline saved it."""
NAME = "UNets"
SETTINGS = ("cache.conv_halo",)
DEFAULTS = EditDefaults(num_inference_steps=50, guidance_scale=7.5)
"""Defaults of StableDiffusionInpaintPipeline and StableDiffusionXLInpaintPipeline."""
CONTROL = ControlNetSpec(
    net="ControlNetModel",
    latents=False,
    guided=True,
    equal=(
        "block_out_channels",
        "layers_per_block",
        "cross_attention_dim",
        "addition_embed_type",
        "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
    ),
)
_STRIDE = 7
REFRESH_STRIDES = {FILL: 0.35, INPAINT: 0.25}
_REFRESH_GROWTH = {FILL: 1.0, INPAINT: 1.7}
"""A base model's picture round the mask changes faster the more noise there is."""
_REFRESH_EVENLY_OVER = {FILL: 0.75, INPAINT: 0.85}
_BLOCK_LAUNCHES = (14.0, 20.0, 17.0)
"""Kernels of a transformer block, per kind, counted on a device without memory (`bench
kernel_table`)."""
_END_LAUNCHES = (0.0, 5.0, 5.0)
"""Additional kernels of a stack's last block, which splits and rejoins its tokens."""
_RECORDED_LAUNCHES, _RECORDED_ENDS, _RECORDED_SAMPLING = (0.0, 40.0, 2.0), (0.0, 5.0, 2.0), 10.0
"""The same with CUDA graphs: kernels that place cached activations, and the piece after them. Steps
with projected blocks are not recorded; their numbers stand for the kernels outside the blocks, too.
"""
_RESNET_LAUNCHES, _STACK_LAUNCHES, _SAMPLING_LAUNCHES = 11.0, 6.0, 27.0
"""Kernels of a ResNet, of a stack outside its blocks, and of a step's input, embeddings and
sampler."""

_DOWN = ("CrossAttnDownBlock2D", "DownBlock2D")
_UP = ("CrossAttnUpBlock2D", "UpBlock2D")


def _per_level(value: Any, levels: int) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] * levels


def check_net(config: Mapping[str, Any]) -> None:
    """Check a ControlNetModel's config as `check_unet` does; its middle may have no attention."""
    options = dict(config)
    if options.get("mid_block_type") == "UNetMidBlock2D":
        del options["mid_block_type"]
    if options.get("global_pool_conditions"):
        raise ValueError("its global_pool_conditions is not served")
    check_unet({"up_block_types": (), **options})


def check_unet(config: Mapping[str, Any]) -> None:
    """Refuse options that neither the count nor the adapter implements; no served model uses them.

    Raises:
        ValueError: names the option.
    """
    plain = {
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "only_cross_attention": False,
        "dual_cross_attention": False,
        "class_embed_type": None,
        "num_class_embeds": None,
        "encoder_hid_dim": None,
        "attention_type": "default",
        "resnet_time_scale_shift": "default",
        "time_embedding_type": "positional",
        "time_cond_proj_dim": None,
        "time_embedding_act_fn": None,
        "encoder_hid_dim_type": None,
        "cross_attention_norm": None,
        "center_input_sample": False,
        "downsample_padding": 1,
        "reverse_transformer_layers_per_block": None,
    }
    for key, usual in plain.items():
        if config.get(key, usual) != usual:
            raise ValueError(f"{key}: {config[key]!r} is not served; served: {usual!r}")
    for key, served_kinds in (("down_block_types", _DOWN), ("up_block_types", _UP)):
        for kind in config[key]:
            if kind not in served_kinds:
                raise ValueError(f"{key}: {kind} is not served; served: {', '.join(served_kinds)}")
    if config.get("addition_embed_type") not in (None, "text_time"):
        raise ValueError(f"addition_embed_type: {config['addition_embed_type']!r} is not served")


@dataclass
class _Walk:
    """Walks through the model's forward pass and notes the layers of one evaluation."""

    channels: list[int]
    """Channels per level; `layers`, `depths` and `cross_dim` are per level, too."""
    layers: list[int]
    depths: list[int]
    """Blocks per stack."""
    cross_dim: list[int]
    embedding: int
    areas: list[int]
    """Positions per level."""
    blocks: list[BlockWork] = field(default_factory=list)
    before: list[FixedWork] = field(default_factory=list)
    groups: int = 32
    convolves_outputs: bool = False
    """Whether each kept tensor goes through its own convolution, as in a ControlNet."""
    linears: dict[str, Shape] = field(default_factory=dict)
    """Linear layers since the last stack began, which run once per row."""
    launches: float = _SAMPLING_LAUNCHES
    recorded: bool = False
    convolutions: list[dict[str, Shape]] = field(default_factory=list)
    """Convolutions of each level since the last stack began."""
    maps: list[FeatureMap] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    """Elements of each tensor that waits for an up block, or that the present layer reads."""
    peak: float = 0.0
    """Largest number of elements at one time."""

    @classmethod
    def of(cls, config: Mapping[str, Any], height: int, width: int) -> _Walk:
        channels = [int(c) for c in config["block_out_channels"]]
        levels = len(channels)
        per_level = (
            _per_level(value, levels)
            for value in (
                config["layers_per_block"],
                config.get("transformer_layers_per_block", 1),
                config["cross_attention_dim"],
            )
        )
        layers, depths, cross = ([int(n) for n in values] for values in per_level)
        embedding = int(config.get("time_embedding_dim") or channels[0] * 4)
        areas = [rows * columns for rows, columns in level_sizes(height, width, levels)]
        walk = cls(channels, layers, depths, cross, embedding, areas)
        walk.groups = int(config.get("norm_num_groups") or 32)
        walk.convolutions = [{} for _ in areas]
        return walk

    def down(self, config: Mapping[str, Any]) -> None:
        """Walk through the down blocks and the middle block, which a ControlNet has, too."""
        channels = self.channels
        self.linear("time_embedding.linear_1", channels[0], self.embedding)
        self.linear("time_embedding.linear_2", self.embedding, self.embedding)
        if config.get("addition_embed_type") == "text_time":
            added = int(config["projection_class_embeddings_input_dim"])
            self.linear("add_embedding.linear_1", added, self.embedding)
            self.linear("add_embedding.linear_2", self.embedding, self.embedding)
        kernel = int(config.get("conv_in_kernel", 3))
        self.conv("conv_in", 0, int(config["in_channels"]), channels[0], kernel)
        self.keep(0, channels[0])
        in_channels, bottom = channels[0], len(channels) - 1
        for level, kind in enumerate(config["down_block_types"]):
            stage = f"down_blocks.{level}"
            for layer in range(self.layers[level]):
                inputs = in_channels if layer == 0 else channels[level]
                self.resnet(f"{stage}.resnets.{layer}", level, inputs, channels[level])
                if kind.startswith("CrossAttn"):
                    name = f"{stage}.attentions.{layer}"
                    self.stack(name, level, channels[level], self.depths[level])
                self.keep(level, channels[level])
            in_channels = channels[level]
            if level < bottom:
                self.read(level, channels[level], strided=True)
                name = f"{stage}.downsamplers.0.conv"
                self.conv(name, level + 1, channels[level], channels[level])
                self.keep(level + 1, channels[level])
        self.resnet("mid_block.resnets.0", bottom, channels[-1], channels[-1])
        if config.get("mid_block_type") == "UNetMidBlock2D":
            return
        self.stack("mid_block.attentions.0", bottom, channels[-1], self.depths[-1])
        self.resnet("mid_block.resnets.1", bottom, channels[-1], channels[-1])

    @property
    def opened(self) -> float:
        """Return the elements of one feature map of each shape, and of one stack's keys, values
        and ends of each shape.
        """
        maps = {(feature_map.level, feature_map.width) for feature_map in self.maps}
        stacks = {(block.level, block.width) for block in self.blocks}
        shapes = [*maps, *(3 * [*stacks])]
        return sum(self.areas[level] * width for level, width in shapes)

    def conv(self, name: str, level: int, inputs: int, outputs: int, side: int = 3) -> None:
        self.convolutions[level][name] = (inputs * side * side, outputs)

    def read(self, level: int, channels: int, *, strided: bool = False) -> None:
        """Count a map that a GroupNorm or a strided convolution reads."""
        block = len(self.blocks)
        self.maps.append(FeatureMap(level, channels, self.groups, strided, block))

    def outside(self) -> FixedWork:
        """Return the work since the last call."""
        layers = {"row": self.linears}
        work = FixedWork.of(layers, tuple(self.convolutions), launches=self.launches)
        self.linears, self.launches = {}, 0.0
        self.convolutions = [{} for _ in self.areas]
        return work

    def hold(self, level: int, channels: int) -> None:
        """Account for `channels` beside the kept tensors."""
        self.peak = max(self.peak, sum(self.waiting) + channels * self.areas[level])

    def keep(self, level: int, channels: int) -> None:
        if self.convolves_outputs:
            name = f"controlnet_down_blocks.{len(self.waiting)}"
            self.conv(name, level, channels, channels, side=1)
        self.waiting.append(float(channels * self.areas[level]))

    def linear(self, name: str, inputs: int, outputs: int) -> None:
        self.linears[name] = (inputs, outputs)

    def resnet(self, name: str, level: int, inputs: int, outputs: int) -> None:
        # The input normed and activated, or three tensors of the output's size.
        self.hold(level, max(2 * inputs, inputs + outputs, 3 * outputs))
        self.read(level, inputs)
        self.conv(f"{name}.conv1", level, inputs, outputs)
        self.linear(f"{name}.time_emb_proj", self.embedding, outputs)
        self.read(level, outputs)
        self.conv(f"{name}.conv2", level, outputs, outputs)
        if inputs != outputs:
            self.conv(f"{name}.conv_shortcut", level, inputs, outputs, side=1)
        self.launches += 0.0 if self.recorded else _RESNET_LAUNCHES

    def stack(self, name: str, level: int, h: int, depth: int) -> None:
        """Count a Transformer2DModel: its blocks per token, its ends as fixed work."""
        self.hold(level, 26 * h)  # of which the gated feed-forward part is 16
        self.read(level, h)
        self.conv(f"{name}.proj_in", level, h, h, side=1)  # a linear layer or a 1x1 convolution
        self.before.append(self.outside())
        layers = _block_layers(h, self.cross_dim[level])
        flops = layer_flops(layers)
        index = len(self.before) - 1
        self.launches += 0.0 if self.recorded else _STACK_LAUNCHES
        of_block = _RECORDED_LAUNCHES if self.recorded else _BLOCK_LAUNCHES
        of_last = _RECORDED_ENDS if self.recorded else _END_LAUNCHES
        for i in range(depth):
            ends = of_last if i == depth - 1 else (0.0, 0.0, 0.0)
            dense, project, cached = map(sum, zip(of_block, ends, strict=True))
            launches = dense, project, cached
            self.blocks.append(
                BlockWork(
                    f"{name}.transformer_blocks.{i}",
                    index,
                    level,
                    h,
                    pair=4.0 * h,
                    cross=4.0 * h,
                    launches=launches,
                    layers=layers,
                    **flops,
                )
            )
        self.conv(f"{name}.proj_out", level, h, h, side=1)


def _block_layers(width: int, cross: int) -> Layers:
    """Return the layers of a transformer block; `cross` is the width of text."""

    def square(*names: str) -> dict[str, Shape]:
        return dict.fromkeys(names, (width, width))

    feed_forward: Shapes = {
        "ff.net.0.proj": (width, 8 * width), "ff.net.2": (4 * width, width)
    }  # fmt: skip
    return {
        "token": {
            **square("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
            **square("attn2.to_q", "attn2.to_out.0"),
            **feed_forward,
        },
        "text": dict.fromkeys(("attn2.to_k", "attn2.to_v"), (cross, width)),
        "spare": square("attn1.to_k", "attn1.to_v"),
    }


def level_sizes(height: int, width: int, levels: int) -> list[tuple[int, int]]:
    """Return (rows, columns) of each level: odd sides round up, as in strided convolutions."""
    sizes = [(height, width)]
    for _ in range(levels - 1):
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return sizes


def unet_work(
    config: Mapping[str, Any],
    height: int,
    width: int,
    *,
    guidance: bool = True,
    halo: int = 0,
    recorded: bool = False,
) -> ModelWork:
    """Return the work of a UNet2DConditionModel.

    Args:
        config: unet/config.json.
        height: latent rows (pixels / VAE scale).
        width: latent columns.
        guidance: whether every row is two evaluations.
        halo: see `ModelWork.halo`.
        recorded: whether steps are CUDA graphs.

    Raises:
        ValueError: the config uses a part that is not served.
    """
    check_unet(config)
    walk = _Walk.of(config, height, width)
    channels, layers, depths = walk.channels, walk.layers, walk.depths
    walk.recorded = recorded
    walk.launches = _RECORDED_SAMPLING if recorded else _SAMPLING_LAUNCHES
    walk.down(config)
    bottom = len(channels) - 1
    for step, kind in enumerate(config["up_block_types"]):
        level = bottom - step
        channel_count, below = channels[level], channels[min(level + 1, bottom)]
        stage = f"up_blocks.{step}"
        for layer in range(layers[level] + 1):
            last = layer == layers[level]
            skip = channels[max(level - 1, 0)] if last else channel_count
            in_channels = below if layer == 0 else channel_count
            walk.waiting.pop()
            walk.keep(level, 2 * in_channels + skip)  # by itself, and beside the skip
            walk.resnet(f"{stage}.resnets.{layer}", level, in_channels + skip, channel_count)
            if kind.startswith("CrossAttn"):
                name = f"{stage}.attentions.{layer}"
                walk.stack(name, level, channel_count, depths[level])
            walk.waiting.pop()
        if level > 0:
            walk.hold(level - 1, 3 * channel_count)  # as it was, widened, and after the convolution
            walk.conv(f"{stage}.upsamplers.0.conv", level - 1, channel_count, channel_count)
    walk.read(0, channels[0])
    kernel = int(config.get("conv_out_kernel", 3))
    walk.conv("conv_out", 0, channels[0], int(config["out_channels"]), kernel)

    return ModelWork(
        family="unet",
        blocks=tuple(walk.blocks),
        tokens=tuple(walk.areas),
        joint=False,
        before=tuple(walk.before),
        after=walk.outside(),
        restore_ends=True,
        copies=2 if guidance else 1,
        halo=halo,
        maps=tuple(walk.maps) if halo else (),
        peak_row=walk.peak,
        opened_row=walk.opened,
        # Keys and values of the prompt, kept in every block for as long as the batch holds.
        peak_text=float(sum(2 * block.width for block in walk.blocks)),
    )


def control_work(
    config: Mapping[str, Any], height: int, width: int, *, guidance: bool = True
) -> ModelWork:
    """Return the work of a ControlNetModel beside its UNet; arguments as in `unet_work`.

    The layers that read the picture run once per edit and are not counted. Convolutions run on the
    whole picture, even if those of the UNet run on tiles.
    """
    walk = _Walk.of(config, height, width)
    walk.convolves_outputs = True
    walk.down(config)
    bottom, channels = len(walk.channels) - 1, walk.channels[-1]
    walk.conv("controlnet_mid_block", bottom, channels, channels, side=1)
    # The picture is as large as the first map; the middle block has a residual, too.
    residual_numbers = sum(walk.waiting) + walk.channels[-1] * walk.areas[-1]
    return ModelWork(
        family="unet",
        blocks=tuple(walk.blocks),
        tokens=tuple(walk.areas),
        joint=False,
        before=tuple(walk.before),
        after=walk.outside(),
        restore_ends=True,
        carried_numbers=walk.waiting[0] + residual_numbers,
        copies=2 if guidance else 1,
        peak_row=walk.peak,
        peak_text=0.0,
    )


def read(folder: Path, _: str, native_resolution: int) -> ModelSpec:
    """Return the model spec of a Stable Diffusion folder.

    Raises:
        ConfigError: the folder is not served.
    """
    index, unet = read_json(folder / "model_index.json"), read_json(folder / "unet" / "config.json")
    latents = one_scale(folder)
    try:
        check_unet(unet)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"[model] path: unet/config.json: {error}") from error
    semantics, scale = _semantics(unet, latents.channels), latents.pixels
    is_xl = unet.get("addition_embed_type") == "text_time"
    length = _tokenizer_length(folder, unet, is_xl=is_xl)
    return ModelSpec(
        family="unet",
        semantics=semantics,
        latents=latents,
        patch=1,
        native_resolution=native_resolution or int(unet["sample_size"]) * scale,
        size_multiple=scale,
        guidance="cfg",
        defaults=DEFAULTS,
        stride=_STRIDE,
        true_cfg=False,
        denoiser=unet,
        control=CONTROL,
        ip_adapters=IpAdapterSpec("h94", int(unet["cross_attention_dim"]), _cross_layers(unet)),
        edit_kinds=ALL_KINDS if semantics is INPAINT else INPAINT_ONLY,
        refresh=RefreshSpec(
            stride=REFRESH_STRIDES[semantics],
            leaves_text=False,  # text is not among the tokens
            growth=_REFRESH_GROWTH[semantics],
            second_order=semantics == INPAINT,
            evenly_over=_REFRESH_EVENLY_OVER[semantics],
            over_template=True,
        ),
        dense_sides=True,
        predicts_steps=False,
        strength_rounds_up=False,
        zeros_for_empty_prompt=bool(index.get("force_zeros_for_empty_prompt", is_xl)),
        tokenizer_length=length,
    )


def _semantics(unet: Mapping[str, Any], channels: int) -> Semantics:
    """Return how a UNet takes source and mask, with a VAE of so many channels.

    Raises:
        ConfigError: it takes or gives other channels.
    """
    semantics = {channels: INPAINT, 2 * channels + 1: FILL}.get(int(unet["in_channels"]))
    if semantics is None or int(unet["out_channels"]) != channels:
        raise ConfigError(
            f"[model] path: the UNet takes {unet['in_channels']} channels and gives "
            f"{unet['out_channels']}; with a VAE of {channels} served: {channels} (base) or "
            f"{2 * channels + 1} (inpainting) to {channels}"
        )
    return semantics


def _tokenizer_length(folder: Path, unet: Mapping[str, Any], *, is_xl: bool) -> int:
    """Check the parts beside the UNet; return the number of tokens of a prompt.

    Raises:
        ConfigError: a part is missing, or does not fit.
    """
    parts = ["scheduler", "text_encoder", "tokenizer"]
    if is_xl:
        parts += ["text_encoder_2", "tokenizer_2"]
    for part in parts:
        if not (folder / part).is_dir():
            raise ConfigError(f"[model] path: {folder} has no folder {part!r}")
    encoders = [part for part in parts if part.startswith("text_encoder")]
    text_width = sum(
        int(read_json(folder / part / "config.json")["hidden_size"]) for part in encoders
    )
    if text_width != unet["cross_attention_dim"]:
        raise ConfigError(
            f"[model] path: the UNet takes text {unet['cross_attention_dim']} wide and "
            f"{' and '.join(encoders)} give {text_width}"
        )
    length = read_json(folder / "tokenizer" / "tokenizer_config.json").get("model_max_length")
    if not isinstance(length, int) or not 1 <= length <= 4096:
        raise ConfigError(
            f"[model] path: tokenizer/tokenizer_config.json: model_max_length: {length!r} is not "
            "a number of tokens; served: 1 to 4096"
        )
    return length


def _cross_layers(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return `IpAdapterSpec.layers`. A file numbers all attentions as diffusers lists them: the
    middle block's last, and in each block self-attention first.
    """
    blocks = unet_work(config, 8, 8, guidance=False).blocks
    stages = [block.name.split(".")[0] for block in blocks]
    listed = sorted(range(len(blocks)), key=lambda i: stages[i] == "mid_block")
    numbers = {block: 2 * place + 1 for place, block in enumerate(listed)}
    return tuple([(numbers[i], int(block.width)) for i, block in enumerate(blocks)])


def recorded_rows(spec: ModelSpec, config: Config) -> float:
    """Return infinity, for steps of any number of passes are recorded on GPUs; 0: none is."""
    return math.inf if config.engine.cuda_graphs else 0


def count(config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
    """Return `unet_work` with classifier-free guidance; UNets take no references."""
    height, width, halo, recorded, *_ = picture
    return unet_work(config, height, width, halo=halo, recorded=recorded)
