"""Count how often a worker's steps replay a CUDA graph while edits come and go. It needs no GPU.

Clients send FLUX.1 Fill edits of 1024x1024 with masks of the production mix, each a new one as soon
as the last is done. The engine's recorder (`batch.graphs`) and sizes (`batch.padding`) decide which
steps are recorded; nothing is computed. *First edits* have refresh steps, *hits* read a template.

    python scripts/bench recorded_steps --json docs/benchmarks/recorded-steps.json

`replayed` is the share of steps that replay a graph, `sizes` the number of recorded steps, `pads`
the share of computed tokens that are pads, and `GiB` what the recorded steps hold, which share
their memory: the activations of the longest, and the largest keys and values and inputs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_benchmarks.perf.inputs import draw_ratios
from maskserve_benchmarks.published_models import FLUX_DEV
from maskserve_benchmarks.reports import write_json
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.contracts.semantics import FILL
from maskserve_engine.batch.graphs import AtOnce, GraphPiece, Graphs, Inputs
from maskserve_engine.batch.padding import Sizes
from maskserve_engine.families.flux.spec import RECORDED_ROWS, REFRESH_STRIDES, flux_work
from maskserve_engine.fitting.memory import peak_values
from maskserve_engine.layers.attention import bucket
from maskserve_engine.planning.refresh_steps import lookahead_steps_of, refresh_steps

IMAGE, TEXT, GRID, RING = 4096, 512, 64, 2
"""Tokens of a picture and of a prompt, tokens of a side, and the cached ring's width."""
WIDTH, BLOCKS = 3072, (19, 38)
"""FLUX.1's width, and its numbers of double and single blocks."""
EDITS = 400
CASES = ((1, 28), (4, 28), (4, 8), (8, 28), (8, 8))
"""Clients, and steps of their edits."""


class Pass(NamedTuple):
    text: int
    image: int
    captured: bool = False


@dataclass
class Row:
    """An edit: image tokens of its mask, the same with the ring, and the steps done."""

    inner: int
    ringed: int
    step: int = 0


class _Piece:
    def replay(self) -> None: ...


class _Capture:
    checks = False

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None: ...

    def end(self) -> GraphPiece:
        return _Piece()


class _Step:
    """A step of which only the sizes count."""

    def __init__(self, shapes: Hashable) -> None:
        self.shapes, self.packed, self.ran = shapes, self, False

    @property
    def common(self) -> bool:
        return isinstance(self.shapes, Sizes)

    def copied(self, inputs: Inputs) -> _Step:
        return _Step(self.shapes)

    def take(self, other: _Step, *, anew: bool) -> None: ...

    def run(self, asking: AtOnce) -> Tensor:
        self.ran = True
        return torch.empty(0)

    def answer_of(self, recorded: Tensor) -> Tensor:
        return recorded


def rows_of(edits: int, rng: np.random.Generator) -> Iterator[Row]:
    for ratio in draw_ratios("production", edits, rng):
        side = max(1.0, GRID * ratio**0.5)
        inner, ringed = (min(IMAGE, round((side + 2 * ring) ** 2)) for ring in (0, RING))
        inner = bucket(inner, IMAGE)
        yield Row(inner, max(inner, ringed))


def passes_of(row: Row, dense: frozenset[int], lookahead: frozenset[int], hit: bool) -> list[Pass]:
    """Return the passes of a row's next step."""
    refreshed = Pass(TEXT, row.ringed if hit else IMAGE, captured=True)
    if row.step in dense:
        return [refreshed]
    between = Pass(0, row.inner)
    return [between, refreshed] if row.step in lookahead else [between]


def key_of(passes: Sequence[Pass]) -> Hashable:
    """Return the shapes by which a step is recorded, as `FlowStep.shapes` does."""
    captured = any(one.captured for one in passes)
    if len(passes) == 1 and not captured:
        return passes[0]
    texts, images = [one.text for one in passes], [one.image for one in passes]
    return Sizes.of(texts, images, len(passes) * (IMAGE + TEXT))


def simulate(clients: int, steps: int, *, hit: bool, seed: int = 0) -> dict[str, float]:
    """Return the figures of one case; equal seeds give equal ones."""
    rng, drawn = np.random.default_rng(seed), random.Random(seed)
    sigmas = np.linspace(1.0, 0.0, steps, endpoint=False).tolist()
    anchors = refresh_steps(refresh_count(steps, REFRESH_STRIDES[FILL]), sigmas, 1.5, 1.0)
    dense = frozenset({0})
    lookahead = lookahead_steps_of(anchors) - dense
    graphs, waiting = Graphs(_Capture()), rows_of(EDITS, rng)
    rows = [row for row, _ in zip(waiting, range(clients), strict=False)]
    for row in rows:
        row.step = drawn.randrange(steps)  # they came one after the other
    steps_run = replayed = tokens = pads = 0
    while rows:
        passes = [one for row in rows for one in passes_of(row, dense, lookahead, hit)]
        count, key = sum(one.text + one.image for one in passes), key_of(passes)
        steps_run += 1
        if count <= RECORDED_ROWS * (IMAGE + TEXT):
            step = _Step(key)
            graphs.answer(step)
            replayed += not step.ran
            tokens += count
            pads += key.text + key.image - count if isinstance(key, Sizes) else 0
        for row in rows:
            row.step += 1
        rows = [row for row in rows if row.step < steps]
        rows += [row for row, _ in zip(waiting, range(clients - len(rows)), strict=False)]
    recorded = [key for key, step in graphs._steps.items() if step is not None]
    return {
        "replayed": replayed / steps_run,
        "sizes": len(recorded),
        "pads": pads / tokens,
        "gib": recorded_bytes(recorded) / 2**30,
    }


def recorded_bytes(keys: Sequence[Hashable]) -> int:
    """Return the bytes that recorded steps of FLUX.1 hold in bfloat16 beside the weights."""
    sizes = [
        key if isinstance(key, Sizes) else Sizes(1, key.text, key.image, IMAGE + TEXT)
        for key in keys
        if isinstance(key, Sizes | Pass)
    ]
    values = peak_values(flux_work(FLUX_DEV, 2 * GRID, 2 * GRID), 1, TEXT) / (IMAGE + TEXT)
    activations = max(size.text + size.image for size in sizes) * values
    placed = max(size.keys for size in sizes) * 2 * WIDTH
    vectors = WIDTH * (12 * BLOCKS[0] + 3 * BLOCKS[1] + 2)
    inputs = max(
        size.passes * vectors
        + size.text * WIDTH
        + (size.text + size.image) * 256
        + size.image * 384
        for size in sizes
    )
    return round(2 * (activations + placed + inputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it, too")
    args = parser.parse_args()
    results = []
    print("| edits | clients | steps | replayed | sizes | pads | GiB |")
    print("|---|---|---|---|---|---|---|")
    for hit in (False, True):
        for clients, steps in CASES:
            figures = simulate(clients, steps, hit=hit)
            name = "hits" if hit else "first edits"
            results.append({"edits": name, "clients": clients, "steps": steps, **figures})
            print(
                f"| {name} | {clients} | {steps} | {figures['replayed']:.0%} "
                f"| {figures['sizes']} | {figures['pads']:.1%} | {figures['gib']:.2f} |",
                flush=True,
            )
    write_json(results, args.json)
    return 0
