"""Measure the quality that decoding only round the mask costs, against the demo model's whole
decode.

The edits are held out: some have the demo model's own masks, others have one to three boxes. The
latents are the template's outside of the computed tokens, and another picture's inside, as after
the last step of a cached edit. For each halo, with and without probes: PSNR in the mask, and the
share of the VAE that runs. For the default halo also the mean difference over the distance from the
piece's rim: a seam would show as a rise towards the rim.

    python scripts/bench pieces --json docs/benchmarks/pieces.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_benchmarks.machine import machine
from maskserve_common.config import StagesConfig
from maskserve_common.config_file import config_of
from maskserve_common.imaging.masks import active_tokens, component_boxes
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_decoder, load_encoder
from maskserve_engine.stages.decode import Decoder
from maskserve_engine.stages.latents import to_model
from maskserve_engine.stages.vae_pieces import Pieces, PixelBox

Pixels = NDArray[np.uint8]
HALOS = (1, 2, 3, 4)
DEFAULT = StagesConfig().decode_halo
_SIDE, _TOKEN, _LATENT, _RING = 128, 8, 4, 1
_WHOLE_FROM = 0.7
"""Largest share of the picture that is decoded in pieces; beyond it the whole picture is decoded,
as in a worker.
"""


class Scene:
    """One edit after its last step.

    Args:
        encoder: of the demo model.
        decoder: of the demo model.
        source: the template.
        answer: the painted picture.
        mask: 255 in the edited region.
    """

    def __init__(
        self, encoder: Encoder, decoder: Decoder, source: Pixels, answer: Pixels, mask: Pixels
    ) -> None:
        self.decoder, self.mask = decoder, mask > 0
        space, side = decoder.latents, _SIDE // _TOKEN

        def latents(pixels: Pixels) -> NDArray[np.float32]:
            moments = encoder.moments(pixels)
            mean = torch.from_numpy(moments[: len(moments) // 2])
            scaled: NDArray[np.float32] = to_model(mean, space).numpy()
            return scaled

        active = np.zeros(side * side, bool)
        active[active_tokens(mask, _TOKEN, _RING)] = True
        grid = active.reshape(side, side).repeat(2, 0).repeat(2, 1)
        template = latents(source)
        self.latents = np.where(grid, latents(answer), template).astype(np.float32)
        self.sums = decoder.sums(template)
        self.whole = decoder.decode(self.latents)
        self.boxes = [PixelBox(*box).shrunk(_LATENT) for box in component_boxes(mask, _TOKEN)]

    def pieces(self, halo: int) -> Pieces:
        side = _SIDE // _LATENT
        return self.decoder.pieces(self.boxes, (side, side), halo=halo, spread=2 * _RING + 1)

    def difference(self, pieces: Pieces) -> NDArray[np.float64]:
        """[pixels in the mask, 3] difference from the whole decode, in levels."""
        part = self.decoder.decode_pieces(self.latents, pieces, self.sums)
        levels: NDArray[np.float64] = part[self.mask].astype(float) - self.whole[self.mask]
        return levels

    def distance(self, pieces: Pieces) -> NDArray[np.int64]:
        """[pixels in the mask] distance from the nearest rim of a piece inside of the picture."""
        rims = np.full((_SIDE, _SIDE), _SIDE)
        y, x = np.mgrid[:_SIDE, :_SIDE]
        for box in pieces.edited_boxes:
            top, left, bottom, right = pieces.outer(box, 2)
            sides = (
                (y - top, top > 0),
                (bottom - 1 - y, bottom < _SIDE),
                (x - left, left > 0),
                (right - 1 - x, right < _SIDE),
            )
            near = np.min([np.where(inner, far, _SIDE) for far, inner in sides], axis=0)
            rims[top:bottom, left:right] = near[top:bottom, left:right]
        return rims[self.mask]


def psnr(difference: NDArray[np.float64]) -> float:
    return float(10 * np.log10(255**2 / max(1e-9, float(np.square(difference).mean()))))


def boxes_mask(rng: np.random.Generator) -> Pixels:
    """A mask of one to three boxes."""
    mask = np.zeros((_SIDE, _SIDE), np.uint8)
    for _ in range(int(rng.integers(1, 4))):
        top, left = (int(n) for n in rng.integers(0, _SIDE - 16, 2))
        high, wide = (int(n) for n in rng.integers(4, 40, 2))
        mask[top : top + high, left : left + wide] = 255
    return mask


def make_scenes(count: int) -> list[Scene]:
    """Half of the scenes have the demo model's masks and right answers. The others have boxes and
    other edits' answers.
    """
    config = config_of({"model": {"path": str(DEMO_MODEL)}})
    encoder, decoder = load_encoder(config), load_decoder(config)
    edits, rng = held_out_edits(count), np.random.default_rng(0)
    scenes = []
    for number, edit in enumerate(edits):
        uses_target = number % 2 == 0
        answer = edit.target if uses_target else edits[(number + 7) % count].target
        mask = edit.mask * np.uint8(255) if uses_target else boxes_mask(rng)
        scenes.append(Scene(encoder, decoder, edit.source, answer, mask))
    return scenes


def row_of(scenes: list[Scene], halo: int, *, probes: bool) -> dict[str, Any]:
    """Figures of the edits that a worker would decode in pieces."""
    psnrs, shares = [], []
    for scene in scenes:
        pieces = scene.pieces(halo)
        if pieces.share < _WHOLE_FROM:
            used = pieces if probes else replace(pieces, probes=())
            psnrs.append(psnr(scene.difference(used)))
            shares.append(used.share)
    return {
        "halo": halo,
        "probes": probes,
        "edits": len(psnrs),
        "share": round(float(np.mean(shares)), 3),
        "psnr_median": round(float(np.median(psnrs)), 1),
        "psnr_p5": round(float(np.percentile(psnrs, 5)), 1),
        "psnr_worst": round(min(psnrs), 1),
    }


def seam_of(scenes: list[Scene], halo: int) -> list[dict[str, Any]]:
    """Mean difference in levels, by distance from the piece's rim in pixels."""
    levels, distances = [], []
    for scene in scenes:
        pieces = scene.pieces(halo)
        if pieces.share < _WHOLE_FROM:
            levels.append(np.abs(scene.difference(pieces)).mean(axis=1))
            distances.append(scene.distance(pieces))
    level, distance = np.concatenate(levels), np.concatenate(distances)
    bands = []
    for low, high in ((0, 2), (2, 3), (3, 4), (4, 6), (6, 8), (8, 12), (12, 16), (16, 24)):
        in_band = (distance >= low) & (distance < high)
        if in_band.any():
            mean = round(float(level[in_band].mean()), 3)
            bands.append(
                {"from_px": low, "to_px": high, "pixels": int(in_band.sum()), "levels": mean}
            )
    return bands


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--edits", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    scenes = make_scenes(args.edits)
    rows = [row_of(scenes, halo, probes=True) for halo in HALOS]
    rows.append(row_of(scenes, DEFAULT, probes=False))
    report = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": machine(),
        "halos": rows,
        "seam": seam_of(scenes, DEFAULT),
    }
    for row in (*rows, *report["seam"]):
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
