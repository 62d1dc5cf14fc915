"""A FLUX model of toy size with random weights, in diffusers format.

Every part is the real diffusers or transformers class, so code that loads the real model also loads
this one. Only the sizes are small (some 100 thousand parameters, 64x64 pixels, 4-pixel latents).
The tokenizers are built here, so nothing is downloaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CONFIG = """\
# Defaults of the tiny model.
[model]
max_sequence_length = 16
num_inference_steps = 4
guidance_scale = 3.0

# A step takes a millisecond or two: tests that stop an edit in the middle need many.
[limits]
max_steps = 1000
"""

LATENT_CHANNELS = 4
VAE_FACTOR = 4
NATIVE = 64
WIDTH = 32


def tiny_vae(channels: int) -> Any:
    """A VAE of three levels as FLUX.1 has it, with this number of latent channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=NATIVE,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_tiny_model(folder: Path, semantics: str = "fill", seed: int = 0) -> Path:
    """Write the model to `folder` and return it.

    Args:
        folder: made if missing.
        semantics: `fill` (FluxFillPipeline), `inpaint` (FluxInpaintPipeline) or `reference`
            (FluxKontextInpaintPipeline).
        seed: of the random weights; equal seeds give equal files.
    """
    import diffusers
    import torch

    pipelines = {
        "fill": diffusers.FluxFillPipeline,
        "inpaint": diffusers.FluxInpaintPipeline,
        "reference": diffusers.FluxKontextInpaintPipeline,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = pipelines[semantics](**_components(semantics))
    pipeline.save_pretrained(folder)
    (folder / "maskserve.toml").write_text(CONFIG, encoding="utf-8")
    return folder


def with_heads(model: Path, folder: Path, heads: int, width: int = 32) -> Path:
    """Write a tiny model to `folder` again with this number of heads of this width, and
    return it.
    """
    import torch
    from diffusers import FluxTransformer2DModel

    shutil.copytree(model, folder)
    config = FluxTransformer2DModel.load_config(folder / "transformer")
    wider = {
        **config,
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "axes_dims_rope": (width // 4, width * 3 // 8, width * 3 // 8),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformer: Any = FluxTransformer2DModel.from_config(wider)
    transformer.save_pretrained(folder / "transformer")
    return folder


def _components(semantics: str) -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    latent = 4 * LATENT_CHANNELS  # a token is a patch of 2x2 latents
    # Fill adds the masked image's latents and the mask's own pixels to each token.
    condition = latent + 4 * VAE_FACTOR**2 if semantics == "fill" else 0
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            shift=3.0,
            base_image_seq_len=16,
            max_image_seq_len=256,
            base_shift=0.5,
            max_shift=1.15,
        ),
        "vae": tiny_vae(LATENT_CHANNELS),
        "text_encoder": CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip),
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                projection_dim=WIDTH,
                num_hidden_layers=1,
                num_attention_heads=2,
                bos_token_id=clip.bos_token_id,
                eos_token_id=clip.eos_token_id,
                pad_token_id=clip.pad_token_id,
            )
        ),
        "tokenizer": clip,
        "text_encoder_2": T5EncoderModel(
            T5Config(
                vocab_size=len(t5),
                d_model=WIDTH,
                d_kv=16,
                d_ff=WIDTH,
                num_layers=1,
                num_heads=2,
            )
        ),
        "tokenizer_2": t5,
        "transformer": FluxTransformer2DModel(
            in_channels=latent + condition,
            out_channels=latent,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    }


def clip_tokenizer() -> Any:
    """A byte-level CLIP tokenizer without merges: every byte is a token."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    # Sorted, because the order of ByteLevel.alphabet() differs between processes.
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77
    )


def t5_tokenizer() -> Any:
    """A T5 tokenizer whose words are printable ASCII characters."""
    from transformers import T5Tokenizer

    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\N{LOWER ONE EIGHTH BLOCK}", -2.0)]
    vocab += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, additional_special_tokens=[], model_max_length=512)
