"""Values and counts that flow-matching transformers share."""

from __future__ import annotations

from collections.abc import Mapping

from maskserve_engine.spec.model_spec import ControlNetSpec

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
)
PRECOMPUTED_STEPS = 8
"""Steps for which a FLUX batch has its shifts, scales and gates computed at once, at least."""
VECTORS_AT_ONCE = 32
"""Number of steps times passes whose vectors are computed at once, if passes are few."""


def joint_attention(width: int) -> dict[str, int]:
    """Return the numbers per rank of a LoRA of the attention of a block of two streams."""
    layers = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )  # fmt: skip
    return {f"attn.{layer}": 2 * width for layer in layers}


def by_block(stacks: Mapping[str, tuple[int, Mapping[str, int]]]) -> dict[str, int]:
    """Return numbers by dotted layer name, for stacks of so many blocks with these layers."""
    return {
        f"{stack}.{number}.{layer}": numbers
        for stack, (count, layers) in stacks.items()
        for number in range(count)
        for layer, numbers in layers.items()
    }
