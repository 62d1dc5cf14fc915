"""Random ControlNets of the tiny models' size."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import (
        ControlNetModel,
        FluxControlNetModel,
        QwenImageControlNetModel,
        SD3ControlNetModel,
        ZImageControlNetModel,
    )

CHANNELS = 16
"""Channels of a token of latents."""


def random_net(seed: int, doubles: int, singles: int, **overrides: Any) -> FluxControlNetModel:
    """A random ControlNet of the tiny models' size; none of its additions is zero."""
    from diffusers import FluxControlNetModel

    sizes = {
        "num_single_layers": singles,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    }
    return _random(FluxControlNetModel, seed, doubles, {**sizes, **overrides})


def _random(kind: Any, seed: int, layers: int, sizes: dict[str, Any]) -> Any:
    """A random ControlNet of a class, with these sizes beside the usual ones."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = kind(
            **{
                "in_channels": CHANNELS,
                "num_layers": layers,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                **sizes,
            }
        ).eval()
        for name, weight in net.named_parameters():
            if name.startswith(("controlnet", "pos_embed_input")):
                torch.nn.init.normal_(weight, std=0.3)
        if hasattr(net, "txt_norm"):
            torch.nn.init.normal_(net.txt_norm.weight, std=3.0)
    return net


@cache
def made_nets() -> dict[str, FluxControlNetModel]:
    """ControlNets of equal depth. diffusers drops the outputs that only the deeper of several nets
    has.
    """
    return {
        "plain": random_net(11, 1, 1),
        "union": random_net(12, 1, 1, num_mode=3),
        "other": random_net(13, 1, 1, attention_head_dim=8, axes_dims_rope=(2, 2, 4)),
    }


def random_qwen_net(seed: int, layers: int, **overrides: Any) -> QwenImageControlNetModel:
    """A random ControlNet of the tiny Qwen-Image's size; none of its additions is zero."""
    from diffusers import QwenImageControlNetModel

    sizes = {"joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)}
    return _random(QwenImageControlNetModel, seed, layers, {**sizes, **overrides})


PICTURE_ONLY = {
    "joint_attention_dim": None,
    "caption_projection_dim": 48,
    "use_pos_embed": False,
    "pos_embed_type": None,
    "force_zeros_for_pooled_projection": False,
}
"""Configuration of Stability AI's nets, which do not read the prompt."""


def random_sd3_net(seed: int, layers: int, **overrides: Any) -> SD3ControlNetModel:
    """A random ControlNet of the tiny Stable Diffusion 3.5's size; no addition is zero."""
    from diffusers import SD3ControlNetModel

    sizes = {
        "sample_size": 16,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 16,
        "pos_embed_max_size": 16,
    }
    return _random(SD3ControlNetModel, seed, layers, {**sizes, **overrides})


def random_z_image_net(seed: int, **overrides: Any) -> ZImageControlNetModel:
    """A random ControlNet of the tiny Z-Image's size; none of its additions is zero. By default of
    the first version: its control picture has blocks of its own before the text.
    """
    import torch
    from diffusers import ZImageControlNetModel

    sizes = {
        "control_layers_places": (0, 1),
        "control_in_dim": 4,
        "dim": 64,
        "n_refiner_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ZImageControlNetModel(**{**sizes, **overrides}).eval()
        for name, weight in net.named_parameters():
            if "_proj." in name:
                torch.nn.init.normal_(weight, std=0.3)
    return net


def random_unet_net(unet: Any, seed: int, **overrides: Any) -> ControlNetModel:
    """A random ControlNet of a UNet's sizes; none of its additions is zero. The tiny VAE shrinks
    pictures 4 times, not 8, and so does the net's part that reads pictures.
    """
    import torch
    from diffusers import ControlNetModel

    names = (
        "down_block_types", "block_out_channels", "layers_per_block", "norm_num_groups",
        "cross_attention_dim", "attention_head_dim", "use_linear_projection",
        "transformer_layers_per_block", "addition_embed_type", "addition_time_embed_dim",
        "projection_class_embeddings_input_dim",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ControlNetModel(
            **{
                "in_channels": 4,
                "conditioning_embedding_out_channels": (8, 8, 16),
                **{name: unet.config[name] for name in names},
                **overrides,
            }
        ).eval()
        for name, weight in net.named_parameters():
            if name.startswith("controlnet"):
                torch.nn.init.normal_(weight, std=0.2)
    return net
