"""The engine: one thread that takes commands, schedules and steps, as long as it lives (design §4).

Everything it owns (manager, rows, cache) is touched by that thread only. Other threads put commands
into its inbox; events leave through the reply thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.request import Lora, ResolvedControl
from maskserve_core.contracts.status_record import State
from maskserve_core.errors import EngineFailed, MaskserveError, Overloaded, guarded
from maskserve_core.models.facts import ModelFacts
from maskserve_core.worker.gangs.batching import Batching
from maskserve_core.worker.gangs.deadline import Deadline
from maskserve_core.worker.gangs.rounds import Rounds
from maskserve_core.worker.gangs.scheduler import GangScheduler
from maskserve_core.worker.gangs.work import GangPolicy
from maskserve_core.worker.observations import Observations
from maskserve_core.worker.pair import Pair
from maskserve_core.worker.spread import Spread
from maskserve_core.worker.step_scheduler import ALL_FREE, MakePolicy, StepScheduler
from maskserve_engine.adapters.control_net_loader import Bring as BringNet
from maskserve_engine.adapters.control_net_loader import ControlNetLoader, LoadedNet
from maskserve_engine.adapters.fuse import served_form
from maskserve_engine.adapters.lora_loader import Bring, LoadedLora, LoraLoader
from maskserve_engine.cache.loader import HostMover
from maskserve_engine.cache.priming_prompt import PromptFile
from maskserve_engine.cache.sizing import Kinds
from maskserve_engine.cache.store import Store
from maskserve_engine.card_table import check_fits
from maskserve_engine.control_link.served import ControlService, ServiceCalls
from maskserve_engine.control_link.served_nets import ServedNetLoader
from maskserve_engine.entry_store import estimated_costs, open_mover, open_store, sized
from maskserve_engine.executor import Executor
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.gangs.checks import check_devices
from maskserve_engine.gangs.degree_times import DegreeTimes
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.gangs.messages import DeviceFacts
from maskserve_engine.gangs.processes import RankProcesses
from maskserve_engine.job import Conditioning, EditJob, Failed, Sink
from maskserve_engine.local_executor import LocalExecutor
from maskserve_engine.mailbox import Inbox, OutputThread
from maskserve_engine.measured_costs import MeasuredCosts, StepTimes
from maskserve_engine.memory import device_memory, memory_table
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.control_nets import ControlNetSource, EditControlNets
from maskserve_engine.requests.due_times import InTime
from maskserve_engine.requests.loras import Loras, LoraSource
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.residency import Residency
from maskserve_engine.requests.state import RequestState
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.stages.cpu_threads import limit_threads, one_cpu_thread
from maskserve_engine.stages.loader import device_in_words, device_of, dtype_of
from maskserve_engine.stages.revision import model_revision
from maskserve_engine.status_publisher import PriceList, StatusPublisher, new_counters
from maskserve_engine.step_planner import StepPlanner
from maskserve_engine.step_runner import StepRunner
from maskserve_engine.warm_up import rows_per_s, warm_up

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Runs edits of one model on one device.

    Args:
        config: of this worker.
        adapter: the model.
        prompt: reads the priming prompt's embedding; by default from the runtime folder, where
            the encoder puts it.
        revision: digest of the served weights.
        executor: makes what holds and steps the rows; of the store of entries, if there is one.
        policy: makes what decides which rows run.
        lora_loader: makes what brings LoRAs to the executor, where edits may have any.
        net_loader: the same of ControlNets.
        elsewhere: of the devices where rows are, if other processes hold them; entries are then in
            files, which all of them read.
        inbox: of the engine's commands, where others are to have it too.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        prompt: Callable[[], Conditioning | None] | None = None,
        revision: str = "",
        executor: Callable[[Adapter, Store | None], Executor] = LocalExecutor,
        policy: MakePolicy = StepScheduler,
        lora_loader: Callable[[Config, Bring], LoraSource] = LoraLoader,
        net_loader: Callable[[Config, ModelFacts, BringNet], ControlNetSource] = ControlNetLoader,
        elsewhere: DeviceFacts | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self.config, self.adapter = config, adapter
        runtime = Path(config.runtime_dir) if config.runtime_dir else None
        # Where rows are in other processes, this one moves no entries.
        mover = HostMover() if elsewhere else open_mover(config)
        costs = MeasuredCosts(elsewhere.costs if elsewhere else estimated_costs(config, mover))
        kinds, size = sized(config, adapter, costs.model)
        self.memory = memory_table(config, adapter, size) if elsewhere is None else elsewhere.memory
        _log.info("%s", self.memory.text())
        if self.memory.left < 0:
            _log.warning("more memory is promised than there is: make [cache] budget_bytes smaller")
        self._cache: TemplateCache | None = None
        store = None
        if config.cache.enabled:
            here = 0 if elsewhere else self.memory.cache
            store = open_store(config, size, costs.model, here, mover)
            store.lower.on_change = self._arrived
            self._cache = TemplateCache(
                config,
                adapter,
                store,
                kinds,
                revision,
                str(dtype_of(config)),
                prompt or PromptFile(runtime).read,
            )
        self._output = OutputThread()
        self.observations = Observations()
        self.executor: Executor = executor(adapter, store)
        self.audits = Audits(config.cache, self.observations)
        self.lora_loader = None
        if config.adapters.store:
            self.lora_loader = lora_loader(config, self.executor.bring)
        self.net_loader = None
        if config.controls.folder:
            self.net_loader = net_loader(config, adapter.facts, self.executor.bring_net)
        degrees = self._degree_times(costs)
        prices = PriceList(
            config, adapter, costs, size.anchors, None if degrees is None else degrees.prices
        )
        self.manager = RequestManager(
            config,
            adapter,
            self._cache,
            self.executor,
            self.audits,
            self._output,
            InTime(config, prices.measured),
            policy,
            self._loras if self.lora_loader else None,
            self._nets if self.net_loader else None,
            degrees.of if degrees is not None else lambda edit: ((), 0.0),
        )
        self.counters = new_counters()
        self._publisher = StatusPublisher(
            config,
            adapter.facts,
            prices,
            self.manager,
            self._cache,
            self.counters,
            self.memory,
        )
        self._step_runner = StepRunner(
            config,
            adapter,
            self.executor,
            self.manager,
            StepPlanner(costs),
            self._output,
            StepTimes(costs, self.executor.take_moves, self.counters, self.observations),
            self.counters,
            self.observations,
            degrees.beside_shares if degrees is not None else lambda edits, ranks: 0.0,
        )
        self._inbox = inbox or Inbox()
        self._state: State = "loading"
        self._stop = False
        self._checked = 0.0
        """Steps taken when the idle store was last checked."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def load(
        cls,
        config: Config,
        lora_loader: Callable[[Config, Bring], LoraSource] = LoraLoader,
        policy: MakePolicy | None = None,
        calls: ServiceCalls | None = None,
    ) -> Engine:
        """Load the model; slow.

        Args:
            config: of this worker.
            lora_loader: as of the engine.
            policy: likewise; None: what the configuration says.
            calls: of the ControlNet service; None: ControlNets run here.

        Raises:
            ConfigError: the model cannot be served.
        """
        if config.engine.devices > 1:
            return cls._of_ranks(config, policy or _policy_of(config), lora_loader)
        _log.info("the denoiser's device: %s", device_in_words(config))
        device = device_of(config)
        if device.type == "cuda":
            check_fits(config, device_memory(device)[1])
        with one_cpu_thread():
            adapter = load_adapter(config)
        revision = model_revision(config.model.path, served_form(config))
        chosen = policy or StepScheduler
        if calls is None:
            return cls(config, adapter, revision=revision, policy=chosen, lora_loader=lora_loader)
        service = ControlService(
            calls,
            adapter.device,
            str(dtype_of(config)).removeprefix("torch."),
            config.controls.service_timeout_s,
            fast=config.controls.fast,
        )
        return cls(
            config,
            adapter,
            revision=revision,
            executor=lambda adapter, store: LocalExecutor(adapter, store, service),
            policy=chosen,
            lora_loader=lora_loader,
            net_loader=lambda config, facts, bring: ServedNetLoader(config, facts, bring, service),
        )

    @classmethod
    def _of_ranks(
        cls,
        config: Config,
        policy: MakePolicy,
        lora_loader: Callable[[Config, Bring], LoraSource],
    ) -> Engine:
        """With a process for each device. This one holds the model's shape and no weights.

        Raises:
            ConfigError: a rank could not be started.
        """
        deals = config.engine.policy == "cfg"
        on_gpus = device_of(config).type == "cuda"
        check_devices(config, torch.cuda.device_count() if on_gpus else 0)
        ranks = RankProcesses(config)
        own = ranks.scheduling_config
        most = 1 if config.engine.policy == "spread" else config.engine.devices
        inbox = Inbox()
        return cls(
            own,
            load_adapter(own),
            revision=ranks.hello.revision,
            executor=lambda adapter, store: GangExecutor(
                ranks, adapter, store, inbox.put, most, deals=deals
            ),
            policy=policy,
            lora_loader=lora_loader,
            elsewhere=ranks.hello.device,
            inbox=inbox,
        )

    # Called from any thread.

    def start(self) -> None:
        self._output.start()
        self._thread.start()

    def warm_up(self) -> None:
        """Take a first step of every sort, if so configured.

        Raises:
            ConfigError: the model cannot take one.
        """
        if not self.config.engine.warm_up:
            return
        begin = time.perf_counter()
        runner = self._step_runner
        try:
            self.ask(
                lambda: warm_up(self.config, self.adapter, self._kept(), runner.planner)
            ).result()
        except Exception as error:
            raise ConfigError(f"the model cannot take a step: {error}") from error
        _log.info("the denoiser was warmed up in %.2f s", time.perf_counter() - begin)

    def rows_per_s(self, count: int, seconds: float) -> float:
        """How many rows are stepped in a second by cached steps of `count` rows, tried for so many
        seconds before there are edits.
        """
        planner = self._step_runner.planner
        return self.ask(
            lambda: rows_per_s(self.config, self.adapter, self._kept(), planner, count, seconds)
        ).result()

    def submit(self, job: EditJob, sink: Sink) -> None:
        """Take an edit; its answer, an error included, comes through `sink`."""
        try:
            edit = RequestState.of(
                self.prepared(job),
                sink,
                self.adapter,
                self.config.slo.times_ms,
                self.net_loader,
                self.config.controls.refresh,
            )
        except Exception as error:
            sink(Failed(guarded(job.request.request_id, error)))
            return
        if not self._inbox.put(lambda: self.manager.accept(edit)):
            sink(Failed(EngineFailed("the engine has stopped")))

    def prepared(self, job: EditJob) -> EditJob:
        """In the thread of who hands it in: the engine's own makes a row without computing what
        the steps of the others would wait for.
        """
        with one_cpu_thread():
            ready = self.adapter.prepare(job)
            if self._cache is None or not self._cache.serves(ready):
                return ready
            return self.adapter.prepare_template(ready, job.request.template_noise_seed)

    def cancel(self, request_id: str) -> None:
        """Withdraw an edit, if one of that name is held; its sink gets CANCELLED."""
        self._inbox.put(lambda: self.manager.cancel(request_id))

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have the engine thread answer between two steps."""
        return self._inbox.ask(question)

    def heartbeat(self) -> Future[dict[str, Any]]:
        return self.ask(
            lambda: {"state": self.state, "edits": len(self.manager.edits), **self.counters}
        )

    def templates(self) -> Future[list[dict[str, object]]]:
        """What is held of each template, and what is known of its drift."""
        cache = self._cache
        if cache is None:
            return self.ask(list)
        return self.ask(
            lambda: [{**held, **self.audits.of(str(held["key"]))} for held in cache.templates()]
        )

    def prime(self, job: EditJob) -> Future[str]:
        """Prime a template in the background: `primed`, `priming`, or `absent` if it cannot be."""
        ready = self.prepared(job)
        return self.ask(lambda: self.manager.prime(ready))

    def pin(self, template_id: str, *, pinned: bool) -> Future[bool]:
        """Pin or unpin; whether there was something to do it to."""
        cache = self._cache
        if cache is None:
            return self.ask(lambda: False)
        change = cache.pins.pin if pinned else cache.pins.unpin
        return self.ask(lambda: change(template_id))

    def evict(self, template_id: str) -> Future[int]:
        """Bytes given back."""
        cache = self._cache
        return self.ask(lambda: 0 if cache is None else cache.evict(template_id))

    def drain(self) -> None:
        """Refuse new edits from now on; accepted ones go on."""

        def drain() -> None:
            self.manager.draining = True

        self._inbox.put(drain)

    def close(self, grace_s: float) -> None:
        """Drain, wait at most `grace_s` for accepted edits, and end both threads."""
        self.drain()
        end = time.monotonic() + grace_s
        while self.manager.edits and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.01)
        self._inbox.put(self._halt)
        if self._thread.is_alive():
            self._thread.join(grace_s + 30.0)
        self.executor.close()
        self._output.close(5.0)
        if self.lora_loader is not None:
            self.lora_loader.close()
        if self.net_loader is not None:
            self.net_loader.close()
        if self._cache is not None:
            self._cache.store.close()

    @property
    def cache(self) -> TemplateCache:
        """Of a worker that has one (`[cache] enabled`)."""
        assert self._cache is not None, "[cache] enabled is false"
        return self._cache

    def _kept(self) -> tuple[Store, Kinds] | None:
        """Where entries go and what is kept of each block."""
        return None if self._cache is None else (self._cache.store, self._cache.kinds)

    def _degree_times(self, costs: MeasuredCosts) -> DegreeTimes | None:
        """Of edits by the number of devices, for policies that choose it."""
        executor = self.executor
        if not isinstance(executor, GangExecutor):
            return None
        devices = self.config.engine.devices
        return DegreeTimes(self.adapter, costs, lambda: executor.exchange, devices)

    def _loras(self, residency: Residency) -> Loras:
        assert self.lora_loader is not None

        def came(lora: Lora, outcome: LoadedLora | MaskserveError) -> None:
            self._inbox.put(lambda: self.manager.lora_came(lora, outcome))

        return Loras(self.config, residency, self.lora_loader, came, self.observations)

    def _nets(self, residency: Residency) -> EditControlNets:
        assert self.net_loader is not None

        def came(control: ResolvedControl, outcome: LoadedNet | MaskserveError) -> None:
            self._inbox.put(lambda: self.manager.net_came(control, outcome))

        return EditControlNets(residency, self.net_loader, came, self.observations)

    def _arrived(self, key: str) -> None:
        self._inbox.put(lambda: self.manager.arrived(key))

    @property
    def state(self) -> State:
        """`loading`, `ready`, `draining`, `stopped` or `failed`."""
        if self._state == "ready" and self.manager.draining:
            return "draining"
        return self._state

    # Called from the engine thread only.

    def _run(self) -> None:
        try:
            self._state = "ready"
            self._publisher.publish(self.state)
            limit_threads(self.config)
            with self.adapter.session():
                while not self._stop:
                    self.turn()
        except Exception:
            _log.exception("the engine has failed")
            self._state = "failed"
            self.manager.end_all(
                EngineFailed("the engine has failed; the worker will be restarted")
            )
        finally:
            self._shut()

    def turn(self) -> None:
        """Once around: commands, a decision, and a step if there is something to step."""
        self._take_commands()
        for run in self.manager.schedule():
            for _ in range(run.steps):
                running = self.manager.running(run)
                if running:
                    # Before the step: who looks meanwhile sees what is being computed.
                    self._publisher.publish(self.state)
                    self._step_runner.step(running, run.devices)

    def _take_commands(self) -> None:
        """Run what came in; wait for something when no row is there to run."""
        idle = len(self.manager.scheduler) == 0
        if idle:
            self.executor.idle()
            self._step_runner.times.book()
        rests_s = self.manager.again - time.monotonic()  # what can begin has begun
        waits = idle or self.executor.devices != ALL_FREE or 0.0 < rests_s < math.inf
        if not waits and self._inbox.empty():
            return
        if waits:  # a sign of life: steps of ranks, and their starts, take as long as they do
            self._publisher.publish(self.state)
        beat_s = self.config.engine.heartbeat_s
        self._inbox.run(max(0.0, min(beat_s, rests_s)) if waits else 0.0)
        self._check_cache()

    def _check_cache(self) -> None:
        """Say so if rows that are gone have left something behind, now that none is there."""
        taken = self.counters["steps_total"]
        if self._cache is None or len(self.manager.scheduler) or self._checked == taken:
            return
        self._checked = taken
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
        """Take no more commands; answer those that came in meanwhile. Whatever fails, the record
        says that it is over.
        """
        self.manager.draining = True
        try:
            self._inbox.close()
        finally:
            self._publisher.end(self.state)


def _policy_of(config: Config) -> MakePolicy:
    """That of a worker of several devices."""
    devices = config.engine.devices
    if config.engine.policy == "spread":
        return lambda rows, waiting, share: Spread(devices, rows, waiting, share)
    if config.engine.policy == "cfg":
        return lambda rows, waiting, share: Pair(devices, rows, waiting, share)
    if config.engine.policy == "rounds":
        gangs: GangPolicy = Rounds(devices, round_steps=config.engine.round_steps)
    else:
        gangs = Deadline(devices)
    return lambda rows, waiting, share: GangScheduler(Batching(gangs, rows), devices, rows, waiting)
