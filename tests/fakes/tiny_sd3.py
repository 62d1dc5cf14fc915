"""A Stable Diffusion 3.5 of toy size with random weights, in diffusers format; nothing is
downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.tiny_model import CONFIG, NATIVE, clip_tokenizer, t5_tokenizer

_LATENTS, _WIDTH = 16, 32  # its pipeline needs 16


def build_tiny_sd3(folder: Path, *, medium: bool = False) -> Path:
    """Write the model to `folder` and return it. `medium`: with second attentions, like the smaller
    of the two published models.
    """
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3InpaintPipeline,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        T5Config,
        T5EncoderModel,
    )

    clip, t5 = clip_tokenizer(), t5_tokenizer()

    def text(inner: int) -> Any:
        return CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(clip), hidden_size=12, intermediate_size=inner, projection_dim=8,
                num_hidden_layers=2, num_attention_heads=2, bos_token_id=clip.bos_token_id,
                eos_token_id=clip.eos_token_id, pad_token_id=clip.pad_token_id,
            )
        )  # fmt: skip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = StableDiffusion3InpaintPipeline(
            transformer=SD3Transformer2DModel(
                sample_size=16,
                in_channels=_LATENTS,
                num_layers=3,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=_WIDTH,
                caption_projection_dim=32,
                pooled_projection_dim=16,
                pos_embed_max_size=16,
                dual_attention_layers=(0, 1) if medium else (),
                qk_norm="rms_norm",
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=AutoencoderKL(
                block_out_channels=(8, 8, 8),
                down_block_types=("DownEncoderBlock2D",) * 3,
                up_block_types=("UpDecoderBlock2D",) * 3,
                layers_per_block=1,
                latent_channels=_LATENTS,
                norm_num_groups=4,
                sample_size=NATIVE,
                scaling_factor=1.5305,
                shift_factor=0.0609,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
            text_encoder=text(_WIDTH),
            tokenizer=clip,
            text_encoder_2=text(_WIDTH + 8),
            tokenizer_2=clip,
            text_encoder_3=T5EncoderModel(
                T5Config(
                    vocab_size=len(t5), d_model=_WIDTH, d_kv=16, d_ff=_WIDTH, num_layers=1,
                    num_heads=2,
                )
            ),
            tokenizer_3=t5,
        )  # fmt: skip
        for block in pipeline.transformer.transformer_blocks:
            for norm in (block.attn.norm_q, block.attn.norm_added_k):
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            if block.attn2 is not None:
                torch.nn.init.uniform_(block.attn2.norm_k.weight, 0.5, 1.5)
    pipeline.save_pretrained(folder)
    (folder / "maskserve.toml").write_text(CONFIG, "utf-8")
    return folder
