"""Small configs with the shape of published ones, and a published one that no benchmark uses."""

from __future__ import annotations

from maskserve_benchmarks.published_models import SD21, SDXL

TINY_FLUX = {
    "patch_size": 1,
    "in_channels": 20,
    "out_channels": 12,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 10,
    "axes_dims_rope": (4, 6, 6),
}
SD21_INPAINT = {**SD21, "in_channels": 9}
TINY_SDXL = {
    **SDXL,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96),
    "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (2, 4, 6),
    "cross_attention_dim": 40,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 68,
    "norm_num_groups": 8,
}
TINY_SD21 = {
    **SD21_INPAINT,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96, 96),
    "attention_head_dim": (2, 4, 6, 6),
    "cross_attention_dim": 40,
    "norm_num_groups": 8,
}
