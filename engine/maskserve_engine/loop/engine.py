"""The engine: one thread that takes commands, schedules and steps, as long as it lives (design §4).

Only that thread uses the engine's parts (manager, rows, cache). Other threads put commands into its
inbox; events leave through the reply thread. `assembly` makes the parts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.keys import NO_SCOPE
from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.contracts.status_record import State
from maskserve_common.errors import EngineFailed, Overloaded, guarded
from maskserve_common.observations import Observations
from maskserve_engine.base.job import EditJob, Failed, Sink
from maskserve_engine.base.mailbox import Inbox, OutputThread
from maskserve_engine.cache.sizing import Kinds
from maskserve_engine.cache.store import Store
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.specs import filled_threads
from maskserve_engine.loop.status_publisher import StatusPublisher
from maskserve_engine.loop.step_runner import StepRunner
from maskserve_engine.loop.warm_up import rows_per_s, warm_up
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.control_nets import ControlNetSource
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.loras import LoraSource
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.scheduling.step_scheduler import ALL_FREE
from maskserve_engine.stages.cpu_threads import limit_threads, one_cpu_thread

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    adapter: Adapter
    executor: Executor
    manager: RequestManager
    runner: StepRunner
    publisher: StatusPublisher
    inbox: Inbox
    output: OutputThread
    audits: Audits
    observations: Observations
    counters: dict[str, float]
    memory: MemoryTable
    cache: TemplateCache | None
    """Template cache; None: `[cache] enabled` is false."""
    lora_loader: LoraSource | None
    """Loader of LoRAs; None: edits have none."""
    net_loader: ControlNetSource | None
    """Loader of ControlNets; None: edits have none."""


class Engine:
    """Runs edits of one model on its worker's devices.

    Args:
        parts: components of the engine, which closes them.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        self.config, self.adapter, self.executor = config, parts.adapter, parts.executor
        self.manager, self.audits = parts.manager, parts.audits
        self.observations, self.counters = parts.observations, parts.counters
        self.lora_loader, self.net_loader = parts.lora_loader, parts.net_loader
        self.memory, self._cache, self.runner = parts.memory, parts.cache, parts.runner
        self.publisher, self.inbox, self.output = parts.publisher, parts.inbox, parts.output
        self._state: State = "loading"
        self._stop = False
        self.checked_steps = 0.0
        """Steps taken when the idle store was last checked."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        self.output.start()
        self._thread.start()

    def warm_up(self) -> None:
        """Take a first step of every kind, if configured.

        Raises:
            ConfigError: the model cannot take one.
        """
        if not self.config.engine.warm_up:
            return
        begin = time.perf_counter()
        runner = self.runner
        try:
            self.ask(
                lambda: warm_up(self.config, self.adapter, self._store_and_kinds(), runner.planner)
            ).result()
        except Exception as error:
            raise ConfigError(f"the model cannot take a step: {error}") from error
        _log.info("the denoiser was warmed up in %.2f s", time.perf_counter() - begin)

    def rows_per_s(self, count: int, seconds: float) -> float:
        """Measure the rows per second of cached steps with `count` rows, for `seconds` seconds;
        call it before there are edits.
        """
        planner = self.runner.planner
        return self.ask(
            lambda: rows_per_s(
                self.config, self.adapter, self._store_and_kinds(), planner, count, seconds
            )
        ).result()

    def submit(self, job: EditJob, sink: Sink) -> None:
        """Take an edit; its answer, or its error, goes to `sink`."""
        try:
            edit = RequestState.of(
                self.prepared(job),
                sink,
                self.adapter,
                self.config.slo.times_ms,
                self.net_loader,
            )
        except Exception as error:
            sink(Failed(guarded(job.request.request_id, error)))
            return
        if not self.inbox.put(lambda: self.manager.accept(edit)):
            sink(Failed(EngineFailed("the engine has stopped")))

    def prepared(self, job: EditJob) -> EditJob:
        """Prepare an edit on the caller's thread: the engine's thread then makes the row without
        computing while other rows wait.
        """
        with one_cpu_thread():
            ready = self.adapter.prepare(job)
            if self._cache is None or not self._cache.serves(ready):
                return ready
            return self.adapter.prepare_template(ready, job.request.template_noise_seed)

    def cancel(self, request_id: str) -> None:
        """Cancel an edit, if it is in the engine; its sink gets CANCELLED."""
        self.inbox.put(lambda: self.manager.cancel(request_id))

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run `question` on the engine's thread between two steps."""
        return self.inbox.ask(question)

    def heartbeat(self) -> Future[dict[str, Any]]:
        return self.ask(
            lambda: {"state": self.state, "edits": len(self.manager.edits), **self.counters}
        )

    def templates(self) -> Future[list[dict[str, object]]]:
        """List cached templates with their tiers and their audited drift."""
        cache = self._cache
        if cache is None:
            return self.ask(list)
        return self.ask(
            lambda: [
                {**template, **self.audits.figures(str(template["key"]))}
                for template in cache.templates()
            ]
        )

    def prime(self, job: EditJob) -> Future[str]:
        """Prime a template in the background: `primed`, `priming`, or `absent` if it cannot be."""
        ready = self.prepared(job)
        return self.ask(lambda: self.manager.prime(ready))

    def pin(self, template_id: str, owner: str = NO_SCOPE) -> Future[bool]:
        """Pin a template for a client; return whether it has entries now."""
        cache = self._cache
        if cache is None:
            return self.ask(lambda: False)
        return self.ask(lambda: cache.pins.pin(template_id, owner))

    def unpin(self, template_id: str) -> Future[bool]:
        """Unpin a template; return whether it was pinned."""
        cache = self._cache
        return self.ask(lambda: False if cache is None else cache.pins.unpin(template_id))

    def evict(self, template_id: str) -> Future[int]:
        """Evict a template; return the bytes freed."""
        cache = self._cache
        return self.ask(lambda: 0 if cache is None else cache.evict(template_id))

    def drain(self) -> None:
        """Refuse new edits from now on; accepted ones continue."""

        def drain() -> None:
            self.manager.refusal = Overloaded(
                "the worker is draining; send the edit to another or try again later"
            )

        self.inbox.put(drain)

    def close(self, grace_s: float) -> None:
        """Drain, wait at most `grace_s` seconds for accepted edits, and end both threads."""
        self.drain()
        end = time.monotonic() + grace_s
        while self.manager.edits and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        self.inbox.put(self._halt)
        if self._thread.is_alive():
            self._thread.join(grace_s + 30.0)
        self.executor.close()
        self.output.close(5.0)
        if self.lora_loader is not None:
            self.lora_loader.close()
        if self.net_loader is not None:
            self.net_loader.close()
        if self._cache is not None:
            self._cache.store.close()

    @property
    def cache(self) -> TemplateCache:
        """The template cache of a worker that has one (`[cache] enabled`)."""
        assert self._cache is not None, "[cache] enabled is false"
        return self._cache

    def _store_and_kinds(self) -> tuple[Store, Kinds] | None:
        """Return the store and the kinds of activations kept per block; None: there is no cache."""
        return None if self._cache is None else (self._cache.store, self._cache.kinds)

    @property
    def state(self) -> State:
        """`loading`, `ready`, `draining`, `stopped` or `failed`."""
        if self._state == "ready" and self.manager.refusal is not None:
            return "draining"
        return self._state

    # Called from the engine thread only.

    def _run(self) -> None:
        try:
            self._state = "ready"
            self.publisher.publish(self.state)
            limit_threads(self.config, filled_threads(self.config, self.adapter.spec))
            with self.adapter.session():
                while not self._stop:
                    self.run_once()
        except Exception:
            _log.exception("the engine has failed")
            self._state = "failed"
            self.manager.end_all(
                EngineFailed("the engine has failed; the worker will be restarted")
            )
        finally:
            self._shut()

    def run_once(self) -> None:
        """Run one iteration: commands, a scheduling decision, and a step if there are rows."""
        self._take_commands()
        for run in self.manager.schedule():
            for _ in range(run.steps):
                running = self.manager.running(run)
                if not running:
                    continue
                if self.executor.devices == ALL_FREE:  # else it publishes while others step
                    # Before the step: readers then see the rows that are being computed.
                    self.publisher.publish(self.state)
                self.runner.step(running, run.devices)

    def _take_commands(self) -> None:
        """Run queued commands; wait for one when there is no row."""
        idle = len(self.manager.scheduler) == 0
        if idle:
            self.executor.idle()
            self.runner.times.book()
        pause_s = self.manager.next_decision - time.monotonic()  # nothing can begin sooner
        waits = idle or self.executor.devices != ALL_FREE or 0.0 < pause_s < math.inf
        if not waits and self.inbox.empty():
            return
        if waits:  # as a sign of life: ranks may step, or start, for any time
            self.publisher.publish(self.state)
        beat_s = self.config.engine.heartbeat_s
        self.inbox.run(max(0.0, min(beat_s, pause_s)) if waits else 0.0)
        self._check_cache()

    def _check_cache(self) -> None:
        """Check the cache's accounts when no row is left; log a mismatch."""
        steps_taken = self.counters["steps_total"]
        if self._cache is None or len(self.manager.scheduler) or self.checked_steps == steps_taken:
            return
        self.checked_steps = steps_taken
        try:
            self._cache.check_integrity(files=False)
        except AssertionError as error:
            self.counters["cache_integrity_failures_total"] += 1
            _log.error("the idle cache's books do not match: %s", error)

    def _halt(self) -> None:
        self._stop = True
        self._state = "stopped"
        self.manager.end_all(Overloaded("the worker is stopping; send the edit to another"))

    def _shut(self) -> None:
        """Close the inbox and run its last commands. The status record says that the engine has
        ended, whatever fails.
        """
        try:
            self.inbox.close()
        finally:
            self.publisher.end(self.state)
