"""Configs of the counted models: published UNets, and tiny ones of the shape of published ones."""

from __future__ import annotations

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
TINY_SDXL = {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 3),
    "attention_head_dim": (2, 4, 6),
    "cross_attention_dim": 40,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 68,
    "norm_num_groups": 8,
}
TINY_SD21 = {
    "in_channels": 9,
    "out_channels": 4,
    "sample_size": 16,
    "block_out_channels": (32, 64, 96, 96),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 2,
    "attention_head_dim": (2, 4, 6, 6),
    "cross_attention_dim": 40,
    "use_linear_projection": True,
    "norm_num_groups": 8,
}
REAL_SDXL = {
    **TINY_SDXL,
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "norm_num_groups": 32,
}
REAL_SD21 = {
    **TINY_SD21,
    "sample_size": 96,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "norm_num_groups": 32,
}
