"""Edits of models at every size of mask and number of steps, through a real Triton: each ends with
a picture, or with a sentence that names what was wrong.

Pictures are drawn anew for each edit, so no template is there, and then sent again with `cache:
require`, so each is read from one. Exits with 1 if an answer is the server's fault.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maskserve_client import Client, MaskserveError
from maskserve_common.errors import InvalidRequest
from maskserve_harness.checkout import CHECKOUT
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

MODELS = ("demo", "demo-edit", "demo-unet")
RATIOS = (0.05, 0.2, 0.35, 0.5, 0.56, 0.6, 0.69, 0.75, 0.81, 0.9, 1.0)
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 20, 50)
CACHES = ("auto", "require")
_TIMEOUT_S = 300.0


class Ended(NamedTuple):
    """How one edit ended."""

    ratio: float
    steps: int
    cache: str
    way: str
    """META's `cache` and `dense_for`, or the error's code."""
    sentence: str = ""
    fault: bool = False
    """Whether it was the server's."""


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="scripts/bench every_edit", description=__doc__)
    add = parser.add_argument
    folders = [CHECKOUT / "assets/models" / name for name in MODELS]
    add("--models", type=Path, nargs="+", default=folders, help="model folders (default: demo's)")
    add("--ratios", type=float, nargs="+", default=RATIOS, help="shares of the picture masked")
    add("--steps", type=int, nargs="+", default=STEPS, help="numbers of denoising steps")
    add("--caches", nargs="+", default=CACHES, help="values of the setting `cache`")
    add("--size", type=int, default=128, help="side of the pictures, in pixels")
    add("--seed", type=int, default=0, help="of the pictures")
    add("--json", type=Path, help="a file for all that ended")
    args = parser.parse_args()
    every: dict[str, list[Ended]] = {}
    for folder in args.models:
        ends = every[folder.name] = list(edits(folder, args))
        _print(folder.name, ends)
    if args.json:
        rows = {name: [end._asdict() for end in ends] for name, ends in every.items()}
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(end.fault for ends in every.values() for end in ends))


def edits(folder: Path, args: argparse.Namespace) -> Iterator[Ended]:
    """Serve a model and edit drawn pictures of it."""
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as logs:
        options = ServeOptions(
            model=str(folder), base_port=free_base_port(), log_dir=Path(logs), name=folder.name
        )
        with Supervisor(options) as site, Client(site.workers[0].grpc_url) as client:
            for steps in args.steps:
                for ratio in args.ratios:
                    source = Image.fromarray(_picture(rng, args.size))
                    mask = Image.fromarray(square_mask(args.size, ratio))
                    for cache in args.caches:
                        yield _edit(client, source, mask, ratio, steps, cache)


def _edit(
    client: Client, source: Image.Image, mask: Image.Image, ratio: float, steps: int, cache: str
) -> Ended:
    try:
        result = client.edit(
            source,
            mask,
            "a red star",
            timeout=_TIMEOUT_S,
            seed=1,
            num_inference_steps=steps,
            cache=cache,
        )
    except MaskserveError as error:
        refused = isinstance(error, InvalidRequest)
        return Ended(ratio, steps, cache, error.code, str(error), fault=not refused)
    meta = result.meta
    return Ended(ratio, steps, cache, " ".join((meta["cache"], meta.get("dense_for", ""))).strip())


def square_mask(side: int, ratio: float) -> NDArray[np.uint8]:
    """A centred square of so large a share of a square picture, [side, side], 255 where it is."""
    mask = np.zeros((side, side), np.uint8)
    length = round(side * ratio**0.5)
    begin = (side - length) // 2
    mask[begin : begin + length, begin : begin + length] = 255
    return mask


def _picture(rng: np.random.Generator, side: int) -> NDArray[np.uint8]:
    """Smooth noise, [side, side, 3]."""
    rough = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
    return np.asarray(rough.resize((side, side), Image.Resampling.BICUBIC))


def _print(name: str, ends: list[Ended]) -> None:
    ways = Counter((end.cache, end.way) for end in ends)
    print(f"{name}: {len(ends)} edits, {sum(end.fault for end in ends)} faults of the server")
    for (cache, way), count in sorted(ways.items()):
        print(f"  cache: {cache}: {count} {way}")
    for sentence in sorted({end.sentence for end in ends if end.sentence}):
        print(f"  {sentence}")
