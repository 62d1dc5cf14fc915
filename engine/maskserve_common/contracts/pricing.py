"""What a row costs on a worker, as linear coefficients (FlashPS §4.4, Fig. 11).

The FLOPs and the loaded bytes of a batch are sums over its rows, and those of a row are linear in
its active tokens (FlashPS Table 1). So a worker's cost model comes down to a few coefficients that
fit into the status record, and a step of rows R takes about

    max(base + Σ compute(r), Σ load(r))        r in R

where the loads of the next steps run beside the computation of this one. The planner does better
than this for batches in which neither side hides the other; routing compares workers and does not
need to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from maskserve_common.contracts.tiers import TIERS


@dataclass(frozen=True, slots=True)
class RowPrice:
    """Seconds that something adds to a row's step, as in `Pricing`: a ControlNet in a step in which
    it acts (beside a cached row the mean over its steps, at some of which it computes all tokens),
    or a byte of a LoRA's file.
    """

    dense_row: float
    cached_row: float
    """Of a cached row of `tokens` tokens, but for its active ones."""
    active_token: float


@dataclass(frozen=True, slots=True)
class DegreePrice:
    """What a step of a row by itself takes on several devices, as shares of its seconds on one."""

    dense: float
    cached: float


class RingShares(NamedTuple):
    """Of a row's steps that read something, those that compute the ring which they may leave out;
    None: rows compute their edit's own at every step.
    """

    template: float | None
    own: float | None
    """Of the steps between its own anchors."""
    ahead: float = 0.0
    """Of a row that reads a template, how often per step it computes the mask's tokens once more,
    where what it leaves out is foreseen."""


RINGS = RingShares(None, None)


@dataclass(frozen=True, slots=True)
class Pricing:
    """Coefficients of one worker's model and device. All but `tokens` are seconds; none is
    negative.
    """

    step: float
    """Of a step, whatever its rows."""
    dense_row: float
    """Of the computation of a dense row of `tokens` tokens, per step."""
    cached_row: float
    """Of a cached row's computation, per step: its text tokens and modulation."""
    active_token: float
    """Of a cached row's computation, per step and active token."""
    spare_token: float = 0.0
    """Of loading a cached row's entries from the host tier, per step and inactive token."""
    fetch: Mapping[str, float] = field(default_factory=dict)
    """Tier -> seconds to bring a template's entries from there to the host tier. A tier that is
    not named, `host` and `device` apart, cannot be used."""
    tokens: float = 0.0
    """Of the image that the coefficients are of; a dense row of another costs in proportion.
    0: every dense row costs the same."""
    controls: Mapping[str, RowPrice] = field(default_factory=dict)
    """Of the ControlNets that the worker has, by name."""
    between: RowPrice | None = None
    """Of a row of `tokens` tokens in a step between its own anchors. None: as of a cached row."""
    whole: RowPrice | None = None
    """Of a row that reads a template and computes text and ring in every step. None: all that read
    one do."""
    lora_byte: RowPrice | None = None
    """Of a byte of a LoRA's file, were it one of every linear layer of the blocks in half
    precision. None: LoRAs cost nothing."""
    rings: RingShares = RINGS
    """Of the ring round their masks."""
    degrees: tuple[DegreePrice, ...] = ()
    """Of 2, 4 and 8 devices, as far as an edit that the worker has to itself is given them."""

    def __post_init__(self) -> None:
        tables = ("fetch", "controls", "between", "whole", "lora_byte", "rings", "degrees")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tables}
        for net, price in self.controls.items():
            values |= {f"controls.{net}.{f.name}": getattr(price, f.name) for f in fields(price)}
        for name in ("between", "whole", "lora_byte"):
            row_price = getattr(self, name)
            if row_price is not None:
                values |= {
                    f"{name}.{f.name}": getattr(row_price, f.name) for f in fields(row_price)
                }
        for number, degree in enumerate(self.degrees):
            values |= {
                f"degree {number}: {f.name}": getattr(degree, f.name) for f in fields(degree)
            }
        for name, value in (values | dict(self.fetch)).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"pricing: {name} is {value}")

    def dense(self, total: float) -> float:
        """Seconds per step of a dense row of `total` tokens."""
        return self.dense_row * (total / self.tokens if self.tokens else 1.0)

    def row(self, active: float, total: float, *, cached: bool) -> tuple[float, float]:
        """`(compute, load)` seconds per step of a row of `total` tokens of which `active` are
        computed. A row whose mask is so large that caching costs more is dense.
        """
        if cached:
            return self._read_row(self.cached_row, self.active_token, active, total)
        return self.dense(total), 0.0

    def whole_row(self, active: float, total: float) -> tuple[float, float]:
        """The same of a cached row that computes text and ring in every step."""
        if self.whole is None:
            return self.row(active, total, cached=True)
        return self._read_row(self.whole.cached_row, self.whole.active_token, active, total)

    def _read_row(
        self, row: float, token: float, active: float, total: float
    ) -> tuple[float, float]:
        dense, compute = self.dense(total), row + token * active
        load = self.spare_token * max(total - active, 0.0)
        return (compute, load) if compute < dense and load < dense else (dense, 0.0)

    def whole_times(self, whole: float, active: float) -> float:
        """How many times the computation of a row that reads a template one is which computes text
        and ring in every step.

        Args:
            whole: tokens that a step of that one computes.
            active: that one of the row computes, on average.
        """
        if self.whole is None:
            return 1.0
        row_s = self.cached_row + self.active_token * active
        return (self.whole.cached_row + self.whole.active_token * whole) / row_s if row_s else 1.0

    def own_row(self, active: float, total: float, dense_share: float, first: float) -> float:
        """The same of a row with anchors of its own, which loads nothing.

        Args:
            active: tokens that steps compute which read something.
            total: that are computed at the anchors.
            dense_share: of its steps, the anchors.
            first: of its steps, its first one, which reads nothing: the other anchors are computed
                beside steps that do.
        """
        dense = self.dense(total)
        if self.between is None:
            between_s, _ = self.row(active, total, cached=True)
        else:
            between_s = min(dense, self._added(self.between, active, total, cached=True))
        return dense_share * dense + (1.0 - first) * between_s

    def share(self, devices: int, *, cached: bool) -> float:
        """Of one device's seconds per step, what a row takes that so many devices could step."""
        shares = [degree.cached if cached else degree.dense for degree in self.degrees]
        return min([1.0, *shares[: max(devices, 1).bit_length() - 1]])

    def control_seconds(
        self, controls: Iterable[tuple[str, float]], active: float, total: float, *, cached: bool
    ) -> float:
        """What ControlNets add to a row per step, on average over its steps.

        Args:
            controls: their names, each with the share of the steps in which it acts. One that is
                not known costs nothing.
            active: tokens that a cached row computes.
            total: of the row.
            cached: whether the row is cached.
        """
        return sum(
            share * self._added(self.controls[name], active, total, cached=cached)
            for name, share in controls
            if name in self.controls
        )

    def lora_seconds(self, nbytes: float, active: float, total: float, *, cached: bool) -> float:
        """What LoRAs of so many bytes add to a row per step; the rest as `control_seconds`."""
        if self.lora_byte is None:
            return 0.0
        return nbytes * self._added(self.lora_byte, active, total, cached=cached)

    def _added(self, price: RowPrice, active: float, total: float, *, cached: bool) -> float:
        size = total / self.tokens if self.tokens else 1.0
        if cached:
            return price.cached_row * size + price.active_token * active
        return price.dense_row * size

    def fetch_s(self, tier: str) -> float:
        """Seconds until entries from `tier` can be loaded by steps; infinite if never."""
        if tier in TIERS and TIERS[tier].read_by_steps:
            return 0.0
        return self.fetch.get(tier, math.inf)
