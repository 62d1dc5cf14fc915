"""Count how often a worker's steps replay a CUDA graph while edits come and go. It needs no GPU.

Clients send edits of 1024x1024 with masks of the production mix, each a new one as soon as the last
is done. The engine's recorder (`batch.graphs`) and sizes (`batch.padding`, `unet.levels`) decide
which steps are recorded; nothing is computed. *First edits* have refresh steps, those of FLUX.2
klein and Qwen-Image where their control expects them; *hits* read a template. Prompts of Qwen-Image
have 8 to 512 tokens, short ones more often. A step replays if all its passes do; UNets' lookaheads,
and rows with tiles, are steps of their own.

    python scripts/bench recorded_steps --json docs/benchmarks/recorded-steps.json

`replayed` is the share of steps that replay a graph, `long` that of steps so long that they are not
recorded (`spec.mmdit.recorded_rows`), `sizes` the number of recorded steps, `pads`
the share of computed tokens that are pads (SDXL: of the FLOPs, with those of tiles), and `GiB` what
the recorded steps hold, which share their memory: the activations of the longest, and the largest
keys and values and inputs.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_benchmarks.perf.inputs import draw_ratios
from maskserve_benchmarks.published_models import FLUX_DEV, KLEIN_4B, QWEN_IMAGE, SDXL
from maskserve_benchmarks.reports import write_json
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.contracts.semantics import FILL, INPAINT, REFERENCE, Semantics
from maskserve_engine.batch.graphs import GraphPiece, Graphs, Inputs, Launcher
from maskserve_engine.batch.padding import Sizes
from maskserve_engine.batch.row_updates import slots_for
from maskserve_engine.families.flux.spec import REFRESH_STRIDES, flux_work
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.families.qwen_image import spec as qwen_image
from maskserve_engine.families.unet import spec as unet
from maskserve_engine.families.unet.levels import together_length
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.families.unet.tile import PARTS
from maskserve_engine.families.unet.tokens import ActiveTokens
from maskserve_engine.fitting.memory import peak_values
from maskserve_engine.layers.attention import bucket
from maskserve_engine.layers.shrink_expand import RANKS
from maskserve_engine.planning.flops import ModelWork, RowTokens
from maskserve_engine.planning.refresh_control import RefreshControl
from maskserve_engine.planning.refresh_steps import lookahead_steps_of, refresh_steps
from maskserve_engine.spec.family import StepPicture
from maskserve_engine.spec.mmdit import PRECOMPUTED_STEPS, RECORDED_ROWS, VECTORS_AT_ONCE
from maskserve_engine.spec.model_spec import RefreshSpec

IMAGE, TEXT, GRID, RING = 4096, 512, 64, 2
"""Tokens of a picture and of a prompt at most, tokens of a side, and the cached ring's width."""
SHORTEST = 8
"""Tokens of the shortest prompt, of models whose prompts have any length."""
FIDELITY = 40.0
"""Fidelity that a control of refresh steps keeps, in dB: a worker's default."""
SIDE, TOKEN, LEVELS, ATTENDS = 1024, 8, (16384, 4096, 1024), (1, 2)
"""SDXL's pixels of a side and of a token, tokens by level, and levels with attention."""
SDXL_TEXT = 77
LORAS, LORA_RANKS = 0.95, (4, 8, 16, 32, 64, 128)
"""Share of edits that have a LoRA, and their ranks."""
JOINED = 4
"""Layers of the product of a single block, which most slices of a LoRA change."""
EDITS = 400
_WORK = unet_work(SDXL, 2 * GRID, 2 * GRID, guidance=False, halo=1, recorded=True)
_WIDTHS = {block.level: block.width for block in _WORK.blocks}
"""Widths of SDXL's blocks by level."""
_NOTHING = RowTokens((), 0.0)


class Pass(NamedTuple):
    text: int
    image: int
    keys: int
    captured: bool = False


@dataclass
class Row:
    """An edit: image tokens of its mask, the same with the ring, and the steps done."""

    inner: int
    ringed: int
    step: int = 0
    text: int = TEXT
    """Tokens of its prompt."""
    exact: RowTokens = _NOTHING
    """Tokens, and positions of the tile, that a pass of a UNet needs."""
    padded: RowTokens = _NOTHING
    """Those that it computes."""
    tile: Hashable = ()
    """Sides of its tile at each level; empty: it has none."""
    slices: int = 0
    """Slices of its LoRA at the product of most layers."""


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
        sizes = sizes_in(self.shapes)
        if isinstance(sizes, UnetSizes):
            return sizes.common
        return isinstance(sizes, Sizes)

    def copied(self, inputs: Inputs) -> _Step:
        return _Step(self.shapes)

    def take(self, other: _Step, *, all_inputs: bool) -> None: ...

    def run(self, launcher: Launcher) -> Tensor:
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


def lora_rows(edits: int, rng: np.random.Generator) -> Iterator[Row]:
    """Yield the same edits, most of them with a LoRA (Katz §3)."""
    for row in rows_of(edits, rng):
        if rng.random() < LORAS:
            row.slices = JOINED * -(-int(rng.choice(LORA_RANKS)) // RANKS)
        yield row


class StepSizes(NamedTuple):
    """A step's work: computed tokens of FLUX, FLOPs of SDXL."""

    keys: tuple[Hashable, ...]
    """Shapes of the model calls in which it is recorded; empty: it is not."""
    needed: float = 0.0
    pads: float = 0.0
    """Work beside what is needed."""


class Schedule(NamedTuple):
    """Refresh steps of an edit: those that compute all tokens, and those that do by lookahead."""

    dense: frozenset[int]
    lookahead: frozenset[int]

    @classmethod
    def by_stride(cls, steps: int, *, stride: float, power: float, growth: float) -> Schedule:
        count = refresh_count(steps, stride)
        return cls._of(refresh_steps(count, _sigmas(steps), power, growth), delayed=False)

    @classmethod
    def expected(cls, steps: int, *, semantics: Semantics) -> Schedule:
        """Return the places that a control expects before it knows an error."""
        power = RefreshSpec().evenly_over
        control = RefreshControl.of(FIDELITY, _sigmas(steps), power, semantics)
        return cls._of(control.begin().refresh_steps | {0}, delayed=True)

    @classmethod
    def _of(cls, places: frozenset[int], *, delayed: bool) -> Schedule:
        dense = frozenset({0})
        return cls(dense, lookahead_steps_of(places, delayed=delayed) - dense)


def _sigmas(steps: int) -> list[float]:
    return [1.0 - step / steps for step in range(steps)]


@dataclass(frozen=True)
class FlowModel:
    """A flow-matching transformer, and how its rows step."""

    work: ModelWork
    inputs: int
    """Numbers of a token that the model reads."""
    widths: float
    """Numbers that a step with the package `triton` holds at once per token, as a multiple of the
    model's width; a test counts them."""
    draw: Callable[[int, np.random.Generator], Iterator[Row]] = rows_of
    text_varies: bool = False
    """`FlowRowMaker.text_varies`."""
    keeps_text: bool = True
    """Whether the steps of a hit, but for refresh steps, leave out its text."""
    longest: float = RECORDED_ROWS
    """Dense rows whose tokens the longest recorded step has."""

    @property
    def tokens(self) -> int:
        return self.work.tokens[0]

    def rows(self, edits: int, rng: np.random.Generator) -> Iterator[Row]:
        for row in self.draw(edits, rng):
            if self.text_varies:
                row.text = round(SHORTEST * (TEXT / SHORTEST) ** rng.random())
            yield row

    def passes_of(self, row: Row, schedule: Schedule, hit: bool) -> list[Pass]:
        """Return the passes of a row's next step."""
        keys = self.tokens + row.text
        if hit and not self.keeps_text:
            first = row.step == 0  # it corrects the entries
            return [Pass(row.text, self.tokens if first else row.inner, keys, captured=first)]
        refreshed = Pass(row.text, row.ringed if hit else self.tokens, keys, captured=True)
        if row.step in schedule.dense:
            return [refreshed]
        between = Pass(0, row.inner, keys)
        return [between, refreshed] if row.step in schedule.lookahead else [between]

    def key_of(self, passes: Sequence[Pass]) -> Hashable:
        """Return the shapes by which a step is recorded, as `FlowStep.shapes` does."""
        captured = any(one.captured for one in passes)
        if len(passes) == 1 and not captured and not self.text_varies:
            return passes[0]
        texts, images = [one.text for one in passes], [one.image for one in passes]
        return Sizes.of(texts, images, sum(one.keys for one in passes))

    def step(self, rows: Sequence[Row], schedule: Schedule, hit: bool) -> StepSizes:
        passes = [one for row in rows for one in self.passes_of(row, schedule, hit)]
        count, key = sum(one.text + one.image for one in passes), self.key_of(passes)
        if count > self.longest * max(one.keys for one in passes):
            return StepSizes(())
        pads = key.text + key.image - count if isinstance(key, Sizes) else 0
        slices = max(row.slices for row in rows)
        return StepSizes(((key, slots_for(slices)) if slices else key,), count, pads)

    def recorded_bytes(self, keys: Sequence[Hashable]) -> int:
        """Return the bytes that recorded steps hold in bfloat16 beside the weights."""
        sizes = [
            Sizes(1, key.text, key.image, key.keys) if isinstance(key, Pass) else key
            for key in keys
            if isinstance(key, Sizes | Pass)
        ]
        width, work = self.work.blocks[0].width, self.work
        activations = max(size.text + size.image for size in sizes) * self.widths * width
        placed = max(size.keys for size in sizes) * 2 * width
        vectors = work.peak_once / (VECTORS_AT_ONCE - PRECOMPUTED_STEPS)
        inputs = max(
            size.passes * vectors
            + size.text * width
            + (size.text + size.image) * 256
            + size.image * self.inputs
            for size in sizes
        )
        return round(2 * (activations + placed + inputs))


def sdxl_rows(edits: int, rng: np.random.Generator) -> Iterator[Row]:
    """Yield edits whose masks are rectangles of up to twice the height or width, anywhere."""
    for ratio in draw_ratios("production", edits, rng):
        aspect = 2.0 ** rng.uniform(-0.5, 0.5)
        height, width = (
            min(SIDE, max(TOKEN, round(SIDE * ratio**0.5 * by))) for by in (aspect, 1 / aspect)
        )
        top, left = (int(rng.integers(0, SIDE - side + 1)) for side in (height, width))
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[top : top + height, left : left + width] = 255
        exact, padded = (
            ActiveTokens.of(mask, TOKEN, len(LEVELS), ring=1, halo=0, buckets=buckets)
            for buckets in (False, True)
        )
        assert padded.refresh_tile is not None
        tile = tuple([level.box.shape for level in padded.refresh_tile])
        of_pass = padded.row(SDXL_TEXT, refreshes=True)
        yield Row(0, 0, exact=exact.row(SDXL_TEXT, refreshes=True), padded=of_pass, tile=tile)


def sdxl_step(rows: Sequence[Row], schedule: Schedule, hit: bool) -> StepSizes:
    """Rows have two passes each: classifier-free guidance."""
    refreshing = 0 if hit else 2 * sum(row.step in schedule.dense for row in rows)
    looking = 0 if hit else 2 * sum(row.step in schedule.lookahead for row in rows)
    rows = [row for row in rows if hit or row.step not in schedule.dense]
    exact, padded = [row.exact for row in rows], [row.padded for row in rows]
    # Each row by itself that has a tile or fills step caches.
    keys = [UnetSizes(refreshing=2)] if refreshing or looking else []
    if hit:  # without tiles
        exact, padded = ([replace(row, convolved=None) for row in of] for of in (exact, padded))
    padded = [_bucketed(row, 8 if hit else PARTS) for row in padded]
    if hit and len(rows) > 1:
        sums = [2 * sum(row.active[level] for row in exact) for level in ATTENDS]
        lengths = [
            together_length(int(count), LEVELS[level])
            for level, count in zip(ATTENDS, sums, strict=True)
        ]
        keys.append(UnetSizes(2 * len(rows), tuple(lengths)))
        longer = [1.0, *(most / count for most, count in zip(lengths, sums, strict=True))]
        padded = [
            replace(row, active=tuple([a * b for a, b in zip(row.active, longer, strict=True)]))
            for row in exact
        ]
    else:
        keys += [
            UnetSizes(2, pass_tokens.active[1:], () if hit else row.tile)
            for row, pass_tokens in zip(rows, padded, strict=True)
        ]
    needed, computed = (
        2 * _WORK.step_flops(of_rows) if of_rows else 0.0 for of_rows in (exact, padded)
    )
    whole = _WORK.step_flops([_WORK.row_at(1.0, SDXL_TEXT)], "dense")
    return StepSizes(tuple(keys), needed + (refreshing + looking) * whole, computed - needed)


def _bucketed(row: RowTokens, parts: int) -> RowTokens:
    counts = zip(row.active, row.convolved or LEVELS, strict=True)
    return replace(row, active=tuple([bucket(int(n), int(most), parts) for n, most in counts]))


class UnetSizes(NamedTuple):
    """Shapes by which a UNet's step is recorded, as `UnetStep.shapes` has them."""

    sparse: int = 0
    """Passes that compute some tokens."""
    computed: Hashable = ()
    tiles: Hashable = ()
    refreshing: int = 0
    """Passes that compute all tokens."""

    @property
    def passes(self) -> int:
        return self.sparse + self.refreshing

    @property
    def common(self) -> bool:
        return not self.sparse or self.sparse > 2 or bool(self.tiles)


@dataclass(frozen=True)
class SimulatedModel:
    """A model that is simulated."""

    rows: Callable[[int, np.random.Generator], Iterator[Row]]
    step: Callable[[Sequence[Row], Schedule, bool], StepSizes]
    recorded_bytes: Callable[[Sequence[Hashable]], int]
    """Bytes that recorded steps hold."""
    cases: tuple[tuple[int, int], ...]
    """Clients, and steps of their edits."""
    schedule: Callable[[int], Schedule]
    """Refresh steps of an edit of so many steps."""
    hits: bool = True
    """Whether it is simulated with templates, too."""


def simulate(
    model: SimulatedModel, clients: int, steps: int, *, hit: bool, seed: int = 0
) -> dict[str, float]:
    """Return the figures of one case; equal seeds give equal ones."""
    rng, drawn = np.random.default_rng(seed), random.Random(seed)
    schedule = model.schedule(steps)
    graphs, waiting = Graphs(_Capture()), model.rows(EDITS, rng)
    rows = list(islice(waiting, clients))
    for row in rows:
        row.step = drawn.randrange(steps)  # they came one after the other
    steps_run = replayed = long = 0
    needed = pads = 0.0
    while rows:
        sizes = model.step(rows, schedule, hit)
        steps_run += 1
        calls = list(map(_Step, sizes.keys))
        for call in calls:
            graphs.answer(call)
        replayed += bool(calls) and not any(call.ran for call in calls)
        long += not calls
        needed += sizes.needed
        pads += sizes.pads
        for row in rows:
            row.step += 1
        rows = [row for row in rows if row.step < steps]
        rows += islice(waiting, clients - len(rows))
    recorded = [sizes_in(key) for key, step in graphs._steps.items() if step is not None]
    return {
        "replayed": replayed / steps_run,
        "long": long / steps_run,
        "sizes": len(recorded),
        "pads": pads / max(1.0, needed + pads),
        "gib": model.recorded_bytes(recorded) / 2**30 if recorded else 0.0,
    }


def sizes_in(key: Hashable) -> Hashable:
    """Return the sizes of a key, which may have the slots of LoRAs beside them."""
    return key[0] if isinstance(key, tuple) and isinstance(key[0], tuple) else key


def sdxl_recorded_bytes(keys: Sequence[Hashable]) -> int:
    unet_sizes = [key for key in keys if isinstance(key, UnetSizes)]
    unet_passes = max(key.passes for key in unet_sizes)
    of_level = sum(LEVELS[level] * width for level, width in _WIDTHS.items())
    placed = 2 * unet_passes * of_level
    opened = _WORK.opened_row * max(key.refreshing for key in unet_sizes)
    return round(2 * (peak_values(_WORK, unet_passes, SDXL_TEXT) + placed + opened))


def _flow(
    model: FlowModel, schedule: Callable[[int], Schedule], *, hits: bool = True
) -> SimulatedModel:
    cases = (*product((1, 4), (28, 8, 4)), (8, 28), (8, 8))
    return SimulatedModel(model.rows, model.step, model.recorded_bytes, cases, schedule, hits)


FLOWS = {
    "FLUX.1": FlowModel(flux_work(FLUX_DEV, 2 * GRID, 2 * GRID), inputs=384, widths=9.3),
    "FLUX.2 klein 4B": FlowModel(
        flux2.count(KLEIN_4B, StepPicture(2 * GRID, 2 * GRID, references=1)),
        inputs=KLEIN_4B["in_channels"],
        widths=11.5,
    ),
    "Qwen-Image": FlowModel(
        qwen_image.count(QWEN_IMAGE, StepPicture(2 * GRID, 2 * GRID)),
        inputs=QWEN_IMAGE["in_channels"],
        widths=9.9,
        text_varies=True,
        keeps_text=False,
        longest=qwen_image.RECORDED_ROWS,
    ),
}
_FILL = partial(Schedule.by_stride, stride=REFRESH_STRIDES[FILL], power=1.5, growth=1.0)
MODELS = {
    "FLUX.1": _flow(FLOWS["FLUX.1"], _FILL),
    "FLUX.1 with LoRAs": _flow(replace(FLOWS["FLUX.1"], draw=lora_rows), _FILL),
    "FLUX.2 klein 4B": _flow(  # its edits read no template
        FLOWS["FLUX.2 klein 4B"], partial(Schedule.expected, semantics=REFERENCE), hits=False
    ),
    "Qwen-Image": _flow(FLOWS["Qwen-Image"], partial(Schedule.expected, semantics=INPAINT)),
    "SDXL": SimulatedModel(
        sdxl_rows,
        sdxl_step,
        sdxl_recorded_bytes,
        ((1, 50), (4, 50), (4, 28), (4, 8), (8, 50), (8, 28), (8, 8)),
        partial(Schedule.by_stride, stride=unet.REFRESH_STRIDES[INPAINT], power=0.85, growth=1.7),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it, too")
    parser.add_argument("--seed", type=int, default=0, help="of masks, prompts and arrivals")
    parser.add_argument("--model", default="", metavar="PATTERN", help="only models of such names")
    args = parser.parse_args()
    results = []
    print("| model | edits | clients | steps | replayed | long | sizes | pads | GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (name, model), hit in product(MODELS.items(), (False, True)):
        if (hit and not model.hits) or not re.search(args.model, name):
            continue
        for clients, steps in model.cases:
            figures = simulate(model, clients, steps, hit=hit, seed=args.seed)
            edits = "hits" if hit else "first edits"
            about = {"model": name, "edits": edits, "clients": clients, "steps": steps}
            results.append({**about, **figures})
            print(
                f"| {name} | {edits} | {clients} | {steps} | {figures['replayed']:.0%} "
                f"| {figures['long']:.0%} | {figures['sizes']} | {figures['pads']:.1%} "
                f"| {figures['gib']:.2f} |",
                flush=True,
            )
    write_json(results, args.json)
    return 0
