"""Workflows in the router: each plan is served as a model.

It parses the request of a run, starts its `RunDriver`, and hands on the driver's events.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_common.contracts.tensors import META, Contract, text
from maskserve_common.errors import InvalidRequest
from maskserve_common.files.values import NO_VALUES, Values
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.client_call import identified
from maskserve_router.messages.control_message import control_request
from maskserve_router.messages.edit_call import MODELS
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.nodes.node_pool import hosts
from maskserve_router.scheduling.client_calls import ClientCalls, logged, messages_of
from maskserve_router.scheduling.served_workflows import ServedWorkflows
from maskserve_router.workers.autoscaling import servers_needed
from maskserve_router.workers.worker import Worker
from maskserve_router.workflows.model_messages import config_of, metadata_of
from maskserve_router.workflows.run_driver import RunCall, RunDriver, RunServices
from maskserve_router.workflows.run_times import RunTime
from maskserve_router.workflows.run_values import RunValues
from maskserve_workflows.node_types import ENCODE
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall, WorkflowPlan, every_step, is_edit
from maskserve_workflows.run import WorkflowRun

_LORA_LOAD_S: Final = 60.0


class Workflows(ServedWorkflows):
    """Runs plans. Use it from the event loop only.

    Args:
        plans: plans to serve.
        services: the parts of the router that runs use.
        workers: returns the workers that take edits now.
        limits: limits on texts.
        values: this host's folder.
    """

    def __init__(
        self,
        plans: Sequence[WorkflowPlan],
        services: RunServices,
        workers: Callable[[], list[Worker]],
        limits: LimitsConfig,
        values: Values = NO_VALUES,
    ) -> None:
        self._services, self._workers = services, workers
        self._limits, self._values = limits, values
        self.plans = {plan.name: plan for plan in plans}
        self.models = {**MODELS, **{plan.name: contract_of(plan) for plan in plans}}
        self.names = self.plans.keys()
        self._calls: ClientCalls[RunCall] = ClientCalls()
        self._loading: set[str] = set()
        """LoRAs that workers load before edits need them."""

    def start(self) -> None:
        self._services.nodes.start()

    async def close(self) -> None:
        await self._services.nodes.close()

    def metadata(self, name: str) -> pb.ModelMetadataResponse:
        return metadata_of(name, self.models[name])

    def config(self, name: str) -> pb.ModelConfigResponse:
        return config_of(name, self.models[name])

    def cancel(self, request_id: str) -> bool:
        return self._calls.cancel(request_id)

    async def listed(self, client: KeyHolder) -> dict[str, Any]:
        listed, records = [], await self._services.nodes.records(client)
        for plan in self.plans.values():
            models = sorted({NODE_TYPES[node].model for node in _nodes_of(plan)})
            where = {model: hosts(model, records) for model in models}
            listed.append({**msgspec.to_builtins(plan), "hosts": where})
        return {"object": "list", "data": listed}

    async def node_servers(self, client: KeyHolder) -> dict[str, Any]:
        return await self._services.nodes.records(client)

    def node_servers_needed(self) -> int:
        nodes = self._services.nodes
        return servers_needed(sum(nodes.busy().values())) if nodes.known else 0

    def busy(self) -> Mapping[str, float]:
        return self._services.nodes.busy()

    async def stream(
        self, message: ModelRequest, context: CallContext, *, watched: bool = True
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        call = _run_call(message, self.plans[message.head.model_name], context, watched)
        with ExitStack() as reservation:  # the bytes of the request and of all values
            with logged(call, call.log_fields):
                driver = await self._begin(call, context.headers, reservation)
                messages = messages_of(call, driver.outputs(), driver.events)
                async with self._early_loads(call.plan), aclosing(messages) as events:
                    async for event in events:
                        yield pb.ModelInferResponse.FromString(event)
            yield await driver.answer()

    async def _begin(
        self, call: RunCall, headers: Mapping[str, str], reservation: ExitStack
    ) -> RunDriver:
        """Admit a run and return its driver.

        Args:
            call: the run.
            headers: headers of the call.
            reservation: ends the run's part of what it uses when it is closed.

        Raises:
            MaskserveError: it cannot run now, or its inputs are faulty.
        """
        services, plan, client = self._services, call.plan, call.owner
        size = call.message.size
        reservation.enter_context(services.admission.operation(client, size))
        turn = partial(services.fair_share.run, client)
        inputs = await turn(size, _inputs, call.message, plan, self._limits.max_prompt_chars)
        client.check_adapters(plan.early, f"{plan.name}.loras")
        await services.nodes.check(_nodes_of(plan))
        reservation.enter_context(self._calls.under_way(call))
        values = await self._open_values(client, reservation)
        inputs = await turn(values.turn_bytes(size), values.store_inputs, plan, inputs)
        run = _run_time(plan, WorkflowRun(plan, inputs, values.exists), call)
        driver = RunDriver(services, call, run, values, headers, reservation)
        await driver.measure_inputs(inputs)
        services.times.begin(run)
        reservation.callback(services.times.end, run)
        return driver

    async def _open_values(self, client: KeyHolder, reservation: ExitStack) -> RunValues:
        """Return the values of a new run, which end when `reservation` is closed."""
        fair_share = self._services.fair_share
        arguments = self._values, client.scope, fair_share.later
        if self._values.host:
            values = await fair_share.locked(RunValues, *arguments)
        else:
            values = RunValues(*arguments)
        reservation.callback(values.end)
        return values

    async def infer(self, message: ModelRequest, context: CallContext) -> bytes:
        run = self.stream(message, context, watched=False)
        async with aclosing(run) as events:
            (answer,) = [event async for event in events]
        return await self._services.fair_share.run(
            context.client, answer.ByteSize(), answer.SerializeToString
        )

    @asynccontextmanager
    async def _early_loads(self, plan: WorkflowPlan) -> AsyncIterator[None]:
        """Let workers load the LoRAs that later nodes need, during the block."""
        early = asyncio.create_task(self._load_loras(plan.early))
        try:
            yield
        finally:
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)

    async def _load_loras(self, names: Sequence[str]) -> None:
        """Let the workers load LoRAs; runs that need the same LoRA share one load.

        Errors are ignored, because the edit that needs the LoRA reports them.
        """
        new = set(names) - self._loading
        self._loading |= new
        calls = [
            worker.upstream.control(
                control_request({"op": "adapter_load", "name": name}), _LORA_LOAD_S
            )
            for worker in self._workers()
            for name in sorted(new)
        ]
        try:
            await asyncio.gather(*calls, return_exceptions=True)
        finally:
            self._loading -= new


def _nodes_of(plan: WorkflowPlan) -> set[str]:
    """Return the types of the nodes that node servers run."""
    calls = (step for step in every_step(plan.steps) if isinstance(step, NodeCall))
    return {call.node for call in calls if not is_edit(call)} - {ENCODE}


def contract_of(plan: WorkflowPlan) -> Contract:
    """Return the tensors of a plan's model: inputs and outputs in capitals, SETTINGS and META."""
    return Contract(
        plan.about,
        (
            *(text(plan_input.name.upper()) for plan_input in plan.inputs),
            text("SETTINGS", optional=True),
        ),
        (*(text(name.upper()) for name in plan.outputs), META),
        decoupled=True,
    )


def _run_call(
    message: ModelRequest, plan: WorkflowPlan, context: CallContext, watched: bool
) -> RunCall:
    """Return the call of a request, with seed and request id; see `ServedWorkflows.stream`.

    Raises:
        InvalidRequest: naming the faulty setting.
    """
    settings = identified(_settings(message, plan), context.client.scope)
    if not watched:
        settings = structs.replace(settings, progress=False, preview_every=0)
    assert settings.request_id is not None
    return RunCall(
        message=message,
        settings=settings,
        owner=context.client,
        request_id=settings.request_id,
        timeout=context.timeout,
        plan=plan,
    )


def _settings(message: ModelRequest, plan: WorkflowPlan) -> EditSettings:
    """Return the settings of all edits of a run. Raises InvalidRequest: naming one."""
    tensor_names = {tensor.name for tensor in message.head.inputs}
    settings = parse_settings(message.read("SETTINGS") if "SETTINGS" in tensor_names else b"")
    if settings.output_format != "png":
        problem = f"is {settings.output_format}, and {plan.name} answers with PNG"
        raise InvalidRequest("SETTINGS.output_format", problem, "png")
    if settings.output_quality is not None:
        problem = f"is {settings.output_quality}, and {plan.name} answers with PNG"
        raise InvalidRequest("SETTINGS.output_quality", problem, "none")
    return settings


def _inputs(message: ModelRequest, plan: WorkflowPlan, longest: int) -> dict[str, Any]:
    """Return the inputs of a run.

    Args:
        message: the request.
        plan: plan of the run.
        longest: most characters of a text input.

    Raises:
        InvalidRequest: naming the faulty input.
    """
    inputs: dict[str, Any] = {}
    for plan_input in plan.inputs:
        name = plan_input.name.upper()
        value: bytes | str = message.read(name)
        if isinstance(value, bytes) and plan_input.kind == "text":
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise InvalidRequest(name, "is not UTF-8", "text") from None
            if len(value) > longest:
                raise InvalidRequest(name, f"is {len(value)} characters long", f"up to {longest}")
        inputs[plan_input.name] = value
    return inputs


def _run_time(plan: WorkflowPlan, machine: WorkflowRun, call: RunCall) -> RunTime:
    """Return the times of a run that begins: its due time, and the limit that its client set."""
    until = math.inf if call.deadline is None else call.deadline
    return RunTime(plan, machine, call.arrival, call.due, until)
