"""Tokenizers and two tiny text encoders that reveal colour and shape, then stay frozen."""

from __future__ import annotations

import json
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

from maskserve_harness.demo_model.palette import COLOURS, SHAPES
from maskserve_harness.demo_model.prompts import (
    MAX_SEQUENCE_LENGTH,
    SAME,
    first_phrase,
    phrase,
    words,
)

WIDTH: Final = 64
_CLIP_LENGTH: Final = 77
_START, _END = "<|startoftext|>", "<|endoftext|>"


def build_clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE over the demo's words: any UTF-8 text tokenizes, strangers byte by byte."""
    bpe = Tokenizer(BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=4096, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator([f"{word} {word}" for word in words()], trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    tokens = alphabet + [letter + "</w>" for letter in alphabet]
    tokens += [a + b for a, b in merges] + [_START, _END]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=_CLIP_LENGTH)


def build_t5_tokenizer() -> T5TokenizerFast:
    """Unigram over the demo's words in three cases, single characters, and <unk> for the rest."""
    pieces: dict[str, float] = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "▁": -4.0}
    for word in words():
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


def train_text(
    folder: Path, *, start: Path | None = None, steps: int = 600, batch: int = 64
) -> None:
    """Train both encoders to tell colour and shape, and save all four parts under `folder`.

    The pooled CLIP output is pulled to one fixed code per colour and shape, whatever the
    wording, so that the transformer need not see every wording of every wish. SAME is one more
    colour and one more shape. With `start`, a diffusers folder, its encoders are trained on,
    and what they say of wordings without SAME is kept.
    """
    torch.manual_seed(0)
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
    clip, t5 = build_clip(clip_tokenizer), build_t5(t5_tokenizer)
    colours, shapes = [*COLOURS, "", SAME], [*SHAPES, "", SAME]  # "" = no wish
    codes = torch.randn(len(colours), len(shapes), 2, WIDTH)
    codes = (codes[:, :1, 0] + codes[:1, :, 1]) / 2**0.5  # of a colour, plus of a shape
    teacher = None
    if start is not None:
        teacher = _Teacher(start)
        teacher.hand_on(clip, clip_tokenizer, t5, t5_tokenizer)
        codes = teacher.codes(codes)
    heads = nn.ModuleDict(
        {
            "clip": nn.Linear(WIDTH, len(colours) + len(shapes)),
            "t5": nn.Linear(WIDTH, len(colours) + len(shapes)),
            "t5_token": nn.Linear(WIDTH, len(colours) + len(shapes)),
        }
    )
    parameters = [*clip.parameters(), *t5.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    rng = np.random.default_rng(3)
    for step in range(steps):
        c = rng.integers(len(COLOURS), size=batch)
        s = rng.integers(len(SHAPES), size=batch)
        c[rng.random(batch) < 0.25] = len(COLOURS) + 1
        s[rng.random(batch) < 0.25] = len(SHAPES) + 1
        prompts = [
            phrase(rng, colours[i], shapes[j], noisy=True) for i, j in zip(c, s, strict=True)
        ]
        c[0], s[0], prompts[0] = len(COLOURS), len(SHAPES), ""
        pooled = clip(_clip_ids(clip_tokenizer, prompts)).pooler_output
        hidden = t5(_t5_ids(t5_tokenizer, prompts))[0]
        colour, shape = torch.from_numpy(c), torch.from_numpy(s)
        loss = functional.mse_loss(pooled, codes[colour, shape])
        for name, features in (("clip", pooled), ("t5", hidden.mean(1)), ("t5_token", hidden)):
            logits = heads[name](features)
            if logits.ndim == 3:  # every token, padding too, knows the wish
                logits = logits.transpose(1, 2)
                colour_, shape_ = (x[:, None].expand(-1, hidden.shape[1]) for x in (colour, shape))
            else:
                colour_, shape_ = colour, shape
            part = functional.cross_entropy(logits[:, : len(colours)], colour_)
            part = part + functional.cross_entropy(logits[:, len(colours) :], shape_)
            loss = loss + part * (0.2 if name == "t5_token" else 1.0)
        if teacher is not None:
            plain = torch.from_numpy((c <= len(COLOURS)) & (s <= len(SHAPES)))
            kept = [p for p, keep in zip(prompts, plain, strict=True) if keep]
            loss = loss + 20 * functional.mse_loss(hidden[plain], teacher.states(kept))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"text {step + 1}/{steps} loss {loss.item():.4f}", flush=True)
    clip.eval().save_pretrained(folder / "text_encoder")
    t5.eval().save_pretrained(folder / "text_encoder_2")
    clip_tokenizer.save_pretrained(folder / "tokenizer")
    t5_tokenizer.save_pretrained(folder / "tokenizer_2")


class _Teacher:
    """Trained encoders whose answers a larger vocabulary must keep."""

    def __init__(self, folder: Path) -> None:
        self._clip = CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
        self._clip_tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
        self._t5 = T5EncoderModel.from_pretrained(folder / "text_encoder_2").eval()
        self._t5_tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer_2")

    @torch.no_grad()
    def hand_on(
        self,
        clip: CLIPTextModel,
        clip_tokenizer: CLIPTokenizer,
        t5: T5EncoderModel,
        t5_tokenizer: T5TokenizerFast,
    ) -> None:
        """Copy all weights into untrained encoders; tokens only they know keep their own."""
        for old, old_tokenizer, new, new_tokenizer in (
            (self._clip, self._clip_tokenizer, clip, clip_tokenizer),
            (self._t5, self._t5_tokenizer, t5, t5_tokenizer),
        ):
            rows, known = new_tokenizer.get_vocab(), old_tokenizer.get_vocab()
            table = new.get_input_embeddings().weight.detach().clone()
            table *= old.get_input_embeddings().weight.std() / table.std()
            for token, row in rows.items():
                if token in known:
                    table[row] = old.get_input_embeddings().weight[known[token]]
            weights = old.state_dict()
            for name, weight in new.state_dict().items():
                if weight.shape == table.shape:
                    weights[name] = table
            new.load_state_dict(weights)

    @torch.no_grad()
    def codes(self, random: torch.Tensor) -> torch.Tensor:
        """Its pooled outputs (colours, shapes, WIDTH) by colour and shape, SAME's from `random`.

        The last colour and shape are SAME, those before them none at all.
        """
        wishes = [first_phrase(colour, shape) for colour in COLOURS for shape in SHAPES]
        pooled = self._clip(_clip_ids(self._clip_tokenizer, [*wishes, ""])).pooler_output
        known = pooled[:-1].view(len(COLOURS), len(SHAPES), WIDTH)
        mean = known.mean((0, 1))
        colour = torch.cat([known.mean(1) - mean, torch.zeros(1, WIDTH), random[-1:, 0]])
        shape = torch.cat([known.mean(0) - mean, torch.zeros(1, WIDTH), random[:1, -1]])
        for part in (colour, shape):
            part[-1] *= part[:-2].norm(dim=1).mean() / part[-1].norm()
        result = mean + colour[:, None] + shape[None, :]
        result[len(COLOURS), len(SHAPES)] = pooled[-1]
        return result

    @torch.no_grad()
    def states(self, prompts: list[str]) -> torch.Tensor:
        """T5 states (B, MAX_SEQUENCE_LENGTH, WIDTH)."""
        return self._t5(_t5_ids(self._t5_tokenizer, prompts))[0]


def _clip_ids(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    return tokenizer(
        prompts, padding="longest", truncation=True, max_length=48, return_tensors="pt"
    ).input_ids


def _t5_ids(tokenizer: T5TokenizerFast, prompts: list[str]) -> torch.Tensor:
    return tokenizer(
        prompts, padding="max_length", truncation=True, max_length=MAX_SEQUENCE_LENGTH,
        return_tensors="pt",
    ).input_ids  # fmt: skip
