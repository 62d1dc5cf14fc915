"""LoRAs and ControlNets of edits, from acceptance to the end: which are loaded, which work and
cache key an edit has with them, and when its row gets them.

Used by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from maskserve_common.config import Config
from maskserve_common.contracts.request import Lora
from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_common.resources.loading import Kind, Loadable, Loaded
from maskserve_common.resources.resource_cache import ResourceCache
from maskserve_common.resources.resource_states import Resource
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS
from maskserve_engine.adapters.lora_loader import LORAS
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.adapter import Adapter, work_of
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.requests.control_nets import EditControlNets
from maskserve_engine.requests.execution_plan import ExecutionPlan
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.loras import Loras, adapters_id
from maskserve_engine.requests.state import AdapterUse, RequestState


class EditAdapters:
    """Tracks the adapters that edits require beside the model.

    Args:
        loras: LoRAs on the device; None: edits have none.
        nets: ControlNets on the device; None: edits have none.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        executor: Executor,
        loras: Loras | None,
        nets: EditControlNets | None,
    ) -> None:
        self._adapter, self._executor = adapter, executor
        self.loras, self.nets = loras, nets
        self._caches: dict[str, ResourceCache[Any]] = {
            cache.kind.name: cache for cache in (loras, nets) if cache is not None
        }
        """Loaded resources by kind."""
        self._drop = {LORAS.name: executor.drop_lora, CONTROL_NETS.name: executor.drop_net}
        self._entries_with_loras = config.adapters.entries == "own"

    def absent_nets(self, edit: RequestState) -> tuple[Resource, ...]:
        """Return the edit's ControlNets that are not on the device, and start to load them.

        Raises:
            MaskserveError: one of them cannot be loaded.
        """
        controls = edit.controls
        absent = _absent(CONTROL_NETS, self.nets, edit, controls.effective)
        if self.nets is not None and not absent:
            controls.digests = tuple([self.nets.digest(control) for control in controls.effective])
        return absent

    def absent_loras(self, edit: RequestState) -> tuple[Resource, ...]:
        """Return the edit's LoRAs that are not on the device, and start to load them.

        Raises:
            MaskserveError: one of them cannot be loaded.
        """
        return _absent(LORAS, self.loras, edit, edit.loras.effective)

    def may_begin_without(self, edit: RequestState) -> bool:
        """Whether its first steps may go without its LoRAs (`adapters: fast`)."""
        settings = edit.job.request.settings
        if settings.adapters != "fast" or settings.insists or self.loras is None:
            return False
        sigmas = self._adapter.sigmas(edit.job)
        step_counts = [self.loras.steps_without(lora, sigmas) for lora in edit.loras.effective]
        edit.loras.steps_without = min(step_counts)
        return edit.loras.steps_without > 0

    def use_loras(self, edit: RequestState) -> None:
        """Set the cache key and the work of an edit whose LoRAs are loaded: from now on it uses
        entries that were made with them.
        """
        if not edit.loras.effective or self.loras is None:
            return
        edit.loras.digests = tuple([self.loras.digest(lora) for lora in edit.loras.effective])
        edit.loras.nbytes, edit.row_status = self.loras.file_bytes(edit.loras.effective), None
        edit.work = edit.work.without_schedule().with_loras(self._works(edit.job))
        if self._entries_with_loras:
            scales = [lora.scale for lora in edit.loras.effective]
            name = adapters_id(list(zip(edit.loras.digests, scales, strict=True)))
            edit.job = replace(edit.job, adapters=name)

    def hold_for_entries(self, owner: str, job: EditJob) -> None:
        """Hold the LoRAs that are part of a job's cache key, for the priming `owner`.

        Raises:
            MaskserveError: one of them cannot be loaded.
        """
        if self.loras is not None and job.adapters:
            self.loras.hold(owner, job.request.used_loras)

    def works_of_entries(self, job: EditJob) -> Sequence[ModelWork]:
        """Return the work that LoRAs in a job's cache key add to the model's."""
        return self._works(job) if job.adapters else ()

    def attach(self, row: str, loras: Sequence[Lora]) -> None:
        """Compute a row with these LoRAs from its next step on."""
        self._executor.attach(row, [(lora.version, lora.scale) for lora in loras])

    def let_go(self, owner: str) -> None:
        """Release the adapters of an edit or a priming, so that they can be evicted."""
        for cache in self._caches.values():
            cache.release(owner)

    def record_arrival(self, kind: Kind, item: Loadable, loaded: Loaded) -> list[str]:
        """Account for a loaded resource; return the edits that wait for nothing more."""
        return self._caches[kind.name].record_arrival(item, loaded)

    def record_failure(self, kind: Kind, item: Loadable, error: MaskserveError) -> list[str]:
        """Account for a failed load; return the edits that waited for it."""
        self._drop[kind.name](item.version)
        return self._caches[kind.name].record_failure(item, error)

    def record_wait(self, edit: RequestState, seconds: float) -> None:
        """Record the seconds that an edit has waited for its adapters."""
        uses: tuple[AdapterUse[Any], ...] = edit.loras, edit.controls
        for use, cache in zip(uses, (self.loras, self.nets), strict=True):
            if use.effective and cache is not None:
                use.waited_s += seconds
                cache.record_wait(seconds)

    def record_eviction(self, resource: Resource) -> None:
        self._caches[resource.kind].record_eviction(resource)
        self._drop[resource.kind](resource.name)

    def _works(self, job: EditJob) -> list[ModelWork]:
        """Return the work that the job's loaded LoRAs add to the model's."""
        assert self.loras is not None
        work = work_of(self._adapter, job)
        loaded = map(self.loras.loaded, job.request.used_loras)
        return [work.lora_work(lora.layers) for lora in loaded]


def _absent(
    kind: Kind, cache: ResourceCache[Any] | None, edit: RequestState, items: Sequence[Loadable]
) -> tuple[Resource, ...]:
    """Hold an edit's adapters of a kind in `cache`, and return those that are not on the device;
    they begin to load.
    """
    if not items:
        return ()
    if cache is None:
        accepted = kind.setting.replace("SETTINGS.", "no ")
        raise InvalidRequest(kind.setting, f"{kind.noun}s are not served here", accepted)
    return cache.hold(edit.request_id, items)


class LateRows:
    """Rows that run before their LoRAs are loaded (`adapters: fast`).

    Args:
        choose: chooses the plan of a cached row whose LoRAs are loaded now
            (`ExecutionPolicy.choose_with_adapters`); None: all edits run dense.
    """

    def __init__(
        self,
        adapters: EditAdapters,
        choose: Callable[[RequestState], ExecutionPlan | None] | None,
        executor: Executor,
        adapter: Adapter,
    ) -> None:
        self._adapters, self._choose, self._executor = adapters, choose, executor
        self._adapter = adapter
        self.rows: dict[str, RequestState] = {}
        """Rows by request id."""

    def add(self, edit: RequestState) -> None:
        edit.loras.late = True
        self.rows[edit.request_id] = edit

    def leave(self, request_id: str) -> None:
        self.rows.pop(request_id, None)

    def overdue(self) -> list[RequestState]:
        """Return the rows whose next step needs their LoRAs."""
        return [e for e in self.rows.values() if e.tally.done >= e.loras.steps_without]

    def waiting_for(self, item: Loadable) -> list[RequestState]:
        """Return the rows that wait for this LoRA."""
        return [edit for edit in self.rows.values() if item in edit.loras.effective]

    def attach(self, edit: RequestState) -> None:
        """Give a running row its loaded LoRAs, and their entries, from its next step on."""
        self._adapters.use_loras(edit)
        edit.loras.from_step, edit.loras.late = edit.tally.done, False
        self.leave(edit.request_id)
        self._adapters.attach(edit.request_id, edit.loras.effective)
        edit.set_plan(self._plan(edit), self._adapter)

    def _plan(self, edit: RequestState) -> ExecutionPlan:
        """Return a plan that reads entries made with the row's LoRAs, if it reads entries and these
        exist; otherwise its present plan.
        """
        if edit.plan.outcome != "hit" or not edit.job.adapters or self._choose is None:
            return edit.plan  # its next refresh step computes with them
        adapter_plan = self._choose(edit)
        if adapter_plan is None:
            return edit.plan  # it continues with the base model's entries
        self._executor.switch_entries(edit.request_id, adapter_plan.key, adapter_plan.anchors)
        assert edit.reads is not None
        edit.reads = edit.reads.of_entries(adapter_plan.key, adapter_plan.anchors)
        return replace(adapter_plan, schedule_with_template=edit.plan.schedule_with_template)
