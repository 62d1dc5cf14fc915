"""Linear coefficients of a row's cost on a worker (FlashPS §4.4, Fig. 11).

The FLOPs and the loaded bytes of a batch are sums over its rows, and a row's are linear in its
computed tokens (FlashPS Table 1). So a few coefficients, which fit into the status record, are a
worker's cost model. A step of rows R takes about

    max(base + Σ compute(r), Σ load(r))        r in R

Loads of the next steps run beside the computation of this one. The planner does better for batches
in which neither computation nor loads hide the other; routing only compares workers.
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
    """Share for a cached row of `tokens` tokens, without its computed tokens."""
    active_token: float


@dataclass(frozen=True, slots=True)
class DegreePrice:
    """Step time of a row by itself on several devices, as shares of its seconds on one device."""

    dense: float
    cached: float


class RingShares(NamedTuple):
    """Shares of a row's reading steps that also compute the ring round the mask. None: the edit's
    own ring is computed at every step.
    """

    template: float | None
    refresh: float | None
    """Share for the steps between two refresh steps."""
    lookahead: float = 0.0
    """Share of the steps of a row that reads a template in which it computes the mask's tokens once
    more for the lookahead.
    """


RINGS = RingShares(None, None)


@dataclass(frozen=True, slots=True)
class Pricing:
    """Coefficients of one worker's model and device. All but `tokens` are seconds; none is
    negative.
    """

    step: float
    """Seconds of a step, whatever its rows."""
    dense_row: float
    """Seconds of computation of a dense row of `tokens` tokens, per step."""
    cached_row: float
    """Seconds of computation of a cached row's text tokens and modulation, per step."""
    active_token: float
    """Seconds of computation of a cached row, per step and computed token."""
    spare_token: float = 0.0
    """Seconds to load a cached row's entries from the host tier, per step and cached token."""
    fetch: Mapping[str, float] = field(default_factory=dict)
    """Tier -> seconds to move a template's entries from it to the host tier. Except for `host` and
    `device`, a tier that is not named is unusable.
    """
    tokens: float = 0.0
    """Image tokens to which the coefficients apply; a dense row of another size costs in
    proportion. 0: every dense row costs the same.
    """
    controls: Mapping[str, RowPrice] = field(default_factory=dict)
    """Prices of the worker's ControlNets, by name."""
    between: RowPrice | None = None
    """Price of a row of `tokens` tokens in a step between refresh steps. None: the price of a
    cached row."""
    whole: RowPrice | None = None
    """Price of a row that reads a template and computes text and ring in every step. None: all rows
    that read a template do."""
    lora_byte: RowPrice | None = None
    """Price per byte of a LoRA file that changes every linear layer of the blocks in half
    precision. None: LoRAs cost nothing."""
    rings: RingShares = RINGS
    """Shares of steps in which rows compute the ring around their mask."""
    degrees: tuple[DegreePrice, ...] = ()
    """Prices on 2, 4 and 8 devices, as far as the worker gives that many to an edit it has to
    itself."""

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
        """Return the `(compute, load)` seconds per step of a row. A row is dense if its mask is so
        large that caching costs more.

        Args:
            active: computed tokens.
            total: tokens of the row.
            cached: whether the row is cached.
        """
        if cached:
            return self._read_row(self.cached_row, self.active_token, active, total)
        return self.dense(total), 0.0

    def whole_row(self, active: float, total: float) -> tuple[float, float]:
        """Price per step of a cached row that computes text and ring in every step."""
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
        """Return the cost of a row that computes text and ring in every step, as a multiple of the
        cost of a row that reads a template.

        Args:
            whole: tokens that a step of the former computes.
            active: tokens that a step of the latter computes, on average.
        """
        if self.whole is None:
            return 1.0
        row_s = self.cached_row + self.active_token * active
        return (self.whole.cached_row + self.whole.active_token * whole) / row_s if row_s else 1.0

    def refreshing_row(
        self, active: float, total: float, dense_share: float, first: float
    ) -> float:
        """Return the price per step of a row with refresh steps, which loads nothing.

        Args:
            active: tokens that a reading step computes.
            total: tokens that a refresh step computes.
            dense_share: share of its steps that are refresh steps.
            first: share of the first step, which reads nothing. The row also reads at its other
                refresh steps.
        """
        dense = self.dense(total)
        if self.between is None:
            between_s, _ = self.row(active, total, cached=True)
        else:
            between_s = min(dense, self._added(self.between, active, total, cached=True))
        return dense_share * dense + (1.0 - first) * between_s

    def share(self, devices: int, *, cached: bool) -> float:
        """Return the share of one device's seconds per step that a row takes when `devices` could
        step it.
        """
        shares = [degree.cached if cached else degree.dense for degree in self.degrees]
        return min([1.0, *shares[: max(devices, 1).bit_length() - 1]])

    def control_seconds(
        self, controls: Iterable[tuple[str, float]], active: float, total: float, *, cached: bool
    ) -> float:
        """Return the seconds that ControlNets add to a row per step, averaged over its steps.

        Args:
            controls: names, each with the share of the steps in which the net acts. Unknown
                names cost nothing.
            active: tokens that a cached row computes.
            total: tokens of the row.
            cached: whether the row is cached.
        """
        return sum(
            share * self._added(self.controls[name], active, total, cached=cached)
            for name, share in controls
            if name in self.controls
        )

    def lora_seconds(self, nbytes: float, active: float, total: float, *, cached: bool) -> float:
        """Return the seconds that LoRAs of `nbytes` bytes add to a row per step."""
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
