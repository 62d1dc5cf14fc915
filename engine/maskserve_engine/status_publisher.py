"""The engine's status record: what it says of itself without being asked (design §4)."""

from __future__ import annotations

from pathlib import Path

from maskserve_core.config import Config, model_name
from maskserve_core.contracts.memory_table import MemoryTable
from maskserve_core.contracts.status_record import Served, State
from maskserve_core.models.facts import ModelFacts
from maskserve_core.planning.dense_steps import dense_steps
from maskserve_core.planning.flops import KINDS
from maskserve_core.worker.status import StatusWriter, WorkerStatus
from maskserve_engine.price_list import PriceList
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.step_planner import CHOICES


def new_counters() -> dict[str, float]:
    """The engine's totals since its start, by metric; the cache has counters of its own."""
    return {
        "steps_total": 0,
        "step_tokens_total": 0,
        "edits_total": 0,
        "active_tokens_total": 0,
        "dense_rows_total": 0,
        "cached_rows_total": 0,
        "priming_rows_total": 0,
        "skipped_rows_total": 0,
        "cache_integrity_failures_total": 0,
        "step_seconds_total": 0.0,
        "step_load_stall_seconds_total": 0.0,
        **{f"plans_total.{choice}": 0 for choice in CHOICES},
        **{f"plan_blocks_total.{kind}": 0 for kind in KINDS},
    }


class StatusPublisher:
    """Writes the record from what the engine's parts hold now; used by the engine thread only.

    Without a runtime folder it writes nothing.

    Args:
        config: of this worker.
        facts: of the served model.
        prices: of this worker.
        manager: whose rows are published.
        cache: whose templates are.
        counters: the engine's.
        memory: of the device.
    """

    def __init__(
        self,
        config: Config,
        facts: ModelFacts,
        prices: PriceList,
        manager: RequestManager,
        cache: TemplateCache,
        counters: dict[str, float],
        memory: MemoryTable,
    ) -> None:
        self._manager, self._cache, self._counters = manager, cache, counters
        folder = config.runtime_dir
        self._writer = StatusWriter(Path(folder) / "status") if folder else None
        self._prices = prices
        self._status = WorkerStatus(
            worker=config.worker,
            model=model_name(config),
            state="loading",
            max_rows=config.engine.max_rows,
            max_waiting=config.engine.max_waiting,
            memory=memory,
            served=Served(
                native_resolution=facts.native_resolution,
                token_pixels=facts.token_pixels,
                num_inference_steps=facts.steps_default(config.model.num_inference_steps),
                cache=config.cache.enabled,
                dense_above_ratio=config.cache.dense_above_ratio,
                mask_ring=config.model.mask_ring,
                dense_sides=facts.dense_sides,
                dense_steps=dense_steps(config.cache.dense_steps, facts.dense_steps),
                due_ms=config.slo.times_ms,
            ),
        )

    def publish(self, state: State) -> None:
        if self._writer is None:
            return
        status, cache = self._status, self._cache
        status.pricing = self._prices.pricing
        status.state = state
        status.running, status.waiting = self._manager.rows()
        status.templates = cache.template_ids()
        status.tier_bytes = cache.store.tier_bytes()
        status.counters = {
            **self._counters,
            **cache.counters(),
            **self._manager.audits.counters(),
        }
        loras = self._manager.loras
        if loras is not None:
            status.adapters, status.adapter_tiers = loras.listed(), loras.tiers()
            status.adapter_loads = loras.costs.published
            status.counters = {**status.counters, **loras.counters}
        self._writer.write(status)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
