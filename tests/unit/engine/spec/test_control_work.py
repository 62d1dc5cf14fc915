"""Counted work of ControlNets against torch's own counter on the real diffusers classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetModel

from maskserve_benchmarks.published_models import FLUX_DEV, SD21, SDXL
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.qwen_image import spec as qwen_image
from maskserve_engine.families.sd3 import spec as sd3
from maskserve_engine.families.unet import spec as unet
from maskserve_engine.families.z_image import spec as z_image
from tests.fakes.control_nets import (
    CHANNELS,
    PICTURE_ONLY,
    random_qwen_net,
    random_sd3_net,
    random_z_image_net,
)
from tests.support.flop_count import counted
from tests.support.model_configs import TINY_FLUX, TINY_SD21, TINY_SDXL

pytestmark = pytest.mark.each_value


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    """Shapes are all that is counted; nothing is computed."""
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("blocks", [(1, 2), (2, 0)])
@pytest.mark.parametrize(("config", "side"), [(TINY_FLUX, 8), (FLUX_DEV, 128)], ids=["tiny", "dev"])
def test_a_flux_net_is_what_torch_counts(
    config: dict[str, Any], side: int, blocks: tuple[int, int]
) -> None:
    net_config = {
        **config,
        "num_layers": blocks[0],
        "num_single_layers": blocks[1],
        "in_channels": 20,
    }
    net_config.pop("out_channels", None)
    net, tokens, text = FluxControlNetModel(**net_config), side * side // 4, 7
    flops = counted(
        lambda: net(
            hidden_states=torch.zeros(1, tokens, 20),
            controlnet_cond=torch.zeros(1, tokens, 20),
            encoder_hidden_states=torch.zeros(1, text, net_config["joint_attention_dim"]),
            pooled_projections=torch.zeros(1, net_config["pooled_projection_dim"]),
            timestep=torch.ones(1),
            guidance=torch.ones(1) if net_config.get("guidance_embeds") else None,
            img_ids=torch.zeros(tokens, 3),
            txt_ids=torch.zeros(text, 3),
        )
    )
    work = flux.control_work(net_config, side, side)
    assert work.step_flops([work.row_at(1.0, text)], "dense") == flops
    assert work.step_flops([work.row_at(1.0, text)], "kv") == flops
    assert work.step_flops([work.row_at(0.1, text)], "kv") < 0.7 * flops


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_net_of_qwen_image_is_what_torch_counts(blocks: int) -> None:
    net, tokens, side, text = random_qwen_net(0, blocks), 16, 8, 7
    flops = counted(
        lambda: net(
            hidden_states=torch.zeros(1, tokens, CHANNELS),
            controlnet_cond=torch.zeros(1, tokens, CHANNELS),
            encoder_hidden_states=torch.zeros(1, text, net.config["joint_attention_dim"]),
            encoder_hidden_states_mask=torch.ones(1, text),
            timestep=torch.ones(1),
            img_shapes=[[(1, side // 2, side // 2)]],
        )
    )
    work = qwen_image.control_work(dict(net.config), side, side)
    assert work.step_flops([work.row_at(1.0, text)], "dense") == flops
    assert work.step_flops([work.row_at(1.0, text)], "kv") == flops


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("reads_text", [False, True])
def test_a_net_of_stable_diffusion_3_is_what_torch_counts(blocks: int, reads_text: bool) -> None:
    """One that reads the prompt may have a second attention, counted as if it saw it, too."""
    side, text = 8, 7 * reads_text
    more = {} if reads_text else {**PICTURE_ONLY, "use_pos_embed": True, "pos_embed_type": "sincos"}
    net = random_sd3_net(0, blocks, **more)
    latents = torch.zeros(1, CHANNELS, side, side)
    embeds = torch.zeros(1, text, 32) if reads_text else None
    flops = counted(lambda: net(latents, latents, 1.0, embeds, torch.zeros(1, 16), torch.ones(1)))
    work = sd3.control_work(dict(net.config), side, side)
    assert work.step_flops([work.row_at(1.0, text)], "dense") == flops
    assert work.step_flops([work.row_at(1.0, text)], "kv") == flops


@pytest.mark.parametrize("kind", [None, "control_noise_refiner", "control_layers"])
def test_a_net_of_z_image_is_about_what_torch_counts(kind: str | None) -> None:
    """All its blocks are counted as if they saw the text, and the same layers as if they were
    twice as many beside the picture.
    """
    from diffusers import ZImageTransformer2DModel

    sizes = {"dim": 64, "n_heads": 4, "n_kv_heads": 4, "n_refiner_layers": 2}
    base = ZImageTransformer2DModel(
        in_channels=4, cap_feat_dim=16, n_layers=3, axes_dims=[4, 6, 6], **sizes
    )
    places = None if kind is None else (0, 1)
    net = random_z_image_net(
        0, add_control_noise_refiner=kind, control_refiner_layers_places=places, **sizes
    )
    net, side, words = type(net).from_transformer(net, base), 32, 32
    latents = torch.zeros(4, 1, side, side)

    base.rope_embedder = lambda ids: torch.ones(len(ids), 8, dtype=torch.complex64)
    net.rope_embedder = base.rope_embedder
    flops = counted(lambda: net([latents], torch.ones(1), [torch.zeros(words, 16)], [latents]))
    work = z_image.control_work(dict(net.config), side, side)
    assert work.step_flops([work.row_at(1.0, words)], "dense") == pytest.approx(flops, rel=0.1)


UNUSED = (
    "sample_size", "out_channels", "up_block_types", "center_input_sample", "dual_cross_attention",
    "conv_in_kernel", "conv_out_kernel",
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "side"),
    [(TINY_SDXL, 16), (TINY_SD21, 16), (SDXL, 128), (SD21, 96)],
    ids=["tiny xl", "tiny 2.1", "xl", "2.1"],
)
@pytest.mark.parametrize("middle", ["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"])
def test_a_net_of_a_unet_is_what_torch_counts(
    config: dict[str, Any], side: int, middle: str
) -> None:
    """Apart from the layers that read the picture, which run once in an edit."""
    net_config = {name: value for name, value in config.items() if name not in UNUSED}
    net_config = {**net_config, "in_channels": 4, "mid_block_type": middle}
    net, text = ControlNetModel(**net_config), 7
    pooled = net_config.get("projection_class_embeddings_input_dim") or 0
    pooled -= 6 * (net_config.get("addition_time_embed_dim") or 0)
    picture = torch.zeros(2, 3, 8 * side, 8 * side)

    def run() -> None:
        net(
            torch.zeros(2, 4, side, side),
            torch.ones(2),
            torch.zeros(2, text, net_config["cross_attention_dim"]),
            picture,
            added_cond_kwargs={
                "text_embeds": torch.zeros(2, pooled),
                "time_ids": torch.zeros(2, 6),
            },
        )

    flops = counted(run) - counted(lambda: net.controlnet_cond_embedding(picture))
    work = unet.control_work(net_config, side, side)
    assert work.step_flops([work.row_at(1.0, text)], "dense") == flops
    assert work.step_flops([work.row_at(1.0, text)], "kv") == flops
    assert work.step_flops([work.row_at(0.1, text)], "kv") < 0.95 * flops
