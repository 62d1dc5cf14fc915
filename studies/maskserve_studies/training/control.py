"""Train the ControlNet `outline` (`demo_model/outlines.py`) of a demo model, or judge it.

The net begins as a copy of parts of the model. Only the net learns.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers.utils import logging

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.scenes import Edit, Picture, fill, to_bytes
from maskserve_studies.demo_model.outlines import (
    ENOUGH_IOU,
    OutlinedEdit,
    draw_outlined,
    outline_iou,
    outlined_edits,
)
from maskserve_studies.training.bases import BASES, Base, learn

NETS: Final = CHECKOUT / "assets" / "controlnets"
FOLDERS: Final = {"flux": NETS / "outline", "unet": NETS / "unet-outline"}
_BATCH: Final = {"flux": 6, "unet": 8}
_BLACK_SHARE: Final = 0.05  # share of samples without an outline, which the model answers alone
_EMPTY_SHARE: Final = (
    0.1  # share of guided models' samples without a prompt, which continue the region
)


def draw_sample(
    rng: np.random.Generator, size: tuple[int, int], *, guided: bool = False
) -> OutlinedEdit:
    """An edit of `size` (height, width) that follows its outline. Some edits have a black control
    picture and the answer of the model alone. Some edits of guided models have no prompt.
    """
    outlined_edit, draw = draw_outlined(rng, size), rng.random()
    edit = outlined_edit.edit
    if draw < _BLACK_SHARE:
        unchanged = Edit(edit.source, np.zeros_like(edit.mask), "", None, None, edit.source)
        return OutlinedEdit(unchanged, None)
    if guided and draw < _BLACK_SHARE + _EMPTY_SHARE:
        continued_picture = np.where(
            edit.mask[..., None], to_bytes(fill(edit.source, edit.mask)), edit.source
        )
        continuation = Edit(edit.source, edit.mask, "", None, None, continued_picture)
        return replace(outlined_edit, edit=continuation)
    return outlined_edit


def train(base: Base, net: Any, seconds: float, rate: float, out: Path, batch: int) -> None:
    """Train for this much CPU time, and write the net on the way and at the end."""
    base.ready_to_learn()
    net.set_attn_processor(base.attention())
    model = base.controlled(base.denoiser, net.train())

    def loss_of(
        rng: np.random.Generator, size: tuple[int, int], generator: torch.Generator
    ) -> torch.Tensor:
        outlined = [draw_sample(rng, size, guided=bool(base.guided)) for _ in range(batch)]
        model.pictures = base.controls([outlined_edit.control for outlined_edit in outlined])
        return base.loss(model, [outlined_edit.edit for outlined_edit in outlined], generator)

    seed = int(time.time()) if (out / "config.json").is_file() else 0
    learn("outline", net, loss_of, lambda: save(net, out), seed=seed, seconds=seconds, rate=rate)


def save(net: Any, folder: Path) -> None:
    """Write the net in diffusers' form."""
    folder.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(folder)


def paint(base: Base, net: Any | None, edits: list[OutlinedEdit]) -> list[Picture]:
    """Run the edits with diffusers' pipeline and classes, with the net or without one."""
    base.pipe.set_progress_bar_config(disable=True)
    pictures: list[Picture] = []
    model = None if net is None else base.controlled(base.denoiser, net)
    if model is not None:
        setattr(base.pipe, base.part, model)
    try:
        for first in range(0, len(edits), 8):
            batch = edits[first : first + 8]
            if model is not None:
                model.pictures = base.controls([outlined_edit.control for outlined_edit in batch])
            pictures += base.edit([outlined_edit.edit for outlined_edit in batch])
    finally:
        setattr(base.pipe, base.part, base.denoiser)
    return pictures


def share_followed(base: Base, net: Any | None, edits: int) -> float:
    """Share of held-out edits whose objects follow their outlines."""
    outlined = outlined_edits(edits)
    pictures = paint(base, net, outlined)
    ious = [outline_iou(p, item) for p, item in zip(pictures, outlined, strict=True)]
    return float(np.mean([item >= ENOUGH_IOU for item in ious]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", choices=tuple(BASES), default="flux", help="the demo model")
    parser.add_argument("--minutes", type=float, default=60, help="CPU time")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--start", type=Path, help="a net to train on")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("--judge", type=int, metavar="N", help="train nothing; judge N edits")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base, out = BASES[args.base](), args.out or FOLDERS[args.base]
    if args.judge:
        net = base.net_class.from_pretrained(out).eval()
        net_share, base_share = (
            share_followed(base, control_net, args.judge) for control_net in (net, None)
        )
        print(
            f"outline: followed in {net_share:.0%} of {args.judge} edits, without {base_share:.0%}"
        )
        return 0
    net = base.new_net() if args.start is None else base.net_class.from_pretrained(args.start)
    train(base, net, args.minutes * 60, args.rate, out, _BATCH[args.base])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
