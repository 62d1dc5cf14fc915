"""The time of a step: counted FLOPs and bytes, the cost model, and the planner's plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from maskserve_benchmarks.published_models import FLUX_FILL_SPEC, SD21_SPEC, SDXL_SPEC
from maskserve_benchmarks.step_counts import tile_bytes
from maskserve_common.config import CacheConfig, Config, ModelConfig
from maskserve_common.contracts.keys import anchor_steps
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_common.line_fit import Line
from maskserve_common.routing import Pricing
from maskserve_engine.families.specs import control_work, counted_work
from maskserve_engine.planning.cost_model import (
    H100,
    CostModel,
    GpuProperties,
    Rates,
    cpu_rates,
    estimate,
    gpu_rates,
)
from maskserve_engine.planning.entry_bytes import FORMATS, EntryFormat, block_bytes, entry_bytes
from maskserve_engine.planning.flops import Floats, ModelWork, RowTokens
from maskserve_engine.planning.planner import plan
from maskserve_engine.planning.refresh_steps import lookahead_steps_of, refresh_steps
from maskserve_engine.planning.two_stream import evaluate, step_costs
from maskserve_engine.spec.estimate import pricing_of
from maskserve_engine.spec.model_spec import (
    ModelSpec,
    TextShares,
    anchor_stride,
    net_shares,
    refresh_rule,
    refresh_stride,
    text_shares,
)

MODELS = {"flux": FLUX_FILL_SPEC, "sdxl": SDXL_SPEC, "sd21": SD21_SPEC}
"""FLUX.1 Fill dev, SDXL base and Stable Diffusion 2.1, each at its native size."""
DEVICES = {
    "h100": H100,
    "a100": gpu_rates(GpuProperties("A100", 108, 1.41e9, (8, 0))),
    "l40s": gpu_rates(GpuProperties("L40S", 142, 2.52e9, (8, 9))),
    "b200": gpu_rates(GpuProperties("B200", 148, 1.85e9, (10, 0))),
    "cpu": cpu_rates(),
}
"""Workers for the simulation, by multiprocessors and clock of data sheets."""
_CACHE = CacheConfig()
NET = "net"
CONTROL = ((NET, 1.0),)
"""ControlNet of an edit that has one: it acts in all steps."""
STEPS = 28
"""Number of steps of the schedule for which templates are primed."""
QUANTUM = 32
"""Computed tokens of a batch are rounded to this for planning: 57 blocks cost 0.2 % more or
less."""


@dataclass(frozen=True)
class Hardware:
    """One kind of worker: a model on a device. Defaults are those of the product."""

    device: Rates = H100
    entry_format: str = _CACHE.entry_format
    stride: int = _CACHE.stride
    """Steps per anchor; their entries stay on the device between, so loads divide by it. 0: the
    stride that the model needs."""
    model: str = "flux"
    halo: int = _CACHE.conv_halo
    """Positions around a mask that cached rows of UNets convolve; 0: the whole picture."""
    dense_above_ratio: float = _CACHE.dense_above_ratio
    """Mask ratio from which a row runs dense."""
    overhead: float | None = None
    """Share of a single dense row's step that does not depend on tokens: small batches leave a
    device idle. None: the estimate of the cost model."""
    dense_seconds: float | None = None
    """Seconds of a single dense row's step; None: the estimate of the cost model."""
    own_text: Literal["frozen", "computed"] = _CACHE.own_text
    """Whether cached rows leave out their text in most steps; if so, every block reads its
    entry."""
    control: tuple[int, int] = (5, 10)
    """Numbers of blocks of FLUX's ControlNet, for edits that have one."""
    anchors: int = field(init=False)
    """Number of anchors of a template."""
    work: ModelWork = field(init=False, repr=False, compare=False)
    costs: CostModel = field(init=False, repr=False, compare=False)
    pricing: Pricing = field(init=False, repr=False, compare=False)
    _seconds: dict[tuple[int, int, int, int], float] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _loads: dict[float, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        side = spec.native_resolution // spec.vae_scale_factor
        work = counted_work(spec, side, side, halo=self.halo)
        stride = anchor_stride(self.stride, spec)
        anchors = len(anchor_steps([1.0 - i / STEPS for i in range(STEPS)], stride))
        costs = self._costs(work)
        pricing = pricing_of(
            work,
            costs,
            self.format,
            text=self.text,
            anchors=anchors,
            steps_per_anchor=STEPS / anchors,
            controls={NET: self._net(side)} if self.model == "flux" else {},
            net_shares=net_shares(self.config, spec, STEPS),
            lora=work.typical_lora(),
            text_shares=self.text_shares,
            leaves_ring=refresh_rule(self.config, spec).ring,
        )
        fields = {"work": work, "costs": costs, "pricing": pricing, "anchors": anchors}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _net(self, side: int) -> ModelWork:
        double, single = self.control
        blocks = {"num_layers": double, "num_single_layers": single}
        return control_work(self.spec, {**self.spec.denoiser, **blocks}, side, side)

    def _costs(self, work: ModelWork) -> CostModel:
        costs = estimate(self.device)
        flops = work.step_flops([work.row_at(1.0, self.text)], "dense")
        dense = self.dense_seconds or costs.step_seconds(flops)
        share = costs.compute.fixed / costs.step_seconds(flops)
        share = share if self.overhead is None else self.overhead
        return replace(costs, compute=Line(share * dense, (1 - share) * dense / flops))

    @property
    def config(self) -> Config:
        return Config(cache=CacheConfig(own_text=self.own_text))

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def format(self) -> EntryFormat:
        return FORMATS[self.entry_format]

    @property
    def text(self) -> int:
        """Return the number of tokens of a prompt."""
        return self.spec.text_tokens(ModelConfig().max_sequence_length)

    @property
    def text_shares(self) -> TextShares:
        """Return the text shares of edits' steps."""
        return text_shares(self.config, self.spec, STEPS, shared=False)

    @property
    def tokens(self) -> int:
        """Return the number of tokens at the finest level."""
        return self.work.tokens[0]

    @property
    def template_bytes(self) -> int:
        """Return the bytes of a template's entries at all anchors."""
        return int(self.anchors * entry_bytes(self.work, "kv", self.format))

    @property
    def prime_seconds(self) -> float:
        """Return the seconds to compute a template's entries in a batch of its own."""
        return self.anchors * self.step_seconds(0, 0, 1)

    def load_bytes(self, active: float) -> float:
        """Return the bytes that a cached row loads from the host per step if it reads every block's
        K and V.
        """
        if active not in self._loads:
            self._loads[active] = float(self._block_loads(active)[:, 1].sum())
        return self._loads[active]

    def cacheable(self, active: int) -> bool:
        return active < self.dense_above_ratio * self.tokens

    def ring_tokens(self, masked: int) -> int:
        """Return the number of ring tokens that some steps leave out, around a square mask of
        `masked` tokens.
        """
        side = math.sqrt(masked) + 2 * (self.spec.refresh.ring or 0)
        return min(round(side**2), self.tokens) - masked

    def refresh_steps(self, steps: int) -> frozenset[int]:
        """Return the refresh steps of an edit of `steps` steps whose template is not available."""
        count = refresh_count(steps, refresh_stride(self.config, self.spec))
        if not count:
            return frozenset()
        growth = self.spec.refresh.growth
        return lookahead_steps_of(refresh_steps(count, range(steps, 0, -1), 1.0, growth))

    def step_seconds(self, cached: int, active: int, dense: int, step_cache_rows: int = 0) -> float:
        """Return the seconds of a step of `cached` rows with `active` tokens in all and `dense`
        rows.

        Args:
            cached: number of cached rows.
            active: computed tokens of the cached rows.
            dense: number of dense rows.
            step_cache_rows: number of cached rows that read their step cache and load nothing.
        """
        active = min(-(-active // QUANTUM) * QUANTUM, cached * self.tokens)
        key = (cached, active, dense, step_cache_rows)
        if key not in self._seconds:
            self._seconds[key] = self._planned_seconds(*key)
        return self._seconds[key]

    def control_seconds(self, active: int, *, cached: bool) -> float:
        """Return the seconds that a row's ControlNet adds to a step, on average."""
        return self.pricing.control_seconds(CONTROL, active, self.tokens, cached=cached)

    def lora_seconds(self, nbytes: float, active: int, *, cached: bool) -> float:
        """Return the seconds that LoRAs of `nbytes` bytes add to a row's step."""
        return self.pricing.lora_seconds(nbytes, active, self.tokens, cached=cached)

    def _planned_seconds(self, cached: int, active: int, dense: int, step_cache_rows: int) -> float:
        full = self.work.row_at(1.0, self.text)
        if not cached:
            return self.costs.step_seconds(self.work.step_flops([full] * dense, "dense"))
        # Costs depend only on sums over rows, so equal rows can stand for those of the batch.
        costs = step_costs(
            self.work,
            self.work.totals(
                [self._row(active / cached, self.text_shares.refresh)] * step_cache_rows
                + [self._row(active / cached, self.text_shares.template)]
                * (cached - step_cache_rows)
            ),
            self.costs,
            {"host": self._block_loads(active / cached) * (cached - step_cache_rows)},
            dense=self.work.totals([full] * dense) if dense else None,
        )
        if (
            self.halo or step_cache_rows or self.text_shares.template < 1.0
        ):  # every block reads its entry
            return evaluate(costs, ("kv",) * len(self.work.blocks)).latency
        return plan(costs, tolerance=0.001).latency

    def _row(self, active: float, text_share: float = 1.0) -> RowTokens:
        """Return a row whose mask is a square of `active` tokens at the finest level. At each
        coarser level the square touches, on average over its position, all but one token more along
        each side.

        Args:
            active: number of computed tokens.
            text_share: share of its steps that compute its text.
        """
        side = active**0.5
        touched = [(side / 2**n + 1 - 0.5**n) ** 2 for n in range(len(self.work.tokens))]
        level_tokens = tuple(
            min(a, float(n)) for a, n in zip(touched, self.work.tokens, strict=True)
        )
        row, text = self.work.square_row(level_tokens, float(self.text)), float(self.text)
        if not self.work.joint:
            return row
        return replace(row, text=text_share * text, text_read=(1.0 - text_share) * text)

    def _block_loads(self, active: float) -> Floats:
        """Return the bytes of `h` and `kv` per step of one row, [blocks, 2]."""
        row = self._row(active)
        spare = tuple(n - a for n, a in zip(self.work.tokens, row.active, strict=True))
        loads = block_bytes(self.work, [spare], self.format)
        loads[:, 1] += tile_bytes(self.work, row, self.format)
        return loads * (self.anchors / STEPS)
