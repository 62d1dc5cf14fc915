"""Measure whether pictures and prompts are encoded and decoded faster together than one by one.

Each call takes one item, or several at once. Both take turns, on one thread unless OMP_NUM_THREADS
says more. The defaults of `[stages] vae_batches` come from the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.machine import machine
from maskserve_benchmarks.timing import Timer
from maskserve_common.config import Config, ModelConfig
from maskserve_engine.families.registry import load_decoder, load_encoder

Work = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench vae_batches", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder")
    parser.add_argument("--sides", type=int, nargs="+", default=[128, 256], help="of pictures")
    parser.add_argument("--together", type=int, default=8, help="in one call")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    config = structs.replace(Config(), model=ModelConfig(path=str(args.model), torch_threads=1))
    encoder, decoder = load_encoder(config), load_decoder(config)
    rng, count, timer = np.random.default_rng(0), args.together, Timer(encoder.vae.device)
    rows = []

    def compare(work_name: str, side: int | None, together: Work, alone: Work) -> None:
        times_ms = _in_turn(timer, [together, alone], args.repeat)
        together_ms, alone_ms = (time_ms / count for time_ms in times_ms)
        rate = alone_ms / together_ms
        rows.append({"what": work_name, "side": side, "alone_ms": round(alone_ms, 3),
                     "together_ms": round(together_ms, 3), "rate": round(rate, 2)})  # fmt: skip
        print(f"{work_name:8}{side or '':>5}  alone {alone_ms:7.2f} ms, "
              f"of {count} together {together_ms:7.2f} ms: {rate:.2f}x")  # fmt: skip

    for side in args.sides:
        pixels = list(rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8))
        masks = [np.zeros((side, side), np.uint8)] * count
        edits = list(zip(pixels, masks, strict=True))
        encode = partial(encoder.all_masked_moments, edits)
        compare("encode", side, encode, partial(_one_by_one, encoder.all_masked_moments, edits))
        latents = [moments[: len(moments) // 2] for moments in map(encoder.moments, pixels)]
        decode = partial(decoder.decode_all, latents)
        compare("decode", side, decode, partial(_one_by_one, decoder.decode_all, latents))
    prompts = [f"{number} red stars" for number in range(count)]
    together = partial(encoder.encode_prompts, prompts)
    compare("prompts", None, together, partial(_one_by_one, encoder.encode_prompts, prompts))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


def _one_by_one(work: Callable[[list[Any]], object], items: list[Any]) -> None:
    for item in items:
        work([item])


def _in_turn(timer: Timer, works: list[Work], repeat: int) -> list[float]:
    """Median milliseconds of each work, taken in turn."""
    for work in works:
        work()
    rounds_ms = [[timer.ms(work) for work in works] for _ in range(repeat)]
    return [statistics.median(times) for times in zip(*rounds_ms, strict=True)]
