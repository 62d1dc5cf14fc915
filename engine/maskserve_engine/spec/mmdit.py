"""Counted work and values that flow-matching transformers share.

A family gives a table of its linear layers (`count` in its module); all else follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from maskserve_common.config import Config
from maskserve_engine.planning.flops import BlockWork, FixedWork, ModelWork
from maskserve_engine.planning.layer_table import Layers, Shape, layer_flops
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.model_spec import ControlNetSpec, ModelSpec

CONTROL = ControlNetSpec(
    net="FluxControlNetModel",
    latents=True,
    equal=(
        "num_attention_heads",
        "attention_head_dim",
        "joint_attention_dim",
        "pooled_projection_dim",
        "axes_dims_rope",
    ),
    without=("conditioning_embedding_channels",),
)
RECORDED_ROWS = 2.3
"""Dense rows whose tokens the longest recorded step has; longer ones keep a device busy."""
_ROWS = 8
"""Rows of a worker by default. One of fewer rows, on a card with little memory, records steps that
are shorter by as much.
"""
_RECORDED_LAUNCHES, _RECORDED_LAUNCHES_OUTSIDE = 2.0, 18.0
"""Kernels of a recorded step: of a cached block one that places entries, and the piece of a graph
after it; and those outside the blocks."""
_OUT_LAUNCHES = 1.0
"""Kernels of the layer after a block of a ControlNet."""
PRECOMPUTED_STEPS = 8
"""Steps for which a FLUX batch has its shifts, scales and gates computed at once, at least."""
VECTORS_AT_ONCE = 32
"""Number of steps times passes whose vectors are computed at once, if passes are few."""

_TOKEN_WIDTHS = 24
"""Largest number of widths that a token holds, before a single block's attention in plain
operations: the block's input, its joint product (7), queries and keys in float32 (4 widths of half
precision), rotated (4), and the result; one that a dense block left for later cached blocks; and
the state of a row that may skip steps (5)."""

LAUNCHES = {"double": (14.4, 21.4, 16.4), "single": (7.1, 14.1, 9.1)}
"""Kernels of a block, counted on a device without memory (`bench kernel_table`)."""
LAUNCHES_OUTSIDE = 11.0


class BlockLayers(NamedTuple):
    """A transformer block, for `TransformerLayers`."""

    layers: Layers
    launches: tuple[float, float, float] = LAUNCHES["double"]
    vectors: int = 12
    """Shifts, scales and gates, each as wide as a token."""
    attentions: int = 1
    """Times that all tokens attend to all."""

    @classmethod
    def single(cls, layers: Layers) -> BlockLayers:
        """Return a block whose layers are the same for text and image."""
        return cls(layers, LAUNCHES["single"], vectors=3)


IMAGE, QKV, KEYS = (
    ("to_q", "to_k", "to_v", "to_out.0"),
    ("to_q", "to_k", "to_v"),
    ("to_k", "to_v"),
)
TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def width_of(config: Mapping[str, Any]) -> int:
    """Return the width of a token."""
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def attention(width: int, layers: Iterable[str], module: str = "attn") -> dict[str, Shape]:
    return {f"{module}.{layer}": (width, width) for layer in layers}


def feed_forward(module: str, width: int) -> dict[str, Shape]:
    return {f"{module}.net.0.proj": (width, 4 * width), f"{module}.net.2": (4 * width, width)}


def gated_feed_forward(module: str, width: int, inner: int) -> dict[str, Shape]:
    return {f"{module}.linear_in": (width, 2 * inner), f"{module}.linear_out": (inner, width)}


def embedder(module: str, inputs: int, width: int) -> dict[str, Shape]:
    return {f"{module}.linear_1": (inputs, width), f"{module}.linear_2": (width, width)}


def last_layers(config: Mapping[str, Any]) -> dict[str, dict[str, Shape]]:
    """Return the layers after the last block."""
    width = width_of(config)
    channels = int(config.get("out_channels") or config["in_channels"])
    out = channels * int(config.get("patch_size", 1)) ** 2
    return {"row": {"norm_out.linear": (width, 2 * width)}, "token": {"proj_out": (width, out)}}


def stack(name: str, blocks: int, block: BlockLayers) -> dict[str, BlockLayers]:
    """Return equal blocks by the dotted names of their modules."""
    return {f"{name}.{number}": block for number in range(blocks)}


def recorded_rows(spec: ModelSpec, config: Config, most: float = RECORDED_ROWS) -> float:
    """Return the number of dense rows, `most` at most, whose tokens fit in a recorded step on GPUs;
    0: steps are not recorded. Rows that see exact references are not recorded.
    """
    is_single_device = config.engine.devices == 1 and config.cache.placed_bytes <= 0
    if spec.semantics.exact or not (config.engine.cuda_graphs and is_single_device):
        return 0
    return max(1.0, most * min(1.0, config.engine.max_rows / _ROWS))


class TransformerLayers(NamedTuple):
    """The layers of a transformer whose blocks attend to text and image together."""

    blocks: Mapping[str, BlockLayers]
    """Blocks by the dotted names of their modules."""
    before: Layers
    after: Layers
    """Layers outside the blocks, by dotted name."""
    launches: float = LAUNCHES_OUTSIDE
    """Kernels outside the blocks."""

    @property
    def vectors(self) -> int:
        """Shifts, scales and gates of a step, those after the blocks included."""
        return sum(block.vectors for block in self.blocks.values()) + 2

    def work(self, family: str, config: Mapping[str, Any], picture: StepPicture) -> ModelWork:
        """Return the work of the transformer.

        A cached row computes its computed image tokens and all text tokens; these are the queries,
        and keys are all tokens. `kv` reads keys and values of cached tokens after norm and rotary
        embedding; `project` computes them from hidden states, in single blocks too.

        Args:
            family: key of the adapter registry.
            config: transformer/config.json.
            picture: the picture; tokens are 2x2 latents.

        Raises:
            ValueError: the picture has a halo, but there are no convolutions.
        """
        if picture.halo:
            raise ValueError("halo: a setting of UNets")
        width = width_of(config)
        image = (picture.height // 2) * (picture.width // 2)
        context = image * picture.references
        tokens, still = (image, context) if picture.exact else (image + context, 0)
        # The state of a token, and rotary factors, complex.
        peak_token = _TOKEN_WIDTHS * width + 2.0 * int(config["attention_head_dim"])
        ends = sum(inputs for inputs, _ in self.before["token"].values())
        ends += sum(outputs for _, outputs in self.after["token"].values())
        vectors = self.vectors * width
        launches = {name: block.launches for name, block in self.blocks.items()}
        outside = self.launches
        if picture.recorded:  # but for projected blocks
            launches = {
                name: (0.0, project, _RECORDED_LAUNCHES)
                for name, (_, project, _) in launches.items()
            }
            outside = _RECORDED_LAUNCHES_OUTSIDE
        return ModelWork(
            family=family,
            blocks=tuple(
                BlockWork(
                    name,
                    stack=0,
                    level=0,
                    width=width,
                    pair=4.0 * width * block.attentions,
                    launches=launches[name],
                    layers=block.layers,
                    **layer_flops(block.layers),
                )
                for name, block in self.blocks.items()
            ),
            tokens=(tokens,),
            context=tokens - image,
            still=still,
            joint=True,
            before=(FixedWork.of(self.before),),
            after=FixedWork.of(self.after, launches=outside),
            restore_ends=False,
            # Tensors of a block, the model's input and output, and all blocks' vectors.
            peak_row=tokens * (peak_token + ends) + PRECOMPUTED_STEPS * vectors,
            peak_text=peak_token,
            peak_once=(VECTORS_AT_ONCE - PRECOMPUTED_STEPS) * vectors,
            heads=int(config["num_attention_heads"]),
        )


def control_work(base: ModelWork, channels: int) -> ModelWork:
    """Return the work of a ControlNet with such blocks beside its base. A union net's mode token is
    not counted.

    Args:
        base: work of a whole model of the net's sizes.
        channels: numbers of a control picture's token.
    """
    width, [embed] = base.blocks[0].width, base.before
    blocks = []
    for block in base.blocks:
        dense, project, cached = (n + _OUT_LAUNCHES for n in block.launches)
        token = block.token + 2.0 * width * width
        blocks.append(replace(block, token=token, launches=(dense, project, cached)))
    hint = 2.0 * channels * width
    return replace(
        base,
        blocks=tuple(blocks),
        before=(replace(embed, token=embed.token + hint),),
        after=FixedWork(),
        carried_numbers=float(base.tokens[0] * width * (1 + len(blocks))),
    )
