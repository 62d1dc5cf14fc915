"""How long a step takes: counted FLOPs and bytes, the cost model, and the planner's plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from maskserve_core.planning.cost_model import CostModel, Line, estimate
from maskserve_core.planning.entry_bytes import FORMATS, block_bytes, entry_bytes
from maskserve_core.planning.flops import ModelWork, RowTokens, flux_work
from maskserve_core.planning.planner import plan
from maskserve_core.planning.step_costs import step_costs
from maskserve_core.routing import Pricing
from maskserve_core.routing.estimate import pricing_of
from maskserve_harness.benchmarks.models import FLUX_DEV

LATENTS = 128
"""A side, of a 1024x1024 image."""
TEXT = 512
QUANTUM = 32
"""Active tokens of a batch are rounded to this for planning: 57 blocks cost 0.2 % more or less."""


@dataclass(frozen=True)
class Hardware:
    """One kind of worker: a model on a device."""

    device: str = "h100"
    entry_format: str = "int8"
    stride: int = 4
    """Steps per anchor; their entries stay on the device between, so loads divide by it."""
    anchors: int = 7
    """Anchors of a template, primed from 28 steps."""
    dense_above_ratio: float = 0.6
    """Mask ratio from which a row runs dense."""
    overhead: float | None = None
    """Share of a single dense row's step that does not depend on tokens: small batches leave a
    device idle. None: as the cost model estimates."""
    dense_seconds: float | None = None
    """Of a single dense row's step; None: as the cost model estimates."""
    work: ModelWork = field(init=False, repr=False, compare=False)
    costs: CostModel = field(init=False, repr=False, compare=False)
    pricing: Pricing = field(init=False, repr=False, compare=False)
    _seconds: dict[tuple[int, int, int], float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        work = flux_work(FLUX_DEV, LATENTS, LATENTS)
        costs = self._costs(work)
        pricing = pricing_of(
            work,
            costs,
            FORMATS[self.entry_format],
            text=TEXT,
            anchors=self.anchors,
            steps_per_anchor=self.stride,
        )
        for name, value in (("work", work), ("costs", costs), ("pricing", pricing)):
            object.__setattr__(self, name, value)

    def _costs(self, work: ModelWork) -> CostModel:
        costs = estimate(self.device)
        flops = work.step_flops([RowTokens((float(work.tokens[0]),), TEXT)], "dense")
        dense = self.dense_seconds or costs.step_seconds(flops)
        share = costs.compute.fixed / costs.step_seconds(flops)
        share = share if self.overhead is None else self.overhead
        return replace(costs, compute=Line(share * dense, (1 - share) * dense / flops))

    @property
    def tokens(self) -> int:
        return self.work.tokens[0]

    @property
    def template_bytes(self) -> float:
        """Of a template's entries, all anchors."""
        return self.anchors * entry_bytes(self.work, "kv", FORMATS[self.entry_format])

    def load_bytes(self, active: int) -> float:
        """What a cached row loads from the host per step if it takes every block's K and V."""
        spare = (float(self.tokens - active),)
        return float(block_bytes(self.work, [spare], FORMATS[self.entry_format])[:, 1].sum()) / (
            self.stride
        )

    def cacheable(self, active: int) -> bool:
        return active < self.dense_above_ratio * self.tokens

    def step_seconds(self, cached: int, active: int, dense: int) -> float:
        """Seconds of a step of `cached` rows with `active` tokens in all and `dense` rows."""
        active = min(-(-active // QUANTUM) * QUANTUM, cached * self.tokens)
        key = (cached, active, dense)
        if key not in self._seconds:
            self._seconds[key] = self._planned(*key)
        return self._seconds[key]

    def _planned(self, cached: int, active: int, dense: int) -> float:
        full = RowTokens((float(self.tokens),), TEXT)
        if not cached:
            return self.costs.step_seconds(self.work.step_flops([full] * dense, "dense"))
        # Costs depend on the rows' sums only, so equal rows stand for those of the batch.
        row = RowTokens((active / cached,), TEXT)
        spare = [(self.tokens - active / cached,)] * cached
        moved = block_bytes(self.work, spare, FORMATS[self.entry_format]) / self.stride
        costs = step_costs(
            self.work,
            self.work.totals([row] * cached),
            self.costs,
            {"host": moved},
            dense=self.work.totals([full] * dense) if dense else None,
        )
        return plan(costs, tolerance=0.001).latency
