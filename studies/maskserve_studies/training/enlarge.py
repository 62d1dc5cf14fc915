"""Train `enlarge`, a small Swin2SR that doubles a picture's sides, or judge it.

It learns from crops of the photographs, shrunk by half as Pillow's bicubic filter does, and of
drawn scenes. The judge is the photograph that training never sees, beside Lanczos.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional
from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution, Swin2SRImageProcessor

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.demo_model.scenes import HELD_OUT_PHOTO, PHOTOS, Picture
from maskserve_studies.demo_model.named_scenes import draw_named
from maskserve_studies.demo_model.node_judges import enlarge_db, halved
from maskserve_studies.training.loop import Step, Training, node_options
from maskserve_studies.training.muon import optimisers

FOLDER: Final = CHECKOUT / "assets" / "nodes" / "enlarge"
_CROP: Final = 32
"""Side of a small crop in pixels."""
_BATCH: Final = 8
_WIDTH: Final = 48
_NEIGHBOURS: Final = 27  # numbers of 3 x 3 pixels
_DRAWN: Final = 0.25  # share of crops from drawn scenes like the demo models' pictures
_SHRUNK: Final = 0.3
"""Share of shrunken photographs among the photographs' crops. They are sharper per pixel than the
photographs.
"""


def new_model(photos: list[Image.Image]) -> Swin2SRForImageSuperResolution:
    """A model that begins as the best linear filter of 5 x 5 pixels. The first convolution copies a
    pixel's neighbours, and the last one weighs them. The blocks learn to add to that.
    """
    model = Swin2SRForImageSuperResolution(
        Swin2SRConfig(
            image_size=_CROP,
            embed_dim=_WIDTH,
            depths=[2, 2, 2],
            num_heads=[4, 4, 4],
            window_size=8,
            drop_path_rate=0.0,
            upscale=2,
            upsampler="pixelshuffledirect",
        )
    )
    first, last, body = (
        model.swin2sr.first_convolution, model.upsample.conv, model.swin2sr.conv_after_body
    )  # fmt: skip
    rng = np.random.default_rng(12)
    large = [_crop(rng, photos) for _ in range(200)]
    mean = model.swin2sr.mean
    with torch.no_grad():
        first.weight[:_NEIGHBOURS] = torch.eye(_NEIGHBOURS).view(_NEIGHBOURS, 3, 3, 3)
        first.bias.zero_()
        body.weight.zero_()
        body.bias.zero_()
        small = _tensor([halved(crop) for crop in large]) - mean
        around = functional.unfold(small, 5).transpose(1, 2).reshape(-1, 75)
        targets = functional.pixel_unshuffle(_tensor(large) - mean, 2)[:, :, 2:-2, 2:-2]
        targets = targets.flatten(2).transpose(1, 2).reshape(-1, 12)
        # Float32 gives a worse answer than Lanczos, because neighbours are nearly equal.
        weight = torch.linalg.lstsq(around.double(), targets.double()).solution
        weight = weight.float().T.reshape(12, 3, 5, 5)
        # Each of the 3 x 3 places of the last convolution takes its nearest neighbours.
        last.weight.zero_()
        last.bias.zero_()
        for row in range(5):
            for column in range(5):
                y, x = min(max(row - 1, 0), 2), min(max(column - 1, 0), 2)
                for colour in range(3):
                    neighbour = 9 * colour + 3 * (row - y) + (column - x)
                    last.weight[:, neighbour, y, x] = weight[:, colour, row, column]
    return model


def _crop(rng: np.random.Generator, photos: list[Image.Image]) -> Picture:
    """A picture with sides of twice `_CROP`."""
    side = 2 * _CROP
    if rng.random() < _DRAWN:
        picture = draw_named(rng, (side, side)).picture
    else:
        photo = photos[int(rng.integers(len(photos)))]
        shrunk = rng.random() < _SHRUNK
        wide = int(side * rng.uniform(1.0, min(2.0, min(photo.size) / side))) if shrunk else side
        x, y = (int(rng.integers(length - wide + 1)) for length in photo.size)
        box = (x, y, x + wide, y + wide)
        picture = np.asarray(photo.resize((side, side), Image.Resampling.BICUBIC, box))
    picture = np.rot90(picture, int(rng.integers(4)))
    return np.ascontiguousarray(picture[:, ::-1] if rng.random() < 0.5 else picture)


def train(folder: Path, checkpoint: Path, seconds: float, rate: float) -> None:
    """Train for this much CPU time in all, and write the model on the way and at the end."""
    photos = [
        Image.open(path).convert("RGB")
        for path in sorted(PHOTOS.glob("*.jpg"))
        if path.name != HELD_OUT_PHOTO
    ]
    model = new_model(photos)
    layers = [m for m in model.swin2sr.encoder.modules() if isinstance(m, nn.Linear)]
    matrices = [p for layer in layers for p in layer.parameters() if p.ndim == 2]
    optimiser_pair = optimisers(model, matrices, rate, weight_decay=0.0, betas=(0.9, 0.999))

    def save() -> None:
        model.save_pretrained(folder)
        Swin2SRImageProcessor(do_pad=True, size_divisor=8).save_pretrained(folder)

    def take(step: int, progress: float) -> Step:
        rng = np.random.default_rng([13, step])
        large = [_crop(rng, photos) for _ in range(_BATCH)]
        enlarged = model(_tensor([halved(crop) for crop in large])).reconstruction
        wrong = (enlarged - _tensor(large)).square().mean(dim=(1, 2, 3))
        # The judged figure: decibels, where a flat crop counts as much as one full of edges.
        loss = (wrong + 1e-5).log().mean()
        return Step(loss, samples=_BATCH, value=-10 * loss.item() / np.log(10))

    Training(
        "enlarge", model, optimiser_pair, seconds, rate, warm_up=100, decay=0.6,
        checkpoint=checkpoint, save=save,
    ).run(take)  # fmt: skip


def _tensor(pictures: list[Picture]) -> torch.Tensor:
    """uint8 (H, W, 3) pictures as one float (B, 3, H, W) batch in 0..1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


def main() -> int:
    parser = node_options(__doc__.split("\n\n")[0], FOLDER, minutes=18, rate=1e-3)
    parser.add_argument("--judge", action="store_true", help="train nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.judge:
        model_db, lanczos = enlarge_db(args.out)
        print(f"enlarge: {model_db:.2f} dB, Lanczos {lanczos:.2f} dB on {HELD_OUT_PHOTO}")
        return 0
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train(args.out, args.checkpoint, args.minutes * 60, args.rate)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
