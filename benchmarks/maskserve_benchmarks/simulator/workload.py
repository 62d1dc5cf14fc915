"""Edits: arrival times, masked share of the image, numbers of steps, and templates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskserve_common.config import ModelConfig

Floats = NDArray[np.float64]
RING = ModelConfig().mask_ring
"""Ring of the product's default."""


@dataclass(frozen=True, slots=True)
class MaskMix:
    """A published distribution of mask ratios.

    Between the quantiles log(ratio) is linear in the probability. This reproduces the published
    means; straight lines between the quantiles do not (public: 0.208 instead of 0.193).
    """

    name: str
    mean: float
    """The published mean; tests compare the sampler with it."""
    quantiles: tuple[tuple[float, float], ...]
    """(probability, ratio), from 0 to 1; the ratio at 0 is not published and is set to a low
    value."""

    def ratios(self, probabilities: Floats) -> Floats:
        """Return the inverse CDF."""
        p, ratio = zip(*self.quantiles, strict=True)
        return np.exp(np.interp(probabilities, p, np.log(ratio)))


MIXES = {
    "production": MaskMix(
        "production",
        0.112,
        (
            (0.0, 0.015),
            (0.05, 0.038),
            (0.25, 0.067),
            (0.5, 0.095),
            (0.75, 0.139),
            (0.9, 0.208),
            (0.95, 0.245),
            (0.99, 0.320),
            (1.0, 0.42),
        ),
    ),
    "public": MaskMix(
        "public",
        0.193,
        (
            (0.0, 0.001),
            (0.05, 0.004),
            (0.25, 0.021),
            (0.5, 0.056),
            (0.75, 0.222),
            (0.9, 0.766),
            (0.95, 0.873),
            (0.99, 0.95),
            (1.0, 1.0),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One edit of the workload."""

    number: int
    arrival: float
    """Seconds from the start."""
    steps: int
    active: int
    """Number of computed tokens."""
    masked: int
    """Number of computed tokens under the mask."""
    template: str
    controlled: bool = False
    """Whether it has a ControlNet."""
    loras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """Properties of the edits to draw. Two workloads that differ only in `rate` have the same edits
    in the same order, and their gaps differ by a factor.
    """

    requests: int
    rate: float
    """Mean arrivals per second."""
    mix: str = "public"
    steps: tuple[int, ...] = (28,)
    """Numbers of steps, equally likely."""
    burst: float = 1.0
    """Coefficient of variation of the gaps (gamma); 1 is Poisson."""
    templates: int = 970
    zipf: float = 1.0
    """Exponent of the templates' popularity."""
    ring: int = RING
    """Tokens computed around each mask; the mask counts as a square."""
    controlled: float = 0.0
    """Share of the edits that have a ControlNet (production: 0.98, Katz section 1)."""
    with_lora: float = 0.0
    """Share of the edits that have a LoRA (production: 0.95, Katz section 1)."""
    loras: int = 94
    lora_zipf: float = 1.0
    """Exponent of the LoRAs' popularity."""


def draw(workload: Workload, tokens: int, seed: int) -> list[Request]:
    """Draw the edits of a workload, by arrival.

    Args:
        workload: the workload to draw.
        tokens: image tokens of the model; a mask touches at least one.
        seed: seed of all draws; each property has its own stream, so a change of one leaves the
            others unchanged.
    """
    arrivals, masks, steps, templates, nets, adapters = (
        np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(6)
    )
    n = workload.requests
    shape = 1.0 / workload.burst**2
    gaps = arrivals.gamma(shape, 1.0 / (shape * workload.rate), n)
    ratios = MIXES[workload.mix].ratios(masks.random(n))
    with_ring = (np.sqrt(ratios * tokens) + 2 * workload.ring) ** 2
    active = np.clip(np.round(with_ring), 1, tokens).astype(int)
    masked = np.clip(np.round(ratios * tokens), 1, active).astype(int)
    template_ids = templates.choice(
        workload.templates, n, p=_zipf(workload.templates, workload.zipf)
    )
    counts = steps.choice(np.array(workload.steps), n)
    controlled = nets.random(n) < workload.controlled
    has_lora = adapters.random(n) < workload.with_lora
    lora_ids = adapters.choice(workload.loras, n, p=_zipf(workload.loras, workload.lora_zipf))
    when = np.cumsum(gaps)
    columns = (when, counts, active, masked, template_ids, controlled, has_lora, lora_ids)
    return [
        Request(
            i,
            float(at),
            int(n),
            int(a),
            int(m),
            f"t{t:05d}",
            bool(c),
            (f"l{x:05d}",) * bool(uses_lora),
        )
        for i, (at, n, a, m, t, c, uses_lora, x) in enumerate(zip(*columns, strict=True))
    ]


def _zipf(names: int, exponent: float) -> Floats:
    """Return the shares of the names, [names], the most popular first."""
    weights = np.arange(1, names + 1, dtype=float) ** -exponent
    shares: Floats = weights / weights.sum()
    return shares


def draw_gaps(rate: float, count: int, rng: np.random.Generator) -> Floats:
    """Draw the seconds before each of `count` arrivals of a Poisson process at `rate` per second.

    The process is conditioned on its length: from the first arrival to the last the rate is exactly
    `rate`. The load of short runs is therefore neither higher nor lower than stated.
    """
    gaps = rng.exponential(1.0, count)
    gaps[1:] *= (count - 1) / gaps[1:].sum()
    arrival_gaps: Floats = gaps / rate
    return arrival_gaps


def mean_ratio(mix: MaskMix, points: int = 100_000) -> float:
    """Return the mean of the distribution as sampled."""
    return math.fsum(mix.ratios((np.arange(points) + 0.5) / points)) / points
