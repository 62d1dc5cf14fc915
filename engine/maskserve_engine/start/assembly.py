"""Assembly of an engine from its configuration: on one device or several, with or without a cache,
LoRAs, ControlNets and a ControlNet service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from maskserve_common.config import Config
from maskserve_common.errors import MaskserveError
from maskserve_common.observations import Observations
from maskserve_common.resources.loading import Kind, Loadable, Loaded
from maskserve_common.resources.resource_states import ResourceStates
from maskserve_engine.adapters.control_net_loader import CONTROL_NETS, ControlNetLoader
from maskserve_engine.adapters.control_net_loader import Place as PlaceNet
from maskserve_engine.adapters.fuse import served_form
from maskserve_engine.adapters.lora_loader import LORAS, LoraLoader, Place
from maskserve_engine.base.job import Conditioning
from maskserve_engine.base.mailbox import Inbox, OutputThread
from maskserve_engine.cache.loader import HostMover
from maskserve_engine.cache.priming_prompt import PromptFile
from maskserve_engine.cache.store import Store
from maskserve_engine.control_link.network import connection_to
from maskserve_engine.control_link.served import ServiceCalls
from maskserve_engine.control_link.served_nets import ServedNetLoader
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.fitting.card_table import check_fits
from maskserve_engine.fitting.entry_store import (
    estimated_costs,
    open_mover,
    open_store,
    template_layout,
)
from maskserve_engine.fitting.memory import device_memory, memory_table
from maskserve_engine.gangs.checks import check_devices
from maskserve_engine.gangs.degree_times import DegreeTimes
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.gangs.messages import DeviceDescription
from maskserve_engine.gangs.processes import RankProcesses
from maskserve_engine.loop.engine import Engine, Parts
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.loop.measured_costs import MeasuredCosts, PriceList, StepTimes
from maskserve_engine.loop.status_publisher import StatusPublisher, new_counters
from maskserve_engine.loop.step_planner import StepPlanner
from maskserve_engine.loop.step_runner import StepRunner
from maskserve_engine.planning.cost_profile import read_profile
from maskserve_engine.requests.audits import Audits
from maskserve_engine.requests.control_nets import ControlNetSource, EditControlNets
from maskserve_engine.requests.due_times import DueTimes
from maskserve_engine.requests.edit_adapters import EditAdapters
from maskserve_engine.requests.executor import Executor
from maskserve_engine.requests.loras import Loras, LoraSource
from maskserve_engine.requests.manager import RequestManager
from maskserve_engine.requests.primings import Primings
from maskserve_engine.requests.state import RequestTable
from maskserve_engine.requests.templates import TemplateCache
from maskserve_engine.scheduling.policies import is_static, policy_of
from maskserve_engine.scheduling.step_scheduler import MakePolicy, StepScheduler
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_engine.stages.cpu_threads import one_cpu_thread
from maskserve_engine.stages.loader import device_in_words, device_of, dtype_of
from maskserve_engine.stages.revision import model_revision

_log = logging.getLogger(__name__)


def load_engine(
    config: Config,
    lora_loader: Callable[[Config, Place], LoraSource] = LoraLoader,
    policy: MakePolicy | None = None,
    calls: Callable[[str], ServiceCalls] | None = None,
) -> Engine:
    """Load the model and return an engine that steps it; slow.

    Args:
        config: configuration of this worker.
        lora_loader: loader of LoRAs (see `assemble`).
        policy: makes the scheduling policy; None: the configured one.
        calls: makes the calls of a ControlNet service, from its address; None: ControlNets run in
            this process.

    Raises:
        ConfigError: the model cannot be served.
    """
    if config.engine.devices > 1:
        configured_policy = partial(policy_of(config.engine).make, config.engine)
        return _load_ranks(config, policy or configured_policy, lora_loader)
    _log.info("the denoiser's device: %s", device_in_words(config))
    device = device_of(config)
    if device.type == "cuda":
        check_fits(config, device_memory(device)[1])
    with one_cpu_thread():
        adapter = load_adapter(config)
    revision = model_revision(config.model.path, served_form(config))
    chosen = policy or partial(StepScheduler, static=is_static(config.engine))
    if calls is None:
        return assemble(config, adapter, revision=revision, policy=chosen, lora_loader=lora_loader)
    dtype, patience_s = str(dtype_of(config)), config.controls.service_timeout_s

    def service_at(address: str) -> ControlService:
        connect = connection_to(address, adapter.device)
        return ControlService(
            calls(address),
            adapter.device,
            dtype.removeprefix("torch."),
            patience_s,
            connect,
            address,
        )

    services = ControlServices(config.controls.addresses, service_at)
    return assemble(
        config,
        adapter,
        revision=revision,
        executor=lambda adapter, store: LocalExecutor(adapter, store, services),
        policy=chosen,
        lora_loader=lora_loader,
        net_loader=lambda config, spec, load: ServedNetLoader(config, spec, load, services),
    )


def _load_ranks(
    config: Config, policy: MakePolicy, lora_loader: Callable[[Config, Place], LoraSource]
) -> Engine:
    """Build an engine with one process per device; this process has the model's shapes, but
    no weights.

    Raises:
        ConfigError: a rank could not be started.
    """
    shared = policy_of(config.engine)
    on_gpus = device_of(config).type == "cuda"
    check_devices(config, torch.cuda.device_count() if on_gpus else 0)
    ranks = RankProcesses(config)
    scheduling_config = ranks.scheduling_config
    most = config.engine.devices if shared.shares_steps else 1
    inbox = Inbox()
    return assemble(
        scheduling_config,
        load_adapter(scheduling_config),
        revision=ranks.hello.revision,
        executor=lambda adapter, store: GangExecutor(
            ranks, adapter, store, inbox.put, most, deals=shared.deals
        ),
        policy=policy,
        lora_loader=lora_loader,
        rank_device=ranks.hello.device,
        inbox=inbox,
    )


def assemble(
    config: Config,
    adapter: Adapter,
    prompt: Callable[[], Conditioning | None] | None = None,
    revision: str = "",
    executor: Callable[[Adapter, Store | None], Executor] = LocalExecutor,
    policy: MakePolicy = StepScheduler,
    lora_loader: Callable[[Config, Place], LoraSource] = LoraLoader,
    net_loader: Callable[[Config, ModelSpec, PlaceNet], ControlNetSource] = ControlNetLoader,
    rank_device: DeviceDescription | None = None,
    inbox: Inbox | None = None,
) -> Engine:
    """Build an engine from its components.

    Args:
        config: configuration of this worker.
        adapter: the model.
        prompt: reads the priming prompt's embedding; by default from the runtime folder, where the
            encoder puts it.
        revision: digest of the served weights.
        executor: makes the executor, from the store of entries or None.
        policy: makes the scheduling policy.
        lora_loader: loader of LoRAs; None: edits have none.
        net_loader: loader of ControlNets; None: edits have none.
        rank_device: the rows' devices, if other processes have the rows. Entries are then in files,
            which all these processes read.
        inbox: inbox of the engine's commands, if others need it too.
    """
    commands = inbox or Inbox()
    # If other processes have the rows, this one moves no entries.
    mover = HostMover() if rank_device else open_mover(config)
    costs = MeasuredCosts(rank_device.costs if rank_device else estimated_costs(config, mover))
    kinds, size = template_layout(config, adapter, costs.model)
    memory = memory_table(config, adapter, size) if rank_device is None else rank_device.memory
    _log.info("%s", memory.text())
    if memory.left < 0:
        _log.warning("budgets exceed the device's memory: make [cache] budget_bytes smaller")

    def on_entries(key: str) -> None:
        commands.put(lambda: manager.entries_arrived(key))

    def on_loaded(kind: Kind, item: Loadable, outcome: Loaded | MaskserveError) -> None:
        commands.put(lambda: manager.adapter_loaded(kind, item, outcome))

    cache = store = None
    if config.cache.enabled:
        local_cache_bytes = 0 if rank_device else memory.cache
        store = open_store(config, size, costs.model, local_cache_bytes, mover)
        store.lower.on_change = on_entries
        read_prompt = prompt or _prompt_file(config).read
        dtype = str(dtype_of(config))
        cache = TemplateCache(config, adapter, store, kinds, revision, dtype, read_prompt)
    step_executor = executor(adapter, store)
    loras = lora_loader(config, step_executor.load_lora) if config.adapters.store else None
    nets = None
    if config.controls.folder:
        nets = net_loader(config, adapter.spec, step_executor.load_net)
    output, observations, counters = OutputThread(), Observations(), new_counters()
    audits = Audits(config.cache, observations)
    degrees = _degree_times(config, adapter, costs, step_executor)
    prices = PriceList(
        config, adapter, costs, size.anchors, None if degrees is None else degrees.prices
    )

    adapters, resource_states = _edit_adapters(
        config, adapter, step_executor, loras, nets, on_loaded, observations
    )
    scheduler = policy(
        config.engine.max_rows, config.engine.max_waiting, config.cache.priming_share
    )
    primings = None
    if cache is not None:
        primings = Primings(
            adapter,
            cache,
            scheduler,
            step_executor,
            adapters,
            lambda key: manager.template_settled(key),
        )

    request_table = RequestTable(scheduler, resource_states, (degrees or costs).step_seconds)
    due_times = DueTimes(config, prices.measured)
    manager = RequestManager(
        config,
        adapter,
        step_executor,
        output,
        request_table,
        adapters,
        audits,
        due_times,
        primings,
        observations,
    )
    runner = StepRunner(
        config,
        adapter,
        step_executor,
        manager,
        StepPlanner(costs),
        output,
        StepTimes(costs, step_executor.take_moves, counters, observations),
        counters,
        observations,
        degrees.overhead_shares if degrees is not None else lambda edits, ranks: 0.0,
    )
    return Engine(
        config,
        Parts(
            adapter=adapter,
            executor=step_executor,
            manager=manager,
            runner=runner,
            publisher=StatusPublisher(
                config, adapter.spec, prices, manager, cache, counters, memory
            ),
            inbox=commands,
            output=output,
            audits=audits,
            observations=observations,
            counters=counters,
            memory=memory,
            cache=cache,
            lora_loader=loras,
            net_loader=nets,
        ),
    )


def _edit_adapters(
    config: Config,
    adapter: Adapter,
    executor: Executor,
    loras: LoraSource | None,
    nets: ControlNetSource | None,
    on_loaded: Callable[[Kind, Loadable, Loaded | MaskserveError], None],
    observations: Observations,
) -> tuple[EditAdapters, ResourceStates]:
    """Return the LoRAs and ControlNets of edits, and the states of those on the device."""
    budgets = {
        LORAS.name: config.adapters.device_bytes,
        CONTROL_NETS.name: config.controls.device_bytes,
    }
    states = ResourceStates(
        config.engine.max_waiting, budgets, lambda resource: adapters.record_eviction(resource)
    )
    edit_loras = edit_nets = None
    if loras is not None:
        edit_loras = Loras(config, states, loras, partial(on_loaded, LORAS), observations)
    if nets is not None:
        edit_nets = EditControlNets(states, nets, partial(on_loaded, CONTROL_NETS), observations)
    adapters = EditAdapters(config, adapter, executor, edit_loras, edit_nets)
    return adapters, states


def _prompt_file(config: Config) -> PromptFile:
    """Return the file of the priming prompt's embedding, which the encoder writes."""
    return PromptFile(Path(config.runtime_dir) if config.runtime_dir else None)


def _degree_times(
    config: Config, adapter: Adapter, costs: MeasuredCosts, executor: Executor
) -> DegreeTimes | None:
    """Return the times of steps that several ranks share; None: this process has the rows."""
    if not isinstance(executor, GangExecutor):
        return None
    file = config.engine.costs
    profiled = read_profile(file).exchange if file else None
    return DegreeTimes(
        adapter, costs, lambda: profiled or executor.ranks.exchange, config.engine.devices
    )
