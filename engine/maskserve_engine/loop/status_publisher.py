"""The engine's status record, which it publishes unasked (design §4)."""

from __future__ import annotations

import logging
from pathlib import Path

from maskserve_common.config import Config, model_name
from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.contracts.status_record import NodeStatus, Served, State
from maskserve_common.status import StatusWriter, WorkerStatus
from maskserve_engine.loop.measured_costs import PriceList
from maskserve_engine.loop.step_planner import CHOICES
from maskserve_engine.planning.flops import KINDS
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.scheduling.policies import batches_of
from maskserve_engine.spec.model_spec import (
    ModelSpec,
    dense_steps,
    refresh_strides,
)

_log = logging.getLogger(__name__)


def new_counters() -> dict[str, float]:
    return {
        "steps_total": 0,
        "step_tokens_total": 0,
        "edits_total": 0,
        "active_tokens_total": 0,
        "dense_rows_total": 0,
        "cached_rows_total": 0,
        "priming_rows_total": 0,
        "skipped_rows_total": 0,
        "controlnet_stale_steps_total": 0,
        "cache_integrity_failures_total": 0,
        "step_seconds_total": 0.0,
        "step_load_stall_seconds_total": 0.0,
        **{f"plans_total.{choice}": 0 for choice in CHOICES},
        **{f"plan_blocks_total.{kind}": 0 for kind in KINDS},
    }


class StatusPublisher:
    """Writes the record of the engine's parts; used by the engine thread only.

    Without a runtime folder it writes nothing.

    Args:
        manager: its rows are published.
        cache: its templates are published; None: there is none.
        counters: counters of the engine.
    """

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        prices: PriceList,
        manager: RequestManager,
        cache: TemplateCache | None,
        counters: dict[str, float],
        memory: MemoryTable,
    ) -> None:
        self._manager, self._cache, self._counters = manager, cache, counters
        folder, strides = config.runtime_dir, refresh_strides(config, spec)
        self._writer = StatusWriter(Path(folder) / "status") if folder else None
        self._prices = prices
        self._status = WorkerStatus(
            worker=config.worker,
            model=model_name(config),
            state="loading",
            max_rows=config.engine.max_rows,
            max_waiting=config.engine.max_waiting,
            devices=batches_of(config.engine),
            memory=memory,
            nodes=(NodeStatus("denoiser", model_name(config), "loading"),),
            served=Served(
                native_resolution=spec.native_resolution,
                token_pixels=spec.token_pixels,
                num_inference_steps=spec.steps_default(config.model.num_inference_steps),
                step_interval=config.model.step_interval,
                cache=config.cache.enabled,
                dense_above_ratio=config.cache.dense_above_ratio,
                mask_ring=config.model.mask_ring,
                dense_sides=spec.dense_sides,
                dense_steps=dense_steps(config.cache.dense_steps, spec.dense_steps),
                own_stride=strides.plain,
                promised_stride=strides.promised,
                own_by_error=strides.by_error,
                error_steps=strides.least_steps,
                own_ring=spec.refresh.ring or 0,
                own_over_template=spec.refresh.over_template,
                due_ms=config.slo.times_ms,
                skipping=spec.measured_levels,
                edit_kinds=tuple(sorted(spec.edit_kinds)),
                references=spec.semantics.reference,
                most_pictures=spec.most_pictures,
            ),
        )

    def publish(self, state: State) -> None:
        if self._writer is None:
            return
        status = self._status
        status.pricing = self._prices.pricing
        status.state = status.nodes[0].state = state
        status.running, status.waiting = self._manager.rows()
        status.counters = {**self._counters, **self._manager.audits.counters()}
        if self._cache is not None:
            status.templates = self._cache.template_ids()
            status.tier_bytes = self._cache.store.tier_bytes()
            status.counters = {**status.counters, **self._cache.counters()}
        loras = self._manager.adapters.loras
        if loras is not None:
            status.adapters, status.adapter_tiers = loras.listed(), loras.tiers()
            status.adapter_loads = loras.costs.published
            status.typical_adapter_bytes = loras.typical_bytes()
            status.counters = {**status.counters, **loras.counters}
        nets = self._manager.adapters.nets
        if nets is not None:
            status.controlnets, status.controlnet_loads = nets.listed(), nets.costs.published
            status.services = nets.services()
            status.typical_controlnet_bytes = nets.typical_bytes()
            status.counters = {**status.counters, **nets.counters}
        self._writer.write(status)

    def end(self, state: State) -> None:
        """Write the last record. It has the state alone if the engine's parts cannot be read; if no
        record can be written, the old one is removed, so that none says that the engine is well.
        """
        if self._writer is None:
            return
        try:
            self.publish(state)
        except Exception:
            _log.exception("the engine's last record holds no rows")
            status = self._status
            status.state = status.nodes[0].state = state
            status.running = status.waiting = ()
            try:
                self._writer.write(status)
            except OSError:
                self._writer.path.unlink(missing_ok=True)
        finally:
            self._writer.close()
