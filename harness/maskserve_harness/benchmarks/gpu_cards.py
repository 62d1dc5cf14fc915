"""What edits should take on GPUs that people have, by model, form of the weights and attention,
beside a server that computes all tokens: an estimate, nobody measured it.

Counted: FLOPs, the bytes that kernels move, launches (as in `gpu_estimate`), and FLOPs of T5 and
the VAE. Assumed: what the data sheets say and the shares of it that are reached. The dense server
is taken to have our own kernels for a dense step and the faster of bfloat16 and FP8.

    python scripts/bench gpu_cards
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from diffusers import AutoencoderKL
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5EncoderModel

from maskserve_core.models.flux import flux_work
from maskserve_core.models.unet import unet_work
from maskserve_core.planning.flops import TERMS, ModelWork
from maskserve_harness.benchmarks.kernel_counts import (
    NEEDED,
    SDXL_GUIDED,
    TABLE,
    Case,
    moved_bytes,
    unet_step,
)
from maskserve_harness.benchmarks.launch_log import WEIGHTS
from maskserve_harness.published_models import FLUX_DEV, FLUX_VAE, SDXL, T5_XXL


class Card(NamedTuple):
    """A GPU, by its data sheet: FLOP/s without sparsity, summed in float32."""

    name: str
    half: float
    """In bfloat16."""
    fp8: float
    single: float
    """In float32."""
    nbytes: float
    """Of its memory, per second."""
    held: float
    """GB."""
    attention: tuple[str, ...]
    """Kernels that there are for it."""


CARDS = (
    Card("H100 SXM", 989e12, 1979e12, 67e12, 3.35e12, 80, ("FA2", "FA3")),
    Card("L40S", 362e12, 733e12, 91.6e12, 0.864e12, 48, ("FA2",)),
    Card("RTX 4090", 165e12, 330e12, 82.6e12, 1.008e12, 24, ("FA2",)),
)
REACHED = {"FA2": 0.4, "FA3": 0.7}
"""Of the bfloat16 peak, what attention reaches; on an H100, for which FA2 was not made."""


class Form(NamedTuple):
    """Of the weights of FLUX.1's blocks."""

    name: str
    read: float
    """Bytes per weight that products read."""
    unpacked: float
    """Bytes per weight that a step moves before that: of `int8` and `nf4` libraries make bfloat16
    at each step."""
    held: float
    """GB of the transformer."""


FORMS = (
    Form("bf16", 2, 0, 23.8),
    Form("fp8", 1, 0, 12),
    Form("int8", 2, 1 + 2, 12),
    Form("nf4", 2, 0.6 + 2, 6.8),
)
BESIDE = 3.0
"""GB beside the transformer: a decoder, a step, a template."""
RATIOS = (None, 0.11, 0.35)
STEPS = {"FLUX.1": 28, "SDXL": 50}
"""Of an edit, as diffusers' pipelines have them."""
_SIDE = 1024
_TEXT = {"FLUX.1": 512, "SDXL": 77}


class Counted(NamedTuple):
    """Of one step of one row."""

    products: float
    """FLOPs."""
    attention: float
    """FLOPs."""
    weights: float
    """Bytes of weights that products read, in the form that was counted."""
    needed: float
    """Bytes that products and attention take and give."""
    others: float
    """Bytes of all other kernels."""
    launches: int


def flux(ratio: float | None, *, fp8: bool) -> Counted:
    """FLUX.1-dev, entries in int8 on the device."""
    work = flux_work(FLUX_DEV, _SIDE // 8, _SIDE // 8)
    name = ("dense, 1 row" if ratio is None else "kv int8, 1 row") + (", fp8" if fp8 else "")
    moved = moved_bytes(Case(name, (ratio,), weights="fp8" if fp8 else "bf16"))
    weights = moved[WEIGHTS]
    needed = sum(moved[group] for group in NEEDED) - weights
    others = moved.total() - needed - weights
    launches = json.loads(TABLE.read_text(encoding="utf-8"))[name]["step"]
    return Counted(*_flops(work, ratio, _TEXT["FLUX.1"]), weights, needed, others, launches)


def sdxl(ratio: float | None) -> Counted:
    """SDXL with guidance. What convolutions move is among the others: it overlaps with nothing."""
    case = replace(SDXL_GUIDED, ratios=(ratio,))
    plain, _ = unet_step(replace(case, recorded=False))  # whose kernels are seen one by one
    weights = plain.nbytes[WEIGHTS]
    needed = sum(
        nbytes
        for place, nbytes in plain.nbytes.items()
        if place.startswith(("linear.", "attention."))
    )
    others = plain.nbytes.total() - weights - needed
    flops = _flops(unet_work(SDXL, _SIDE // 8, _SIDE // 8), ratio, _TEXT["SDXL"])
    return Counted(*flops, weights, needed, others, unet_step(case)[0].launches)


def _flops(work: ModelWork, ratio: float | None, text: int) -> tuple[float, float]:
    """Of products and convolutions, and of attention."""
    row, kind = work.row_at(ratio or 1.0, text), "dense" if ratio is None else "kv"
    totals = work.totals([row])
    of_levels = (totals.dense if ratio is None else totals.cached)[work.levels]
    terms = [TERMS.index("pair"), TERMS.index("cross")]
    attention = float((work.coefficients[:, terms] * of_levels[:, terms]).sum())
    whole: float = work.step_flops([row], kind)
    return whole - attention, attention


def took_ms(
    of: Mapping[tuple[str, float | None, bool], Counted],
    ratio: float | None,
    offer: Offer,
    given: argparse.Namespace,
) -> float:
    """`step_ms` of what was counted."""
    counted = of[offer.model, ratio, offer.form.name == "fp8"]
    return step_ms(offer.card, counted, offer.form, offer.attention, given)


def step_ms(
    card: Card, of: Counted, form: Form, attention: str, given: argparse.Namespace
) -> float:
    """Products and attention take what their FLOPs or their bytes take, whichever is longer; then
    come all other kernels. A step takes that, or what the host takes to ask for it.
    """
    in_fp8 = form.name == "fp8"
    weights, unpacked = of.weights, of.weights / form.read * form.unpacked
    bandwidth = card.nbytes * given.bytes_reached
    products = of.products / ((card.fp8 if in_fp8 else card.half) * given.flops_reached)
    computing = products + of.attention / (card.half * REACHED[attention])
    device = max(computing, (weights + of.needed) / bandwidth)
    device += (of.others + unpacked) / bandwidth
    took: float = 1e3 * max(device, 1e-6 * given.launch_us * of.launches)
    return took


def stage_flops() -> tuple[float, float]:
    """Of T5 over 512 tokens, and of the VAE that encodes and decodes one picture."""
    with torch.device("meta"), torch.inference_mode():
        t5, vae = T5EncoderModel(T5Config(**T5_XXL)).eval(), AutoencoderKL(**FLUX_VAE).eval()
        with FlopCounterMode(display=False) as of_t5:
            t5(torch.zeros(1, 512, dtype=torch.long))
        with FlopCounterMode(display=False) as of_vae:
            vae.encode(torch.zeros(1, 3, _SIDE, _SIDE))
            vae.decode(torch.zeros(1, 16, _SIDE // 8, _SIDE // 8))
    return float(of_t5.get_total_flops()), float(of_vae.get_total_flops())


class Offer(NamedTuple):
    """A model as a card serves it."""

    card: Card
    model: str
    form: Form
    attention: str


def offered(card: Card) -> Iterator[Offer]:
    """All that the card holds."""
    for form in FORMS:
        if form.held + BESIDE <= card.held:
            for attention in card.attention:
                yield Offer(card, "FLUX.1", form, attention)
    yield Offer(card, "SDXL", FORMS[0], card.attention[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--flops-reached", type=float, default=0.5, help="share of the peak")
    parser.add_argument("--bytes-reached", type=float, default=0.7, help="share of the peak")
    parser.add_argument("--launch-us", type=float, default=6.0, help="of the host, per kernel")
    given = parser.parse_args()
    masks = [f"m = {ratio:.2f}" for ratio in RATIOS if ratio is not None]
    columns = ["card", "model", "weights", "attention", "dense ms", *masks, "dense edit s", *masks]
    columns += ["a dense server's step ms", *(f"times, {mask}" for mask in masks), "T5, VAE s"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    counted = {("FLUX.1", r, fp8): flux(r, fp8=fp8) for r in RATIOS for fp8 in (False, True)}
    counted |= {("SDXL", ratio, False): sdxl(ratio) for ratio in RATIOS}
    t5, vae = stage_flops()
    for offer in (each for card in CARDS for each in offered(card)):
        card, model, form, attention = offer
        steps = [took_ms(counted, ratio, offer, given) for ratio in RATIOS]
        fits = [FORMS[0]]
        if model == "FLUX.1":
            fits = [each for each in FORMS[:2] if each.held + BESIDE <= card.held]
        rival = min(took_ms(counted, None, offer._replace(form=each), given) for each in fits)
        # SDXL's VAE runs in float32; its text encoders take next to nothing.
        rate = (card.single if model == "SDXL" else card.half) * given.flops_reached
        beside = (vae if model == "SDXL" else vae + t5) / rate
        edits = [STEPS[model] * each / 1e3 + beside for each in steps]
        cells = [card.name, model, form.name, attention, *(f"{each:.1f}" for each in steps)]
        cells += [f"{each:.2f}" for each in edits]
        cells += [f"{rival:.1f}", *(f"{rival / each:.1f}" for each in steps[1:])]
        print(f"| {' | '.join([*cells, f'{beside:.2f}'])} |", flush=True)
    return 0
