"""The tokenizer and the 28-layer text encoder of the demo edit model.

It is a Qwen3 as in FLUX.2 klein, 64 wide. Its states behind layers 9, 18 and 27 learn to predict
the object that a prompt names and the change to it. They do so at each token behind the prompt,
because a causal encoder does not know the whole prompt sooner. Then the encoder stays frozen.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from torch.nn import functional
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_studies.demo_model.reference_edits import (
    MAX_LENGTH,
    SIDES,
    NamedWish,
    draw_named_wish,
    make_object_scene,
    prompt_words,
)
from maskserve_studies.training.loop import Step, Training

WIDTH: Final = 64
LAYERS: Final = 28
ENCODER_LAYERS: Final = (9, 18, 27)
"""Layers whose states the transformer gets, as in FLUX.2 klein."""
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GROUPS: Final = (len(COLOURS), len(SHAPES), len(SIDES), len(COLOURS), len(SHAPES) + 1)
"""Numbers of classes of each label: the object's colour, shape and side, and its new colour and
shape. Each label has one more class for nothing.
"""


def build_tokenizer() -> Qwen2TokenizerFast:
    """Byte-level BPE over the prompts' words. All text tokenizes; unknown words tokenize byte by
    byte.
    """
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, show_progress=False)
    words = [*prompt_words(), "user", "assistant"]
    bpe.train_from_iterator([f"{w} {w} {w.capitalize()}" for w in words], trainer)
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=bpe,
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL[1:2]),
        model_max_length=512,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_encoder(tokenizer: Any) -> Qwen3ForCausalLM:
    """An untrained Qwen3. Its blocks begin near zero, so that this many blocks can learn."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1)
        for layer in model.model.layers:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight.normal_(0, 0.02)
    return model


def ids_of(tokenizer: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers and attention mask [P, MAX_LENGTH], as in the pipeline."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        for prompt in prompts
    ]
    encoded = tokenizer(
        texts, return_tensors="pt", padding="max_length", truncation=True, max_length=MAX_LENGTH
    )
    return encoded.input_ids, encoded.attention_mask


def states_of(encoder: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """States [P, MAX_LENGTH, WIDTH] after each layer of KEPT."""
    out = encoder.model(
        input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
    )
    return [out.hidden_states[layer] for layer in ENCODER_LAYERS]


def labels_of(wish: NamedWish | None) -> list[int]:
    """The labels of a prompt, in the order of _GROUPS; None: an empty prompt."""
    if wish is None:
        return list(_GROUPS)
    colours, shapes = list(COLOURS), [*SHAPES, None]
    (colour, shape, side), (to_colour, to_shape) = wish.name_parts, wish.changes
    return [
        colours.index(colour) if colour else _GROUPS[0],
        shapes.index(shape) if shape else _GROUPS[1],
        SIDES.index(side) if side else _GROUPS[2],
        colours.index(to_colour) if to_colour else _GROUPS[3],
        len(SHAPES) if wish.becomes is None else shapes.index(to_shape) if to_shape else _GROUPS[4],
    ]


def draw_wish(rng: np.random.Generator, scene: Any) -> NamedWish:
    """A random wish of the kinds and namings used in training."""
    kind = str(rng.choice(["both", "colour", "shape", "gone"], p=[0.64, 0.14, 0.14, 0.08]))
    return draw_named_wish(rng, scene, kind, side=rng.random() < 0.12)


def train_encoder(tokenizer: Any, encoder: Any, seconds: float, checkpoint: Any) -> None:
    """Train the encoder in place."""
    rng = np.random.default_rng(5)
    labelled_prompts: list[tuple[str, list[int]]] = [("", labels_of(None))] * 40
    for _ in range(2500):
        scene = make_object_scene(rng, (64, 96), 3)
        wish = draw_wish(rng, scene)
        labelled_prompts.append((wish.prompt, labels_of(wish)))
    ids, mask = ids_of(tokenizer, [prompt for prompt, _ in labelled_prompts])
    labels = torch.tensor([numbers for _, numbers in labelled_prompts])
    sizes = [n + 1 for n in _GROUPS]
    heads = nn.ModuleList([nn.Linear(WIDTH, sum(sizes)) for _ in ENCODER_LAYERS])
    module = nn.ModuleDict({"encoder": encoder, "heads": heads})
    right: list[float] = []

    def take(step: int, progress: float) -> Step:
        at = torch.from_numpy(rng.integers(len(ids), size=32))
        states = states_of(encoder, ids[at], mask[at])
        length = mask[at].sum(1)
        after_prompt = (torch.arange(MAX_LENGTH)[None] >= length[:, None] - 2).float()
        loss = torch.zeros(())
        for head, hidden in zip(heads, states, strict=True):
            parts = head(functional.layer_norm(hidden, (WIDTH,))).split(sizes, dim=-1)
            for group, logits in enumerate(parts):
                targets = labels[at, group][:, None].expand(-1, MAX_LENGTH)
                entropies = functional.cross_entropy(
                    logits.transpose(1, 2), targets, reduction="none"
                )
                loss = loss + (entropies * after_prompt).sum() / after_prompt.sum()
            right.append(
                float(
                    torch.stack(
                        [p[:, -1].argmax(1) == labels[at, g] for g, p in enumerate(parts)]
                    ).all(0).float().mean()
                )
            )  # fmt: skip
        return Step(loss, len(at), loss.item())

    optimiser = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.0)
    Training(
        "text", module, [optimiser], seconds, 2e-3, decay=0.7, checkpoint=checkpoint,
        report_every=25, report_text=lambda: f" all labels right {np.mean(right[-60:]):.0%}",
    ).run(take)  # fmt: skip
