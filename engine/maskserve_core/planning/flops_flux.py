"""Counted work of a FluxTransformer2DModel."""

from __future__ import annotations

from typing import Any

from maskserve_core.planning.flops import BlockWork, FixedWork, ModelWork

STEPS_AHEAD = 8
"""Steps for which a FLUX batch has its shifts, scales and gates computed at once."""
_FLUX_HELD = 24
"""Widths that a token holds at most, before a single block's attention where that runs as plain
operations: the block's input, all that one product made of it (7), queries and keys in float32 (4
widths of half precision) and turned (4), and what they become; one that a dense block has left for
the next ones that are not; and what a row that may skip steps remembers (5).
"""


def flux_work(config: dict[str, Any], height: int, width: int) -> ModelWork:
    """Work of a FluxTransformer2DModel.

    A cached row computes its active image tokens and all text tokens; queries are those, keys are
    all tokens. `kv` has K and V of inactive tokens ready after norm and rotary embedding;
    `project` has their hidden states and makes K and V of them, in single blocks too.

    Args:
        config: transformer/config.json.
        height: latent rows (pixels / VAE scale); tokens are 2x2 latents.
        width: latent columns.
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
    blocks = [
        BlockWork(f"{name}.{i}", stack=0, level=0, width=h, **terms)
        for name, terms, count in zip(("double", "single"), (double, single), counts, strict=True)
        for i in range(count)
    ]
    clocks = 2 if config.get("guidance_embeds") else 1
    embed = FixedWork(
        row=clocks * _mlp(256, h) + _mlp(int(config["pooled_projection_dim"]), h),
        token=2.0 * channels * h,
        text=2.0 * int(config["joint_attention_dim"]) * h,
    )
    tokens = (height // 2) * (width // 2)
    held = _FLUX_HELD * h + 2.0 * int(config["attention_head_dim"])  # and rotary factors, complex
    return ModelWork(
        family="flux",
        blocks=tuple(blocks),
        tokens=(tokens,),
        joint=True,
        before=(embed,),
        after=FixedWork(row=4.0 * h * h, token=2.0 * h * out),
        restore_ends=False,
        # What a block holds, the model's input and output, and all blocks' shifts, scales, gates.
        peak_row=tokens * (held + channels + out)
        + STEPS_AHEAD * (12 * counts[0] + 3 * counts[1] + 2) * h,
        peak_text=held,
    )


def _mlp(inputs: int, width: int) -> float:
    """FLOPs of a two-layer embedder, inputs → width → width."""
    return 2.0 * inputs * width + 2.0 * width * width
