"""Tokenizers and two tiny text encoders. The encoders learn colour and shape, then stay frozen."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import (
    MAX_SEQUENCE_LENGTH,
    SAME,
    phrase,
    words,
)

WIDTH: Final = 64
TEXT_PARTS: Final = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Text folders of a pipeline."""
_CLIP_LENGTH: Final = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"


@dataclass(frozen=True)
class Language:
    """The language of the text encoders: prompts that name a look and a thing."""

    words: Sequence[str]
    """Words that the tokenizers keep whole."""
    looks: int
    """Number of looks, with "none" among them."""
    things: int
    """Number of things, with "none" among them."""
    draw: Callable[[np.random.Generator, int], list[tuple[str, int, int]]]
    """Draws prompts, each with the number of its look and of its thing."""


def demo_language() -> Language:
    """The demo models' language: a colour and a shape. Either may be missing (`SAME`: as
    another's).
    """
    colours, shapes = [*COLOURS, "", SAME], [*SHAPES, "", SAME]

    def draw(rng: np.random.Generator, count: int) -> list[tuple[str, int, int]]:
        c = rng.integers(len(COLOURS), size=count)
        s = rng.integers(len(SHAPES), size=count)
        c[rng.random(count) < 0.25] = len(COLOURS) + 1
        s[rng.random(count) < 0.25] = len(SHAPES) + 1
        return [
            ("", len(COLOURS), len(SHAPES)),
            *(
                (phrase(rng, colours[i], shapes[j], noisy=True), int(i), int(j))
                for i, j in zip(c[1:], s[1:], strict=True)
            ),
        ]

    return Language(words(), len(colours), len(shapes), draw)


def build_clip_tokenizer(known: Sequence[str] | None = None) -> CLIPTokenizer:
    """Byte-level BPE over the `known` words (None: the demo's). All UTF-8 text tokenizes; unknown
    words tokenize byte by byte.
    """
    bpe = Tokenizer(BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator([f"{word} {word}" for word in known or words()], trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = alphabet + [letter + "</w>" for letter in alphabet]
    tokens += [a + b for a, b in merges] + [_START, _END]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=_CLIP_LENGTH)


def build_t5_tokenizer(known: Sequence[str]) -> T5TokenizerFast:
    """Unigram over the `known` words in three cases, single characters, and <unk> for the rest."""
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -4.0}
    for word in known:
        for cased in (word, word.capitalize(), word.upper()):
            pieces.setdefault("▁" + cased, -5.0)
    for code in range(33, 127):
        pieces.setdefault(chr(code), -8.0)
    return T5TokenizerFast(vocab=list(pieces.items()), extra_ids=0, model_max_length=512)


def build_clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """An untrained CLIP text model; its pooled output is WIDTH wide."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_CLIP_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_t5(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    """An untrained T5 encoder, WIDTH wide."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=WIDTH,
            d_kv=16,
            d_ff=2 * WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
        )
    )


def train_text(folder: Path, language: Language, *, steps: int = 600, batch: int = 64) -> None:
    """Train both encoders to predict look and thing, and save all four parts under `folder`.

    The pooled CLIP output is pulled to one fixed code per look and thing for all wordings. So
    the transformer need not see every wording of every wish.
    """
    torch.manual_seed(0)
    clip_tokenizer = build_clip_tokenizer(language.words)
    t5_tokenizer = build_t5_tokenizer(language.words)
    clip, t5 = build_clip(clip_tokenizer), build_t5(t5_tokenizer)
    looks, things = language.looks, language.things
    codes = torch.randn(looks, things, 2, WIDTH)
    codes = (codes[:, :1, 0] + codes[:1, :, 1]) / 2**0.5  # code of a look plus code of a thing
    heads = nn.ModuleDict(
        {name: nn.Linear(WIDTH, looks + things) for name in ("clip", "t5", "t5_token")}
    )
    parameters = [*clip.parameters(), *t5.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    rng = np.random.default_rng(3)
    for step in range(steps):
        drawn = language.draw(rng, batch)
        prompts = [prompt for prompt, _, _ in drawn]
        look, thing = torch.tensor([numbers for _, *numbers in drawn]).unbind(1)
        pooled = clip(_clip_ids(clip_tokenizer, prompts)).pooler_output
        hidden = t5(_t5_ids(t5_tokenizer, prompts))[0]
        loss = functional.mse_loss(pooled, codes[look, thing])
        right = 0.0
        for name, features in (("clip", pooled), ("t5", hidden.mean(1)), ("t5_token", hidden)):
            logits = heads[name](features)
            look_, thing_ = look, thing
            if logits.ndim == 3:  # every token, padding too, knows the wish
                logits = logits.transpose(1, 2)
                look_, thing_ = (x[:, None].expand(-1, hidden.shape[1]) for x in (look, thing))
            part = functional.cross_entropy(logits[:, :looks], look_)
            part = part + functional.cross_entropy(logits[:, looks:], thing_)
            loss = loss + part * (0.2 if name == "t5_token" else 1.0)
            right = float((logits[:, looks:].argmax(1) == thing_).float().mean())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(
                f"text {step + 1}/{steps} loss {loss.item():.4f} things told {right:.0%}",
                flush=True,
            )
    trained = (clip.eval(), clip_tokenizer, t5.eval(), t5_tokenizer)
    for name, trained_part in zip(TEXT_PARTS, trained, strict=True):
        trained_part.save_pretrained(folder / name)


def _clip_ids(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    return tokenizer(
        prompts, padding="longest", truncation=True, max_length=48, return_tensors="pt"
    ).input_ids


def _t5_ids(tokenizer: T5TokenizerFast, prompts: list[str]) -> torch.Tensor:
    return tokenizer(
        prompts, padding="max_length", truncation=True, max_length=MAX_SEQUENCE_LENGTH,
        return_tensors="pt",
    ).input_ids  # fmt: skip
