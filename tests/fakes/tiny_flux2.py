"""A FLUX.2 klein or dev of toy size with random weights, in diffusers format; nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.tiny_model import CONFIG, LATENT_CHANNELS, NATIVE

TEXT = 16
"""Width of the text encoder."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)
"""A chat template for messages of several parts, as processors have it."""


def random_vae() -> Any:
    """Return a small VAE with statistics of its latents, from torch's generator."""
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=NATIVE,
    )
    vae.bn.running_mean.normal_(0.0, 0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return vae


def build_tiny_flux2(folder: Path, *, distilled: bool = True, exact: bool = False) -> Path:
    """Write the model to `folder` and return it. `distilled` False: a base model; `exact`: a model
    for klein 9B-KV's pipeline.
    """
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinInpaintPipeline,
        Flux2KleinKVPipeline,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = chat_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = random_vae()
        config = Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=TEXT, intermediate_size=TEXT,
            num_hidden_layers=29, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        )  # fmt: skip
        pipeline = (Flux2KleinKVPipeline if exact else Flux2KleinInpaintPipeline)(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=vae,
            text_encoder=Qwen3ForCausalLM(config),
            tokenizer=tokenizer,
            transformer=_transformer(guidance=False),
            is_distilled=distilled,
        )
    pipeline.save_pretrained(folder)
    config_text = CONFIG.replace("guidance_scale = 3.0\n", "") if distilled else CONFIG
    (folder / "maskserve.toml").write_text(
        config_text.replace("max_sequence_length = 16", "max_sequence_length = 48"), "utf-8"
    )
    return folder


def _transformer(*, guidance: bool) -> Any:
    """A transformer with random weights; `guidance` is whether it has guidance as an input."""
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * TEXT,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def build_tiny_flux2_dev(folder: Path) -> Path:
    """Write a model like FLUX.2 dev to `folder` and return it: with guidance as an input, and a
    Mistral 3 for its prompts.
    """
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        Flux2Pipeline,
    )
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokenizer = chat_tokenizer([SYSTEM_MESSAGE])
    tokenizer.chat_template = PARTS_TEMPLATE
    text = {
        "model_type": "mistral", "vocab_size": len(tokenizer), "hidden_size": TEXT,
        "intermediate_size": TEXT, "num_hidden_layers": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": TEXT, "intermediate_size": TEXT,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=random_vae(),
            text_encoder=Mistral3ForConditionalGeneration(
                Mistral3Config(text_config=text, vision_config=vision)
            ),
            tokenizer=tokenizer,
            transformer=_transformer(guidance=True),
        )
    pipeline.save_pretrained(folder)
    (folder / "maskserve.toml").write_text(
        CONFIG.replace("max_sequence_length = 16", "max_sequence_length = 96"), "utf-8"
    )
    return folder


def chat_tokenizer(texts: Sequence[str] = (), more: Sequence[str] = ()) -> Any:
    """A byte-level tokenizer with a chat template. Each word of `texts` is one token. Each item of
    `more` is one token that is never split.
    """
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import Qwen2TokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more]
    vocab = {word: i for i, word in enumerate([*letters, *special])}
    bpe = Tokenizer(BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if texts:
        bpe.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=2000,
                special_tokens=special,
                initial_alphabet=letters,
                show_progress=False,
            ),
        )
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=bpe,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *more],
        model_max_length=512,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
