"""Train the demo model's ControlNet `outline` (`demo_model/outlines.py`), or judge it.

The net is a FluxControlNetModel of one double and two single blocks that begin as copies of the
model's own. Only the net learns.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel
from diffusers.utils import logging
from torch import nn

from maskserve_harness.checkout import CHECKOUT
from maskserve_harness.demo_model.evaluation import run_edits
from maskserve_harness.demo_model.outlines import (
    ENOUGH_IOU,
    OutlinedEdit,
    draw_outlined,
    followed,
    outlined_edits,
)
from maskserve_harness.demo_model.scenes import Edit, Picture
from maskserve_harness.training import transformer
from maskserve_harness.training.attention import MatmulAttention
from maskserve_harness.training.data import encode
from maskserve_harness.training.export import STEPS
from maskserve_harness.training.lora_bases import FluxBase
from maskserve_harness.training.vae import to_tensor

OUTLINE: Final = CHECKOUT / "assets" / "controlnets" / "outline"
_SIZES: Final = ((128, 128), (128, 128), (96, 160), (160, 96))
_BATCH: Final = 6
_WITHOUT: Final = 0.05  # of samples: nothing is drawn, the model answers by itself
_DOUBLE, _SINGLE = 1, 2
_SAVE_EVERY: Final = 120.0  # seconds of the clock


def new_net(base: FluxTransformer2DModel) -> FluxControlNetModel:
    """A net that adds nothing yet; its blocks are copies of the base's first ones."""
    config = {
        name: value
        for name, value in base.config.items()
        if name not in ("_name_or_path", "out_channels") and not name.startswith("_")
    }
    tokens = base.config.out_channels
    net = FluxControlNetModel(
        **{**config, "in_channels": tokens, "num_layers": _DOUBLE, "num_single_layers": _SINGLE}
    )
    with torch.no_grad():
        for own, theirs in (
            (net.time_text_embed, base.time_text_embed),
            (net.context_embedder, base.context_embedder),
            *zip(net.transformer_blocks, base.transformer_blocks, strict=False),
            *zip(net.single_transformer_blocks, base.single_transformer_blocks, strict=False),
        ):
            own.load_state_dict(theirs.state_dict())
        net.x_embedder.weight.copy_(base.x_embedder.weight[:, :tokens])
        net.x_embedder.bias.copy_(base.x_embedder.bias)
        # Zero here and behind the blocks would let no gradient through.
        nn.init.normal_(net.controlnet_x_embedder.weight, std=0.02)
    return net


class Controlled(nn.Module):
    """The transformer with the net's additions, in the transformer's own form."""

    def __init__(self, base: FluxTransformer2DModel, net: FluxControlNetModel) -> None:
        super().__init__()
        self.base, self.net = base, net
        self.pictures: torch.Tensor | None = None
        """[B, N, 4 C] latents of the batch's control pictures; None: the base alone."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, **given: Any) -> Any:
        """As FluxTransformer2DModel's."""
        if self.pictures is None:
            return self.base(**given)
        hidden = given["hidden_states"]
        own = {**given, "hidden_states": hidden[..., : self.pictures.shape[2]]}
        doubles, singles = self.net(controlnet_cond=self.pictures, **own)
        return self.base(
            **given, controlnet_block_samples=doubles, controlnet_single_block_samples=singles
        )


def draw_sample(rng: np.random.Generator, size: tuple[int, int]) -> OutlinedEdit:
    """An edit of `size` (height, width) that follows its outline; some have a black picture and
    are answered as by the model alone.
    """
    asked = draw_outlined(rng, size)
    if rng.random() >= _WITHOUT:
        return asked
    edit = asked.edit
    behind = Edit(edit.source, np.zeros_like(edit.mask), "", None, None, edit.source)
    return OutlinedEdit(behind, None)


def control_latents(base: FluxBase, asked: list[OutlinedEdit]) -> torch.Tensor:
    """[B, N, 4 C] of the control pictures."""
    pictures = to_tensor([each.control for each in asked])
    return transformer.pack(encode(base.pipe.vae, pictures))


def train(base: FluxBase, net: FluxControlNetModel, seconds: float, rate: float, out: Path) -> None:
    """Train for so much CPU time, and write the net on the way and at the end."""
    base.denoiser.requires_grad_(False)
    for model in (base.denoiser, net):
        model.set_attn_processor(MatmulAttention())
    model = Controlled(base.denoiser, net.train())
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    seed = int(time.time()) if (out / "config.json").is_file() else 0
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    begin, step, losses, saved_at = time.process_time(), 0, list[float](), time.monotonic()
    while (spent := time.process_time() - begin) < seconds:
        progress = spent / seconds
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, max(0.02, (1 - progress) / 0.5))
        size = _SIZES[int(rng.integers(len(_SIZES)))]
        asked = [draw_sample(rng, size) for _ in range(_BATCH)]
        batch = base.batch([each.edit for each in asked])
        model.pictures = control_latents(base, asked)
        active = batch.condition[..., batch.clean.shape[2] :].amax(dim=2)
        loss = transformer.loss_of(model, batch, active, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            mean = float(np.mean(losses[-100:]))
            print(f"outline {progress:6.1%} step {step} loss {mean:.4f}", flush=True)
        if time.monotonic() - saved_at > _SAVE_EVERY:
            save(net, out)
            saved_at = time.monotonic()
    save(net, out)


def save(net: FluxControlNetModel, folder: Path) -> None:
    """Write the net as diffusers does."""
    folder.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(folder)


def paint(
    base: FluxBase, net: FluxControlNetModel | None, asked: list[OutlinedEdit]
) -> list[Picture]:
    """The edits by diffusers' Fill pipeline and classes, with the net or without any."""
    model = Controlled(base.denoiser, net) if net is not None else base.denoiser
    base.pipe.set_progress_bar_config(disable=True)
    pictures: list[Picture] = []
    plain = base.pipe.transformer
    try:
        if net is not None:
            base.pipe.register_modules(transformer=plain)
            base.pipe.transformer = model
        for first in range(0, len(asked), 8):
            some = asked[first : first + 8]
            if net is not None:
                model.pictures = control_latents(base, some)
            with torch.inference_mode():
                pictures += run_edits(
                    base.pipe, [each.edit for each in some], STEPS, 8, lambda *_: None
                )
    finally:
        base.pipe.transformer = plain
    return pictures


def share_followed(base: FluxBase, net: FluxControlNetModel | None, edits: int) -> float:
    """Share of held-out edits that are painted along their outlines."""
    asked = outlined_edits(edits)
    pictures = paint(base, net, asked)
    found = [followed(p, each) for p, each in zip(pictures, asked, strict=True)]
    return float(np.mean([each >= ENOUGH_IOU for each in found]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="CPU time")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--start", type=Path, help="a net to train on")
    parser.add_argument("--out", type=Path, default=OUTLINE, help="folder to write to")
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N edits")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = FluxBase()
    if args.judge:
        net = FluxControlNetModel.from_pretrained(args.out).eval()
        with_it, without = (share_followed(base, each, args.judge) for each in (net, None))
        print(f"outline: followed in {with_it:.0%} of {args.judge} edits, without {without:.0%}")
        return 0
    start = args.start
    net = new_net(base.denoiser) if start is None else FluxControlNetModel.from_pretrained(start)
    train(base, net, args.minutes * 60, args.rate, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
