"""Estimate edits on common GPUs, by model, form of the weights and attention, and compare them with
a server that computes all tokens. Nobody measured it.

Counted: FLOPs, the bytes that kernels move, and launches (as in `gpu_estimate`). Measured on an
H200: T5 and FLUX's VAE, scaled by the peaks of other cards; SDXL's VAE has the same layers.
Assumed: the data sheets' peaks and the shares of them that are reached, by card. Fewer tokens reach
less, because the tiles of products do not divide them evenly (`tile_use`). The dense server takes
the lesser of two times: a published time, or the time of our own dense kernels in the faster of
bfloat16 and FP8.

The second table has FLUX.1 at 28, 8 and 4 steps beside crop and stitch, the dense server, and that
server with FirstBlockCache.

    python scripts/bench gpu_cards
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from maskserve_benchmarks.published_models import FLUX_DEV, SDXL
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.contracts.semantics import FILL
from maskserve_engine.families.flux.spec import REFRESH_STRIDES as FLUX_STRIDES
from maskserve_engine.families.flux.spec import flux_work
from maskserve_engine.families.unet.spec import REFRESH_STRIDES as UNET_STRIDES
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.planning.entry_bytes import EntryFormat, block_bytes, end_bytes
from maskserve_engine.planning.flops import TERMS, ModelWork
from maskserve_studies.kernels.kernel_counts import (
    NEEDED,
    SDXL_GUIDED,
    TABLE,
    Case,
    moved_bytes,
    unet_step,
)
from maskserve_studies.kernels.launch_log import WEIGHTS


class Published(NamedTuple):
    """A dense step of FLUX.1-dev at 1024x1024 that others have measured on a card."""

    ms: float
    form: str
    """Form of the weights."""
    source: str


class Card(NamedTuple):
    """A GPU, by its data sheet: FLOP/s without sparsity, summed in float32."""

    name: str
    half: float
    """FLOP/s in bfloat16."""
    fp8: float
    """FLOP/s in FP8. GeForce cards reach twice as much when they sum in float16."""
    bytes_per_s: float
    """Bytes of its memory per second."""
    memory_gb: float
    """GB of its memory."""
    multiprocessors: int
    products_reached: float
    """Share of the peak that a dense step's products reach."""
    attention: Mapping[str, float]
    """Attention kernels that exist for the card, each with the share of the bfloat16 peak that it
    reaches.
    """
    published: Published | None = None


_FP8_API = "aredden/flux-fp8-api, README at 138a97c, compiled"
_DIFFUSERS = "huggingface.co/datasets/diffusers/benchmarks at 152f7ca, compiled"
H100 = Card("H100 SXM", 989e12, 1979e12, 3.35e12, 80, 132, 0.6, {"cuDNN": 0.65, "FA3": 0.7},
            Published(1e3 / 11.5, "fp8", _FP8_API))  # fmt: skip
RTX_4090 = Card("RTX 4090", 165e12, 660e12, 1.008e12, 24, 128, 0.55, {"FA2": 0.85},
                Published(1e3 / 3.51, "fp8", _FP8_API))  # fmt: skip
CARDS = (
    H100,
    H100._replace(name="H200", bytes_per_s=4.8e12, memory_gb=141, published=None),
    Card("B200", 2250e12, 4500e12, 8e12, 180, 148, 0.6, {"FA4": 0.6}),
    Card("L40S", 362e12, 733e12, 0.864e12, 48, 142, 0.6, {"FA2": 0.5},
         Published(374.0, "bf16", _DIFFUSERS)),
    RTX_4090,
    Card("RTX 5090", 209.5e12, 838e12, 1.792e12, 32, 170, 0.55, {"FA2": 0.85}),
)  # fmt: skip
TILES = (((128, 256), 1.0), ((128, 128), 0.9), ((64, 128), 0.75))
"""Tiles of a product's output that one multiprocessor computes at a time. Each has the speed that
it reaches, as a share of the best tile's. Assumed.
"""
_PRODUCTS = ((9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072), (3072, 15360))
"""Output and input widths of FLUX.1's products."""


def tile_use(tokens: float, multiprocessors: int) -> float:
    """Share of a card's time that products over this many tokens use. Tiles reach beyond the edges,
    and the last round of tiles does not keep every multiprocessor busy.
    """
    flops = seconds = 0.0
    for out, inner in _PRODUCTS:
        needed = tokens * out
        best = max(reached * needed / _computed(tokens, out, tile, multiprocessors)
                   for tile, reached in TILES)  # fmt: skip
        flops += needed * inner
        seconds += needed * inner / best
    return flops / seconds


def _computed(tokens: float, out: int, tile: tuple[int, int], multiprocessors: int) -> float:
    """Output values that whole rounds of tiles compute."""
    tiles = math.ceil(tokens / tile[0]) * math.ceil(out / tile[1])
    rounds = math.ceil(tiles / multiprocessors)
    return float(rounds * multiprocessors * tile[0] * tile[1])


class Form(NamedTuple):
    """Form of the weights of FLUX.1's blocks."""

    name: str
    bytes_read: float
    """Bytes per weight that products read."""
    bytes_unpacked: float
    """Bytes per weight that a step moves before that: libraries turn `int8` and `nf4` into bfloat16
    at each step.
    """
    transformer_gb: float
    """GB of the transformer."""


FORMS = (
    Form("bf16", 2, 0, 23.8),
    Form("fp8", 1, 0, 12),
    Form("int8", 2, 1 + 2, 12),
    Form("nf4", 2, 0.6 + 2, 6.8),
)
BESIDE = 3.0
"""GB beside the transformer, for a decoder, a step and a template."""
RATIOS = (None, 0.11, 0.35)
STEPS = {"FLUX.1": 28, "SDXL": 50}
"""Steps of an edit: the defaults of diffusers' pipelines."""
STRIDES = {"FLUX.1": FLUX_STRIDES[FILL], "SDXL": UNET_STRIDES[FILL]}
"""Steps from one refresh step to the next, for Fill and inpainting models."""
_SIDE = 1024
_TEXT = {"FLUX.1": 512, "SDXL": 77}


class Counted(NamedTuple):
    """Counted work of one step of one row."""

    tokens: float
    """Tokens of the products, with the text; 0: enough to fill any card."""
    products: float
    """FLOPs of products."""
    attention: float
    """FLOPs of attention."""
    weights: float
    """Bytes of weights that products read, in the counted form of the weights."""
    needed: float
    """Bytes that products and attention read and write."""
    other_bytes: float
    """Bytes of all other kernels."""
    launches: int


def flux(ratio: float | None, *, fp8: bool) -> Counted:
    """Count a step of FLUX.1-dev with entries in int8 on the device."""
    work = flux_work(FLUX_DEV, _SIDE // 8, _SIDE // 8)
    name = ("dense, 1 row" if ratio is None else "kv int8, 1 row") + (", fp8" if fp8 else "")
    moved = moved_bytes(Case(name, (ratio,), weights="fp8" if fp8 else "bf16"))
    weights = moved[WEIGHTS]
    needed = sum(moved[group] for group in NEEDED) - weights
    other_bytes = moved.total() - needed - weights
    launches = json.loads(TABLE.read_text(encoding="utf-8"))[name]["step"]
    computed = (ratio or 1.0) * work.tokens[0] + _TEXT["FLUX.1"]
    return Counted(
        computed, *_flops(work, ratio, _TEXT["FLUX.1"]), weights, needed, other_bytes, launches
    )


def flux_between(hit: Counted, ratio: float) -> Counted:
    """Count a step between refresh steps, from a step that reads a template's entries. It also
    reads the text and adds each value's change. The bytes that products move for the text are not
    subtracted.
    """
    work, text = flux_work(FLUX_DEV, _SIDE // 8, _SIDE // 8), _TEXT["FLUX.1"]
    image = work.tokens[0]
    products, attention = _flops(work, ratio, 0)
    values = _values(work, ((1.0 - ratio) * image + text,))
    return hit._replace(
        tokens=ratio * image,
        products=products,
        attention=attention * (image + text) / image,
        other_bytes=hit.other_bytes
        + values * _ADDED
        + 2 * text * len(work.blocks) * _WIDTH * _PLACED,
    )


def sdxl(ratio: float | None) -> Counted:
    """Count a step of SDXL with guidance. The bytes of convolutions count as `other_bytes`: they
    overlap with nothing.
    """
    case = replace(SDXL_GUIDED, ratios=(ratio,))
    plain, _ = unet_step(replace(case, recorded=False))  # its kernels are counted one by one
    weights = plain.nbytes[WEIGHTS]
    needed = sum(
        nbytes
        for place, nbytes in plain.nbytes.items()
        if place.startswith(("linear.", "attention."))
    )
    other_bytes = plain.nbytes.total() - weights - needed
    flops = _flops(unet_work(SDXL, _SIDE // 8, _SIDE // 8), ratio, _TEXT["SDXL"])
    return Counted(0, *flops, weights, needed, other_bytes, unet_step(case)[0].launches)


def sdxl_between(hit: Counted, ratio: float) -> Counted:
    """Count a step between refresh steps for SDXL. Convolutions run on a tile; the bytes that this
    saves are not subtracted.
    """
    work = unet_work(SDXL, _SIDE // 8, _SIDE // 8, halo=1)
    products, attention = _flops(work, ratio, _TEXT["SDXL"])
    values = work.copies * _values(work, tuple((1.0 - ratio) * n for n in work.tokens))
    return hit._replace(
        products=products,
        attention=attention,
        other_bytes=hit.other_bytes + values * _ADDED,
    )


_PLACED, _ADDED = 1 + 2, 1
"""Bytes moved for a placed value, and the further bytes for its change."""
_WIDTH = 3072


def _values(work: ModelWork, idle: tuple[float, ...]) -> float:
    """Values that a step reads for one pass: keys and values, and ends of stacks."""
    loads = block_bytes(work, [idle], EntryFormat("one byte each", 8))
    return float(loads[:, 1].sum() + end_bytes(work, loads).sum())


def _flops(work: ModelWork, ratio: float | None, text: int) -> tuple[float, float]:
    """FLOPs of products and convolutions, and FLOPs of attention."""
    row, kind = work.row_at(ratio or 1.0, text), "dense" if ratio is None else "kv"
    totals = work.totals([row])
    of_levels = (totals.dense if ratio is None else totals.cached)[work.levels]
    terms = [TERMS.index("pair"), TERMS.index("cross")]
    attention = float((work.coefficients[:, terms] * of_levels[:, terms]).sum())
    whole: float = work.step_flops([row], kind)
    return whole - attention, attention


def step_ms(
    card: Card, counted: Counted, form: Form, attention: str, args: argparse.Namespace
) -> float:
    """Milliseconds of a step. Products and attention take the time of their FLOPs or of their
    bytes, whichever is longer. All other kernels come after them. The step takes that time, or the
    host's time to launch it if that is longer.
    """
    in_fp8 = form.name == "fp8"
    weights, unpacked = counted.weights, counted.weights / form.bytes_read * form.bytes_unpacked
    bandwidth = card.bytes_per_s * args.bytes_reached
    share = card.products_reached
    if counted.tokens:
        units = card.multiprocessors
        share *= tile_use(counted.tokens, units) / tile_use(_DENSE_TOKENS, units)
    products = counted.products / ((card.fp8 if in_fp8 else card.half) * share)
    compute_s = products + counted.attention / (card.half * card.attention[attention])
    device_s = max(compute_s, (weights + counted.needed) / bandwidth)
    device_s += (counted.other_bytes + unpacked) / bandwidth
    milliseconds: float = 1e3 * max(device_s, 1e-6 * args.launch_us * counted.launches)
    return milliseconds


_DENSE_TOKENS = 4096 + 512


T5_MS, ENCODE_MS, DECODE_MS = 24.0, 47.0, 85.0
"""Milliseconds on an H200 (docs/gpu.md)."""
_ENCODES = 2
"""Pictures that the VAE encodes for an edit: the source and its masked picture."""
_EXACT = 2.0
"""Time of a convolution in float32, as a multiple of its time in bfloat16: cuDNN multiplies in
TF32, at half the rate on all these cards, and moves twice the bytes."""


def flux_stages_s(card: Card, area: float = 1.0) -> float:
    """Seconds of FLUX.1's T5 and VAE, with pictures of this share of 1024x1024 pixels."""
    return _slower(card) * (T5_MS + area * (_ENCODES * ENCODE_MS + DECODE_MS)) / 1e3


def sdxl_stages_s(card: Card) -> float:
    """Seconds of SDXL's VAE, which encodes in float32 and decodes in bfloat16. Its text encoders
    take almost none.
    """
    return _slower(card) * (_EXACT * _ENCODES * ENCODE_MS + DECODE_MS) / 1e3


def _slower(card: Card) -> float:
    """Time of a card's products, as a multiple of the H200's."""
    h200 = next(item for item in CARDS if item.name == "H200")
    return h200.half * h200.products_reached / (card.half * card.products_reached)


CROP_SIDE = 512
"""Side of crop and stitch's square for a square mask of 0.11 (`rivals.pipeline_model.crop_box`)."""
FBC_SHARE = 17.01 / 26.36
"""Share of an edit's seconds at 28 steps that FirstBlockCache leaves, on an L20 at threshold 0.08
(huggingface/diffusers, docs/source/en/optimization/para_attn.md at 03abeda).
"""


def flux_crop(dense: Counted) -> Counted:
    """Count a dense step of FLUX.1 on the crop. Bytes follow the tokens, weights stay."""
    work, text = flux_work(FLUX_DEV, CROP_SIDE // 8, CROP_SIDE // 8), _TEXT["FLUX.1"]
    tokens = work.tokens[0] + text
    share = tokens / dense.tokens
    products, attention = _flops(work, None, text)
    return dense._replace(
        tokens=tokens,
        products=products,
        attention=attention,
        needed=share * dense.needed,
        other_bytes=share * dense.other_bytes,
    )


class Offer(NamedTuple):
    """A model as a card serves it."""

    card: Card
    model: str
    form: Form
    attention: str


def offers(card: Card) -> Iterator[Offer]:
    """All offers that fit into the card's memory."""
    for form in FORMS:
        if form.transformer_gb + BESIDE <= card.memory_gb:
            for attention in card.attention:
                yield Offer(card, "FLUX.1", form, attention)
    yield Offer(card, "SDXL", FORMS[0], next(iter(card.attention)))


StepKey = tuple[str, float | None, bool, bool]
"""Model, mask ratio (None: dense), FP8, and whether the step is between refresh steps."""


def count_steps() -> dict[StepKey, Counted]:
    """Count all models, weights and masks; takes minutes."""
    counted: dict[StepKey, Counted] = {}
    for ratio in RATIOS:
        for fp8 in (False, True):
            counted["FLUX.1", ratio, fp8, False] = flux(ratio, fp8=fp8)
        counted["SDXL", ratio, False, False] = sdxl(ratio)
    for model, ratio, fp8, _ in list(counted):
        if ratio is not None:
            hit = counted[model, ratio, fp8, False]
            between = flux_between if model == "FLUX.1" else sdxl_between
            counted[model, ratio, fp8, True] = between(hit, ratio)
    return counted


TimeStep = Callable[..., float]
"""Returns milliseconds of an offer's step, by mask ratio; it may lie between refresh steps."""


class EditTimes(NamedTuple):
    """Seconds of an edit."""

    dense: float
    hit: float
    first: float


def edit_times(
    offer: Offer, ratio: float, steps: int, stages_s: float, time: TimeStep
) -> EditTimes:
    dense, hit = time(offer, None), time(offer, ratio)
    share = refresh_count(steps, STRIDES[offer.model]) / steps
    reads = 1 - 1 / steps if share else 0.0  # all refresh steps but the first also read
    first = share * dense + reads * time(offer, ratio, between_refreshes=True) if share else dense
    return EditTimes(*(steps * ms / 1e3 + stages_s for ms in (dense, hit, first)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bytes-reached", type=float, default=0.7, help="share of the peak")
    parser.add_argument("--launch-us", type=float, default=6.0, help="of the host, per kernel")
    args = parser.parse_args()
    counted = count_steps()

    def time_step(offer: Offer, ratio: float | None, between_refreshes: bool = False) -> float:
        key = offer.model, ratio, offer.form.name == "fp8", between_refreshes
        return step_ms(offer.card, counted[key], offer.form, offer.attention, args)

    def time_crop(offer: Offer) -> float:
        crop = flux_crop(counted["FLUX.1", None, offer.form.name == "fp8", False])
        return step_ms(offer.card, crop, offer.form, offer.attention, args)

    _print_edits(time_step)
    print()
    _print_few_steps(time_step, time_crop)
    return 0


def _print_edits(time_step: TimeStep) -> None:
    """Print all offers at the default steps."""
    masks = [ratio for ratio in RATIOS if ratio is not None]
    columns = ["card", "model", "weights", "attention", "dense ms"]
    columns += [f"{label} {m:.2f}" for m in masks for label in ("hit ms,", "own ms,")]
    columns += ["dense edit s", *(f"{w} {m:.2f}" for w in ("hit s,", "first s,") for m in masks)]
    columns += ["a dense server's step ms", *(f"{w} {m:.2f}" for w in ("hit times,", "first times,")
                                              for m in masks), "T5, VAE s"]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for offer in (item for card in CARDS for item in offers(card)):
        card, model, form, attention = offer
        steps = STEPS[model]
        stages_s = sdxl_stages_s(card) if model == "SDXL" else flux_stages_s(card)
        times = [edit_times(offer, m, steps, stages_s, time_step) for m in masks]
        edits = [times[0].dense, *(item.hit for item in times), *(item.first for item in times)]
        rival, rival_text = _rival(offer, time_step)
        rival_edit = steps * rival / 1e3 + stages_s
        cells = [card.name, model, form.name, attention, f"{time_step(offer, None):.1f}"]
        for mask in masks:
            cells += [f"{time_step(offer, mask):.1f}", f"{time_step(offer, mask, True):.1f}"]
        cells += [f"{item:.2f}" for item in edits]
        cells += [rival_text, *(f"{rival_edit / item:.1f}" for item in edits[1:])]
        print(f"| {' | '.join([*cells, f'{stages_s:.2f}'])} |", flush=True)


def _print_few_steps(time_step: TimeStep, time_crop: Callable[[Offer], float]) -> None:
    """Print FLUX.1 in FP8 at m = 0.11 by steps, beside others in the same form."""
    columns = ["card", "steps", "T5, VAE s", "hit s", "first s", "crop and stitch s",
               "dense server s", "dense server, FirstBlockCache s", "hit times dense server",
               "first times dense server", "first times crop and stitch"]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for card in CARDS:
        offer = next(item for item in offers(card) if item.form.name == "fp8")
        stages_s, rival = flux_stages_s(card), _rival(offer, time_step)[0]
        for steps in (28, 8, 4):
            times = edit_times(offer, 0.11, steps, stages_s, time_step)
            crop = steps * time_crop(offer) / 1e3 + flux_stages_s(card, (CROP_SIDE / _SIDE) ** 2)
            dense = steps * rival / 1e3 + stages_s
            skipping = f"{FBC_SHARE * dense:.2f}" if steps == STEPS["FLUX.1"] else "–"
            seconds = [f"{item:.2f}" for item in (stages_s, times.hit, times.first, crop, dense)]
            ratios = (dense / times.hit, dense / times.first, crop / times.first)
            cells = [card.name, str(steps), *seconds, skipping, *(f"{r:.1f}" for r in ratios)]
            print(f"| {' | '.join(cells)} |", flush=True)


def _rival(offer: Offer, time_step: TimeStep) -> tuple[float, str]:
    """The dense server's step and its text in the table: the published time, or the time of our own
    dense kernels, whichever is less.
    """
    fits = [FORMS[0]]
    if offer.model == "FLUX.1":
        fits = [form for form in FORMS[:2] if form.transformer_gb + BESIDE <= offer.card.memory_gb]
    ms = min(time_step(offer._replace(form=form), None) for form in fits)
    published = offer.card.published
    if published is not None and offer.model == "FLUX.1" and published.ms < ms:
        return published.ms, f"{published.ms:.0f} (published, {published.form})"
    return ms, f"{ms:.0f} (ours)"
