"""Draw ten edits of photographs with and without a window round the mask, side by side on one
sheet; or count how many edits of one photograph read a template.

    python scripts/bench windows --sheet docs/images/windows.png
    python scripts/bench windows --json docs/benchmarks/windows.json

The photographs are several times as large as the demo model's pictures. Without a window the model
sees the whole photograph, and its answer is enlarged. With a window it paints at the photograph's
own sharpness. Columns: the source with the mask outlined, `crop_to_mask` `off`, and `auto`.
`windows.hits` describes the figures.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, ImageDraw

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import PHOTOS
from maskserve_benchmarks.edits.direct import Direct
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_benchmarks.timing import hardware
from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_png
from maskserve_studies.windows.hits import EDITS, measure

_EDITS: Final = 10
_TILE: Final = 224
_GAP: Final = 6
Box = tuple[int, int, int, int]


def edits() -> list[tuple[Image.Image, Box, str]]:
    """Photographs, an ellipse's box in each, and prompts; each photograph has two edits."""
    photos = sorted(PHOTOS.glob("*.jpg"))
    drawn = []
    for number in range(_EDITS):
        rng = np.random.default_rng([8_100_000, number])
        with Image.open(photos[number % len(photos)]) as opened:
            photo = opened.convert("RGB")
        side = int(rng.uniform(0.2, 0.3) * min(photo.size))
        left, top = (int(rng.integers(side // 4, length - side * 5 // 4)) for length in photo.size)
        colour, shape = list(COLOURS)[number % len(COLOURS)], SHAPES[number % len(SHAPES)]
        drawn.append((photo, (left, top, left + side, top + side), f"a {colour} {shape}"))
    return drawn


def sheet(server: Direct) -> Image.Image:
    """Draw all edits, two in a row."""
    step = _TILE + _GAP
    page = Image.new("RGB", (6 * step + 2 * _GAP, _EDITS // 2 * (step + 14)), "white")
    draw = ImageDraw.Draw(page)
    for number, (photo, box, prompt) in enumerate(edits()):
        mask = Image.new("L", photo.size)
        ImageDraw.Draw(mask).ellipse(box, fill=255)
        source = encode_png(np.asarray(photo))
        outlined = photo.copy()
        ImageDraw.Draw(outlined).ellipse(box, outline="white", width=2)
        tiles = [outlined]
        for crop in ("off", "auto"):
            settings: dict[str, Any] = {"seed": number, "cache": "off", "crop_to_mask": crop}
            edit_inputs = source, encode_png(np.asarray(mask)), prompt
            tiles.append(Image.open(io.BytesIO(server.edit(edit_inputs, settings))))
        x = number % 2 * (3 * step + 2 * _GAP)
        y = number // 2 * (step + 14)
        for column, picture in enumerate(tiles):
            page.paste(_round(picture, box), (x + column * step, y))
        draw.text((x, y + _TILE + 1), f"{prompt}: source, off, auto", "black")
    return page


def _round(picture: Image.Image, box: Box) -> Image.Image:
    """The part of a picture round a box, enlarged without smoothing."""
    left, top, right, bottom = box
    rim = (right - left) // 4
    around = (left - rim, top - rim, right + rim, bottom + rim)
    return picture.convert("RGB").crop(around).resize((_TILE, _TILE), Image.Resampling.NEAREST)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--sheet", type=Path, help="PNG to write")
    result.add_argument("--json", type=Path, help="file for hits, seconds and windows")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="model folder")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that --json measures")
    args = parser.parse_args()
    if args.json is not None:
        ways = measure(args.model, args.rounds)
        report = {**about(hardware(torch.device("cpu"))), "edits": EDITS, "ways": ways}
        write_json(report, args.json)
        print(table(("way", *ways["windows"]), ((way, *of.values()) for way, of in ways.items())))
        return 0
    server = Direct(config_of({"model": {"path": args.model, "device": "cpu"}}))
    try:
        sheet(server).quantize(256).save(args.sheet, optimize=True)
    finally:
        server.engine.close(grace_s=1.0)
    print(args.sheet)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
