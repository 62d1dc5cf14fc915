"""Workflows in the router: each plan is served as a model, and this module runs it.

Edits of a run take the way of all edits (`Edits`: admission, keys, cost, retry); other nodes run on
node servers. `WorkflowRun` decides which nodes are ready. This module starts them, reports their
results and restarts lost ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.keys import name_of, scope_of, scoped
from maskserve_common.contracts.settings import EditSettings, dump_settings, parse_settings
from maskserve_common.contracts.tensors import META, Contract, text
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    TemplateNotFound,
    split_code,
)
from maskserve_common.files.values import NO_VALUES, RUN, Values
from maskserve_common.imaging.images import as_file
from maskserve_common.logs import about
from maskserve_router.fair_share import IN_A_THREAD, FairShare
from maskserve_router.keys import EditCounts, KeyHolder
from maskserve_router.messages.control_message import control_request
from maskserve_router.messages.edit_call import MODELS, request_id_of
from maskserve_router.messages.failures import Failure, let_go
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.edits import Edits
from maskserve_router.workers.autoscaling import servers_needed
from maskserve_router.workers.node_pool import NodePool, hosts
from maskserve_router.workers.stream_buffer import Message, Unread
from maskserve_router.workers.worker import Worker
from maskserve_router.workflows.run_times import RunTime, RunTimes
from maskserve_router.workflows.run_values import RunValues
from maskserve_workflows.node_types import EDIT
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import INPUTS, NodeCall, WorkflowPlan, every_step, output_kinds
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.run import Task, WorkflowRun, seed_of
from maskserve_workflows.values import Judgement, NamedValue, named_in, parts_of
from maskserve_workflows.wire import nbytes, picture_of

log = logging.getLogger("maskserve.router")


_NodeResult: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""Outputs of a node, and its report for META."""
_TRIES: Final = 3
"""Most tries of a node whose server is lost."""
_LONGEST_NAME: Final = 60
"""Longest part of a request's id in the ids of its edits."""
_SEED_BITS: Final = 32
_ROUTE: Final = "workflow"
_PROGRESS_EVENTS: Final = ("progress", "preview")
_EVENT_FIELDS: Final = ("event", "step", "steps", "restarts")
"""Fields of an edit's progress event that the run's event repeats."""
_EDIT_FIELDS: Final[tuple[str, ...]] = ("worker", "seed", "cache", "encoded")
"""Fields of an edit's META that the run's META repeats."""
_NODE_FIELDS: Final = {"server": "server", "seconds": "seconds", "kept": "reused", "tries": "tries"}
"""Key of the run's META -> field of `node_pool.NodeAnswer` that it repeats."""
_LORA_LOAD_S: Final = 60.0


class Workflows:
    """Runs plans. Use it from the event loop only.

    Args:
        plans: plans to serve.
        edits: answers the edits of runs.
        nodes: the node servers.
        workers: returns the workers that take edits now.
        admission: counts runs as a key's operations, and their values as its bytes.
        fair_share: threads that copy pictures off the loop.
        limits: limits on texts.
        times: predicts runs.
        values: this host's folder.
    """

    def __init__(
        self,
        plans: Sequence[WorkflowPlan],
        edits: Edits,
        nodes: NodePool,
        workers: Callable[[], list[Worker]],
        admission: Admission,
        fair_share: FairShare,
        limits: LimitsConfig,
        times: RunTimes,
        values: Values = NO_VALUES,
    ) -> None:
        self._times, self._values = times, values
        self._admission, self._fair_share, self._limits = admission, fair_share, limits
        self.plans = {plan.name: plan for plan in plans}
        self.models = {**MODELS, **{plan.name: contract_of(plan) for plan in plans}}
        """Model name -> tensors, for all models that clients may call."""
        self._edits, self._nodes, self._workers = edits, nodes, workers
        self._runs: dict[str, asyncio.Task[Any]] = {}
        """Request id -> run under way."""
        self._loading: set[str] = set()
        """LoRAs that workers load before edits need them."""

    def cancel(self, request_id: str) -> bool:
        """Cancel a run and all its nodes; return False if there is no run with this id."""
        task = self._runs.get(request_id)
        return task is not None and task.cancel("cancelled by id")

    async def listed(self, client: KeyHolder) -> dict[str, Any]:
        """Return the answer of `/v1/workflows`: all plans, and the servers of their models."""
        listed, records = [], await self._nodes.records(client)
        for plan in self.plans.values():
            models = sorted({NODE_TYPES[node].model for node in _nodes_of(plan)})
            where = {model: hosts(model, records) for model in models}
            listed.append({**msgspec.to_builtins(plan), "hosts": where})
        return {"object": "list", "data": listed}

    async def node_servers(self, client: KeyHolder) -> dict[str, Any]:
        """Return each node server's record; None: the server does not answer."""
        return await self._nodes.records(client)

    def node_servers_needed(self) -> int:
        """Return the number of node servers that recent calls need; 0: none are configured."""
        return servers_needed(sum(self._nodes.busy().values())) if self._nodes.known else 0

    async def stream(
        self,
        message: ModelRequest,
        headers: Mapping[str, str],
        timeout: float | None,
        client: KeyHolder,
        *,
        watched: bool = True,
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Yield the events of a run, then the answer.

        `progress` adds an event for each finished node and the edits' progress; `preview_every`
        adds previews.

        Args:
            message: the checked request.
            headers: headers of the call.
            timeout: seconds that the client waits.
            client: holder of the key that calls.
            watched: False if the client sees only the answer.

        Raises:
            MaskserveError: it cannot run, a node failed, it was cancelled, or it was late.
            Failure: an error of a worker or node server.
        """
        with ExitStack() as exit_stack:  # holds the bytes of the request and of all values
            exit_stack.enter_context(self._admission.operation(client, message.size))
            plan = self.plans[message.head.model_name]
            begin = time.monotonic()
            turn = partial(self._fair_share.run, client)
            settings, inputs = await turn(
                message.size, _parse, message, plan, client, self._limits.max_prompt_chars
            )
            if not watched:
                settings = structs.replace(settings, progress=False, preview_every=0)
            client.check_adapters(plan.early, f"{plan.name}.loras")
            await self._nodes.check(_nodes_of(plan))
            assert settings.request_id is not None
            if settings.request_id in self._runs:
                raise InvalidRequest(
                    "SETTINGS.request_id", "names an edit that is in flight", "a fresh id"
                )
            run_values_args = self._values, client.scope, self._fair_share.later
            named = bool(self._values.host)
            files = (
                await self._fair_share.locked(RunValues, *run_values_args)
                if named
                else RunValues(*run_values_args)
            )
            exit_stack.callback(files.end)
            locks = IN_A_THREAD if named else 0
            inputs = await turn(max(message.size, locks), files.store_inputs, plan, inputs)
            unread = Unread()

            def report_node(
                meta: Mapping[str, Any], outputs: Mapping[str, Any] | None = None, **more: bool
            ) -> None:
                event = _event(plan, {**meta, "request_id": _client_request_id(settings)}, outputs)
                unread.put(Message(event.SerializeToString(), **more))

            machine = WorkflowRun(plan, inputs, files.exists)
            run = _run_time(plan, machine, begin, timeout, settings)

            async def measure(task: Task) -> None:
                """Predict the seconds of an edit with a known mask, as far as possible."""
                with suppress(MaskserveError):
                    edit = _edit_request(task, settings, False, math.inf, files)
                    if (seconds := await self._edits.alone_s(edit, client)) is not None:
                        run.edit_s[task.key] = seconds

            for step in _edits_with_input_masks(plan):
                step_inputs = {
                    name: inputs.get(_input(ref), b"") for name, ref in step.inputs.items()
                }
                await measure(Task(step.id, step, {"prompt": "", **step_inputs, **step.texts}))
            self._times.begin(run)
            exit_stack.callback(self._times.end, run)
            streams = bool(settings.progress or settings.preview_every)
            shows = "image" in plan.outputs

            async def run_edit(task: Task, room: EditRoom) -> _NodeResult:
                begin = time.monotonic()
                due_s = self._times.due_of(run, task) - begin
                request = await turn(
                    nbytes(task.inputs), _edit_request, task, settings, streams, due_s, files
                )
                deadline = self._times.deadline_of(run, task)
                left_s = None if deadline == math.inf else max(deadline - begin, 0.001)
                arguments = request, request.size, client, headers, left_s, _ROUTE, room
                if streams:

                    def report_progress(meta: dict[str, Any], picture: dict[str, Any]) -> None:
                        event = {**meta, "key": task.key, "node": EDIT}
                        report_node(event, picture if shows else None, passing=True)

                    edit_outputs, meta = await _follow(
                        self._edits.stream(*arguments), turn, report_progress
                    )
                else:
                    answer = await self._edits.infer(*arguments)
                    edit_outputs, meta = await turn(len(answer), _edit_answer, answer)
                report = {name: meta[name] for name in _EDIT_FIELDS if name in meta}
                seconds = time.monotonic() - begin
                report["seconds"] = round(seconds, 4)
                self._times.learn(run, task, meta, seconds)
                return {"picture": picture_of(edit_outputs["image"])}, report

            async def call(task: Task) -> _NodeResult:
                if task.call.node == EDIT and task.call.id not in run.edit_s:
                    await measure(task)
                self._times.check_next(run, task)
                if task.call.node == EDIT:
                    run.sent[task.key] = _edit_id(task, settings)
                    with self._admission.room(client) as room:
                        node_outputs, report = await run_edit(task, room)
                else:
                    starts_by = self._times.due_of(run, task)
                    node = await self._nodes.call(task, client, starts_by, files.run)
                    node_outputs, report = (
                        node.outputs,
                        {key: getattr(node, field) for key, field in _NODE_FIELDS.items()},
                    )
                if any(isinstance(part, bytes) for part in parts_of(list(node_outputs.values()))):
                    node_outputs = await turn(
                        max(nbytes(node_outputs), locks), files.store_bytes, node_outputs
                    )
                exit_stack.enter_context(self._admission.hold(client, nbytes(node_outputs)))
                return node_outputs, report

            early = asyncio.create_task(self._load_loras(plan.early))
            driver = _RunDriver(
                machine, call, files, report_node if settings.progress else lambda event: None
            )
            work = asyncio.create_task(driver.run(run.until))
            work.add_done_callback(unread.end)
            self._runs[settings.request_id] = work
            try:
                with _log_run(plan, settings, client, driver.reports):
                    async for event in unread:
                        yield pb.ModelInferResponse.FromString(event)
                    try:
                        outputs = work.result()
                    except asyncio.CancelledError:
                        raise Cancelled("the workflow was cancelled") from None
                    except WorkflowError as error:
                        raise InvalidRequest(plan.name, str(error)) from None
                    except TimeoutError:
                        raise DeadlineExceeded(
                            f"{run.until - begin:.1f} s passed before {plan.name} ended"
                        ) from None
                meta = {
                    "event": "final",
                    "request_id": _client_request_id(settings),
                    "seed": settings.seed,
                    "workflow": plan.name,
                    "digest": plan.digest,
                    "seconds": round(time.monotonic() - begin, 4),
                    "outputs": output_kinds(plan),
                    "nodes": driver.reports,
                    "values": {"count": files.count, "bytes": files.bytes},
                }
                yield await turn(nbytes(outputs), _event, plan, meta, outputs)
            finally:
                del self._runs[settings.request_id]
                for running_task in (work, early):
                    running_task.cancel()
                await asyncio.gather(work, early, return_exceptions=True)

    async def infer(
        self,
        message: ModelRequest,
        headers: Mapping[str, str],
        timeout: float | None,
        client: KeyHolder,
    ) -> bytes:
        """Return only the answer; raises as `stream` does."""
        run = self.stream(message, headers, timeout, client, watched=False)
        async with aclosing(run) as events:
            (answer,) = [event async for event in events]
        return await self._fair_share.run(client, answer.ByteSize(), answer.SerializeToString)

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


class _RunDriver:
    """Drives one run.

    Args:
        machine: decides which tasks are ready.
        call: returns a task's outputs and its report for META.
        files: the run's values in files.
        on_ended: called for each finished node.
    """

    def __init__(
        self,
        machine: WorkflowRun,
        call: Callable[[Task], Coroutine[Any, Any, _NodeResult]],
        files: RunValues,
        on_ended: Callable[[dict[str, Any]], None],
    ) -> None:
        self._call, self._on_ended = call, on_ended
        self._machine, self._files = machine, files
        self.reports: list[dict[str, Any]] = []
        """Reports of finished nodes, in order of their ends."""

    async def run(self, until: float) -> dict[str, Any]:
        """Run all nodes and return the workflow's outputs, read from files. Raises TimeoutError at
        `until`.

        When it returns or raises, no node is running.
        """
        limit_s = None if until == math.inf else until - time.monotonic()
        under_way: dict[asyncio.Task[_NodeResult], Task] = {}
        try:
            async with asyncio.timeout(limit_s):
                while (outputs := self._read()) is None:
                    for task in self._machine.ready():
                        under_way[asyncio.create_task(self._call(task))] = task
                    finished_calls, _ = await asyncio.wait(
                        under_way, return_when=asyncio.FIRST_COMPLETED
                    )
                    # In the order of their start, so that of several errors always the same one is
                    # reported.
                    for node_call in [call for call in under_way if call in finished_calls]:
                        self._ended(under_way.pop(node_call), node_call)
                    self._files.free(self._machine.needed())
            return outputs
        finally:
            for node_call in under_way:
                node_call.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _read(self) -> dict[str, Any] | None:
        """Return the outputs once all nodes have ended; None: some still run, or run again."""
        if not self._machine.ended:
            return None
        outputs = self._machine.outputs
        lost_values = [
            value for value in named_in(list(outputs.values())) if not self._files.exists(value)
        ]
        if lost_values:
            self._machine.rerun_sources_of(lost_values)
            return None
        return self._files.read(outputs)

    def _ended(self, task: Task, call: asyncio.Task[_NodeResult]) -> None:
        tries = self._machine.tries[task.key]
        try:
            outputs, call_report = call.result()
        except EngineFailed as error:
            # An edit has already been tried on another worker (`Dispatcher`).
            if task.call.node == EDIT or tries == _TRIES:
                raise
            self._lost(task, error)
            return
        except (TemplateNotFound, InvalidRequest, Failure) as error:
            if error.code == TemplateNotFound.code and named_in(list(task.inputs.values())):
                if tries == _TRIES:
                    raise EngineFailed(f"{task.key}: its inputs were lost on every try") from None
                self._lost(task, error)
                return
            if error.code == DeadlineExceeded.code:
                raise DeadlineExceeded(f"{task.key} was not done in time") from None
            if error.code != InvalidRequest.code:
                raise
            text = error.details if isinstance(error, Failure) else str(error)
            raise InvalidRequest(task.key, split_code(text)[1]) from None
        total_tries = call_report.pop("tries", 1) + tries - 1
        report = {"key": task.key, "node": task.call.node, "tries": total_tries, **call_report}
        self.reports[:] = [
            node_report for node_report in self.reports if node_report["key"] != task.key
        ]  # a node that runs again replaces its report
        self.reports.append(report)
        self._on_ended({"event": "node", **report})
        self._files.register(outputs)
        self._machine.done(task.key, outputs)

    def _lost(self, task: Task, error: MaskserveError | Failure) -> None:
        """Make the node ready again, without an error for the client."""
        let_go(error)  # its traceback would keep the frame of `run`, and so all outputs, in memory
        self._machine.lost(task.key)


def _nodes_of(plan: WorkflowPlan) -> set[str]:
    """Return the types of the nodes that node servers run."""
    calls = (step for step in every_step(plan.steps) if isinstance(step, NodeCall))
    return {call.node for call in calls} - {EDIT}


def _edits_with_input_masks(plan: WorkflowPlan) -> list[NodeCall]:
    """Return the edits whose masks are inputs of the workflow."""
    calls = (step for step in every_step(plan.steps) if isinstance(step, NodeCall))
    return [step for step in calls if step.node == EDIT and _input(step.inputs["mask"])]


def _input(ref: str) -> str:
    """Return the workflow input that a reference names; empty: none."""
    owner, _, name = ref.partition(".")
    return name if owner == INPUTS else ""


def _edit_answer(answer: bytes) -> _NodeResult:
    """Return the picture and META of a worker's answer."""
    return _parts(pb.ModelInferResponse.FromString(answer))


def _stream_answer(message: bytes) -> _NodeResult:
    """Return the picture and META of a stream's message; empty for the message that ends it."""
    return _parts(pb.ModelStreamInferResponse.FromString(message).infer_response)


async def _follow(
    answers: AsyncGenerator[bytes, None],
    call: Callable[..., Coroutine[Any, Any, _NodeResult]],
    report: Callable[[dict[str, Any], dict[str, Any]], None],
) -> _NodeResult:
    """Return the last message of an edit's stream; call `report` for progress and previews before
    it.
    """
    last: _NodeResult = {}, {}
    async with aclosing(answers):
        async for answer in answers:
            picture, meta = await call(len(answer), _stream_answer, answer)
            if meta.get("event") in _PROGRESS_EVENTS:
                report({name: meta[name] for name in _EVENT_FIELDS if name in meta}, picture)
            elif meta:
                last = picture, meta
    return last


def _parts(response: pb.ModelInferResponse) -> _NodeResult:
    if not response.outputs:
        return {}, {}
    outputs = bytes_tensor.outputs(response)
    picture = {"image": bytes(outputs["IMAGE"])} if len(outputs["IMAGE"]) else {}
    return picture, msgspec.json.decode(outputs["META"])


@contextmanager
def _log_run(
    plan: WorkflowPlan,
    settings: EditSettings,
    client: KeyHolder,
    nodes: Sequence[dict[str, Any]],
) -> Iterator[None]:
    """Write a log line when the run ends, and count it for its client."""
    begin, code = time.monotonic(), Cancelled.code
    try:
        yield
        code = "OK"
    except (MaskserveError, Failure) as error:
        code = error.code
        raise
    except Exception:
        code = EngineFailed.code
        raise
    finally:
        seconds = time.monotonic() - begin
        served = client.served.setdefault(plan.name, EditCounts())
        served.add(seconds, succeeded=code == "OK")
        fields = {
            "code": code,
            "workflow": plan.name,
            "client": client.name,
            "nodes": len(nodes),
            "seconds": round(seconds, 4),
        }
        extra = {**about(settings.request_id or ""), "event": "workflow", "fields": fields}
        log.info("workflow %s", code, extra=extra)


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


def _parse(
    message: ModelRequest, plan: WorkflowPlan, client: KeyHolder, longest: int
) -> tuple[EditSettings, dict[str, Any]]:
    """Return the settings of all edits of a run, with seed and request id, and the run's inputs.

    Args:
        message: the request.
        plan: plan of the run.
        client: holder of the key that calls.
        longest: most characters of a text input.

    Raises:
        InvalidRequest: naming the faulty input.
    """
    tensor_names = {tensor.name for tensor in message.head.inputs}
    settings = parse_settings(message.read("SETTINGS") if "SETTINGS" in tensor_names else b"")
    if settings.output_format != "png":
        problem = f"is {settings.output_format}, and {plan.name} answers with PNG"
        raise InvalidRequest("SETTINGS.output_format", problem, "png")
    if settings.output_quality is not None:
        problem = f"is {settings.output_quality}, and {plan.name} answers with PNG"
        raise InvalidRequest("SETTINGS.output_quality", problem, "none")
    settings = structs.replace(
        settings,
        request_id=request_id_of(settings.request_id or uuid.uuid4().hex, client.scope),
        seed=secrets.randbits(_SEED_BITS) if settings.seed is None else settings.seed,
    )
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
    return settings, inputs


def _run_time(
    plan: WorkflowPlan,
    machine: WorkflowRun,
    begin: float,
    timeout: float | None,
    settings: EditSettings,
) -> RunTime:
    """Return the times of a run that begins: its due time, and the limit that its client set."""
    limits = [item for item in (timeout, _seconds(settings.limit_ms)) if item is not None]
    dues = [*limits, *([] if settings.deadline_ms is None else [settings.deadline_ms / 1e3])]
    due_time, deadline = (begin + min(item, default=math.inf) for item in (dues, limits))
    return RunTime(plan, machine, begin, due_time, deadline)


def _edit_request(
    task: Task, settings: EditSettings, streams: bool, due_s: float, files: RunValues | None
) -> ModelRequest:
    """Return the request of a run's edit. The node's settings override those of the run.

    Args:
        task: the edit.
        settings: settings of the run.
        streams: True for progress and previews.
        due_s: seconds until the edit is due; infinite: it has no due time. A late edit continues,
            because the run has a limit of its own.
        files: the run's values, whose references a worker of this host reads; None: send bytes.
    """
    assert settings.seed is not None
    edit_settings = {
        **msgspec.json.decode(dump_settings(settings)),
        "seed": seed_of(settings.seed, task.key),
        **_due(task, due_s),
        **task.call.settings,
        "request_id": name_of(_edit_id(task, settings)),
        "output_format": "png",
    }
    model = f"{EDIT}_stream" if streams else EDIT
    request = ModelRequest(pb.ModelInferRequest(model_name=model))
    inputs: dict[str, Any] = {
        name: value.element if isinstance(value, NamedValue) else value
        for name, value in task.inputs.items()
    }
    if files is not None and files.run:

        def elsewhere() -> ModelRequest:
            task_with_bytes = Task(task.key, task.call, files.read(task.inputs))
            return _edit_request(task_with_bytes, settings, streams, due_s, None)

        request.host, request.elsewhere = files.host, elsewhere
        request.head.parameters[RUN].string_param = files.run
    request.add("IMAGE", [inputs["image"]])
    request.add("MASK", [inputs["mask"]])
    request.add("PROMPT", [inputs["prompt"].encode()])
    request.add("SETTINGS", [msgspec.json.encode(edit_settings)])
    if "control" in inputs:
        request.add("CONTROL", [inputs["control"]])
    for output in ("IMAGE", "META"):
        request.head.outputs.add(name=output)
    return request


def _edit_id(task: Task, settings: EditSettings) -> str:
    """Return the request id of a run's edit."""
    assert settings.request_id is not None
    name = name_of(settings.request_id)
    if len(name) > _LONGEST_NAME:
        name = hashlib.sha256(name.encode()).hexdigest()[:32]
    place = task.key.replace("[", ".").replace("]", "")
    return scoped(scope_of(settings.request_id), f"{name}/{place}")


def _due(task: Task, due_s: float) -> dict[str, Any]:
    if due_s == math.inf or "deadline_ms" in task.call.settings:
        return {}
    return {"deadline_ms": max(int(1e3 * due_s), 1), "on_late": "finish"}


def _event(
    plan: WorkflowPlan, meta: Mapping[str, Any], outputs: Mapping[str, Any] | None = None
) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=plan.name, model_version="1")
    for name, value in (outputs or {}).items():
        bytes_tensor.add_output(response, name.upper(), [_encoded(value)])
    bytes_tensor.add_output(response, "META", [msgspec.json.encode(meta)])
    return response


def _encoded(value: Any) -> bytes:
    if isinstance(value, Judgement):
        return msgspec.json.encode(value)
    return value.encode() if isinstance(value, str) else as_file(value)


def _client_request_id(settings: EditSettings) -> str:
    """Return the request id as the client knows it."""
    return name_of(settings.request_id or "")


def _seconds(limit_ms: int | None) -> float | None:
    return None if limit_ms is None else limit_ms / 1e3
