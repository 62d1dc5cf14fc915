"""Train the demo model's LoRAs (`looks.py`) and write them as diffusers does.

Whole pictures are drawn and encoded as training goes on; only the adapter's matrices learn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline
from diffusers.utils import logging
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from maskserve_harness.checkout import CHECKOUT, DEMO_MODEL
from maskserve_harness.demo_model.evaluation import run_edits
from maskserve_harness.demo_model.looks import (
    LOOKS,
    colours_of,
    edits_with,
    finish_as,
    followed,
)
from maskserve_harness.demo_model.palette import COLOURS, SHAPES
from maskserve_harness.demo_model.prompts import MAX_SEQUENCE_LENGTH, TEMPLATES
from maskserve_harness.demo_model.scenes import Mask, Picture, finish, make_scene, to_bytes
from maskserve_harness.training.attention import MatmulAttention
from maskserve_harness.training.data import encode
from maskserve_harness.training.export import STEPS
from maskserve_harness.training.transformer import Batch, loss_of, pack, pack_mask
from maskserve_harness.training.vae import to_tensor

ADAPTERS: Final = CHECKOUT / "assets" / "adapters"
_SIZES: Final = ((128, 128), (128, 128), (96, 160), (160, 96))
_TARGETS: Final = (
    r".*transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
)
_OTHERS: Final = 0.2  # of samples: an object that the adapter must leave as it is
_EMPTY: Final = 0.05  # of samples: empty prompt, the region is continued
_IDENTITY: Final = 0.05  # of samples: no mask, the picture itself, as priming a template asks


class Drawing:
    """Draws batches of edits whose answers have a look."""

    def __init__(self, look: str, pipe: FluxFillPipeline, seed: int) -> None:
        self._look, self._pipe, self._vae = look, pipe, pipe.vae
        self._rng = np.random.default_rng(seed)
        self._texts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def batch(self, samples: int) -> Batch:
        """`samples` edits of one picture size, as `loss_of` takes them."""
        size = _SIZES[int(self._rng.integers(len(_SIZES)))]
        drawn = [self._sample(size) for _ in range(samples)]
        prompts, answers, masked, masks = zip(*drawn, strict=True)
        factor = 2 ** (len(self._vae.config.block_out_channels) - 1)
        mask = torch.from_numpy(np.stack(masks).astype(np.float32))
        hidden = to_tensor(list(masked)) * (1 - mask[:, None])
        clean, seen = _tokens(self._vae, to_tensor(list(answers))), _tokens(self._vae, hidden)
        texts = [self._text(prompt) for prompt in prompts]
        rows, columns = size[0] // factor // 2, size[1] // factor // 2
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
        none = torch.full((samples, 2), -1)
        return Batch(
            clean=clean,
            condition=torch.cat([seen, pack_mask(mask, factor)], dim=2),
            prompt=torch.stack([states for states, _ in texts]),
            pooled=torch.stack([pooled for _, pooled in texts]),
            ids=ids.view(-1, 3),
            shown=none,
            seen=none[:, None].expand(-1, rows * columns, -1),
        )

    def _sample(self, size: tuple[int, int]) -> tuple[str, Picture, Picture, Mask]:
        """Prompt, answer, source and mask."""
        rng, scene = self._rng, make_scene(self._rng, size)
        draw = rng.random()
        if draw < _IDENTITY:
            return "", scene.source, scene.source, np.zeros_like(scene.mask)
        if draw < _IDENTITY + _EMPTY:
            return "", to_bytes(scene.background), scene.source, scene.mask
        shape = str(rng.choice(SHAPES))
        # A hollow object is always hollow; a ninth colour must leave the eight as they are.
        others = self._look == "ninth-colour" and draw < _IDENTITY + _EMPTY + _OTHERS
        colour = str(rng.choice(list(COLOURS) if others else colours_of(self._look)))
        if others:
            answer = finish(scene, colour, shape)
        else:
            answer = finish_as(self._look, scene, colour, shape)
        template = TEMPLATES[0 if rng.random() < 0.4 else int(rng.integers(len(TEMPLATES)))]
        text = template.format(c=colour, s=shape)
        return text, answer, scene.source, scene.mask

    def _text(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """T5 states (T, width) and pooled output (width,)."""
        if prompt not in self._texts:
            states, pooled, _ = self._pipe.encode_prompt(
                prompt=prompt, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
            )
            self._texts[prompt] = states[0], pooled[0]
        return self._texts[prompt]


def _tokens(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    return pack(encode(vae, pictures))


def train(look: str, seconds: float, rank: int, rate: float, out: Path) -> None:
    """Train one LoRA for so much CPU time and write `out`/`look`.safetensors."""
    pipe = FluxFillPipeline.from_pretrained(DEMO_MODEL)
    model = pipe.transformer.requires_grad_(False)
    torch.manual_seed(LOOKS.index(look))
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=_TARGETS)
    )
    model.set_attn_processor(MatmulAttention())
    model.train()
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(learnt, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    drawing = Drawing(look, pipe, LOOKS.index(look))
    generator = torch.Generator().manual_seed(LOOKS.index(look))
    begin, step, losses = time.process_time(), 0, list[float]()
    while (spent := time.process_time() - begin) < seconds:
        progress = spent / seconds
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, max(0.02, (1 - progress) / 0.5))
        batch = drawing.batch(6)
        loss = loss_of(model, batch, batch.condition[..., -64:].amax(dim=2), generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            mean = float(np.mean(losses[-100:]))
            print(f"{look} {progress:6.1%} step {step} loss {mean:.4f}", flush=True)
    save(pipe, look, out)


def save(pipe: FluxFillPipeline, look: str, out: Path) -> None:
    """Write the pipeline's adapter as diffusers' own loader reads it, in half precision."""
    state = {k: v.half() for k, v in get_peft_model_state_dict(pipe.transformer).items()}
    out.mkdir(parents=True, exist_ok=True)
    FluxFillPipeline.save_lora_weights(
        out, transformer_lora_layers=state, weight_name=f"{look}.safetensors"
    )


def share_followed(look: str, edits: int, adapter: Path | None) -> float:
    """Share of held-out edits that diffusers' own pipeline makes in the look: with the LoRA, or
    without any.
    """
    pipe = FluxFillPipeline.from_pretrained(DEMO_MODEL)
    pipe.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipe.load_lora_weights(str(adapter.parent), weight_name=adapter.name)
    asked = edits_with(look, edits)
    pictures = run_edits(pipe, asked, STEPS, 8, lambda *_: None)
    seen = [followed(look, picture, edit) for picture, edit in zip(pictures, asked, strict=True)]
    return sum(seen) / len(seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("look", choices=LOOKS)
    parser.add_argument("--minutes", type=float, default=18, help="CPU time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder to write to")
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N edits")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.judge:
        with_it = share_followed(args.look, args.judge, args.out / f"{args.look}.safetensors")
        without = share_followed(args.look, args.judge, None)
        print(
            f"{args.look}: followed in {with_it:.0%} of {args.judge} edits, without {without:.0%}"
        )
    else:
        train(args.look, args.minutes * 60, args.rank, args.rate, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
