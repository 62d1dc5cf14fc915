"""A run in progress: it starts its ready nodes, reports those that end, and restarts lost ones.

`WorkflowRun` decides which nodes are ready. Edits take the way of all edits (`Edits`: admission,
keys, cost, retry); other nodes run on node servers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.keys import name_of
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    TemplateNotFound,
    split_code,
)
from maskserve_common.routing import EncodingPlace
from maskserve_common.servers.failure import Failure
from maskserve_router.fair_share import FairShare
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.client_call import ClientCall
from maskserve_router.messages.failures import drop_tracebacks
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.edits import Edits
from maskserve_router.workers.stream_buffer import Message, StreamBuffer
from maskserve_router.workflows.run_messages import (
    NodeResult,
    edit_answer,
    edit_id,
    edit_request,
    encode_request,
    run_event,
    stream_answer,
)
from maskserve_router.workflows.run_times import RunTime, RunTimes
from maskserve_router.workflows.run_values import RunValues
from maskserve_workflows.node_types import ENCODE
from maskserve_workflows.plan import (
    INPUTS,
    NodeCall,
    WorkflowPlan,
    edit_calls,
    is_edit,
    kind_of_edit,
    output_kinds,
    refs_of,
)
from maskserve_workflows.ports import WorkflowError
from maskserve_workflows.run import Task
from maskserve_workflows.values import map_parts, named_in, parts_of
from maskserve_workflows.wire import nbytes, picture_of

log = logging.getLogger("maskserve.router")
_TRIES: Final = 3
"""Most tries of a node whose server is lost."""
_ROUTE: Final = "workflow"
_PROGRESS_EVENTS: Final = ("progress", "preview")
_EVENT_FIELDS: Final = ("event", "step", "steps", "restarts")
"""Fields of an edit's progress event that the run's event repeats."""
_EDIT_FIELDS: Final[tuple[str, ...]] = ("worker", "seed", "cache", "encoded")
"""Fields of an edit's META that the run's META repeats."""
_NODE_FIELDS: Final = {"server": "server", "seconds": "seconds", "kept": "reused", "tries": "tries"}
"""Key of the run's META -> field of `node_messages.NodeAnswer` that it repeats."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunServices:
    """The parts of the router that runs use."""

    edits: Edits
    """Answers the edits of runs."""
    nodes: NodePool
    """The node servers."""
    admission: Admission
    """Counts runs as a key's operations, and their values as its bytes."""
    fair_share: FairShare
    """Threads that copy pictures off the loop."""
    times: RunTimes
    """Predicts runs."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunCall(ClientCall):
    """A workflow run, from a client's request to its answer."""

    kind = "workflow"
    settings: EditSettings
    """Settings of all its edits, with seed and request id."""
    plan: WorkflowPlan
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Reports of finished nodes, in order of their ends."""

    def log_fields(self, code: str, error: MaskserveError | Failure | None) -> dict[str, Any]:
        """Return further fields of its log line, for `logged`."""
        return {"workflow": self.plan.name, "nodes": len(self.reports)}


@dataclass(slots=True, eq=False)
class RunDriver:
    """Drives one run. Use it from the event loop only."""

    services: RunServices
    call: RunCall
    time: RunTime
    """The run's plan, its state, and when it is due."""
    values: RunValues
    headers: Mapping[str, str]
    """Headers of the call."""
    reservation: ExitStack
    """Counts the bytes of its values until it is closed."""
    events: StreamBuffer = field(default_factory=StreamBuffer)
    """Events for the client, encoded ModelInferResponses."""

    async def measure_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Predict the seconds of the edits that follow from inputs of the workflow."""
        for step in _edits_of_inputs(self.time.plan):
            step_inputs = {
                name: map_parts(refs, lambda ref: inputs.get(_input(ref), b""))
                for name, refs in step.inputs.items()
            }
            await self._measure(Task(step.id, step, {"prompt": "", **step_inputs, **step.texts}))

    async def outputs(self) -> dict[str, Any]:
        """Run all nodes and return the workflow's outputs, read from files.

        When it returns or raises, no node is running.

        Raises:
            MaskserveError: a node failed, or the run was late.
            Failure: an error of a worker or node server.
        """
        until = self.time.until
        limit_s = None if until == math.inf else until - time.monotonic()
        under_way: dict[asyncio.Task[NodeResult], Task] = {}
        try:
            async with asyncio.timeout(limit_s):
                while (outputs := self._read()) is None:
                    for task in self.time.machine.ready():
                        under_way[asyncio.create_task(self._call(task))] = task
                    finished_calls, _ = await asyncio.wait(
                        under_way, return_when=asyncio.FIRST_COMPLETED
                    )
                    # In the order of their start, so that of several errors always the same one is
                    # reported.
                    for node_call in [call for call in under_way if call in finished_calls]:
                        self._take_result(under_way.pop(node_call), node_call)
                    self.values.free(self.time.machine.needed())
            return outputs
        except WorkflowError as error:
            raise InvalidRequest(self.time.plan.name, str(error)) from None
        except TimeoutError:
            seconds = until - self.time.begin
            raise DeadlineExceeded(
                f"{seconds:.1f} s passed before {self.time.plan.name} ended"
            ) from None
        finally:
            for node_call in under_way:
                node_call.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def answer(self) -> pb.ModelInferResponse:
        """Return the answer of the run, whose work has ended."""
        assert self.call.work is not None
        plan, outputs = self.time.plan, self.call.work.result()
        meta = {
            "event": "final",
            "request_id": self._client_request_id,
            "seed": self.call.settings.seed,
            "workflow": plan.name,
            "digest": plan.digest,
            "seconds": round(time.monotonic() - self.time.begin, 4),
            "outputs": output_kinds(plan),
            "nodes": self.call.reports,
            "values": {"count": self.values.count, "bytes": self.values.bytes},
        }
        return await self._turn(nbytes(outputs), run_event, plan, meta, outputs)

    async def _call(self, task: Task) -> NodeResult:
        """Run a node and return its outputs, counted as the client's bytes, and its report."""
        if is_edit(task.call) and task.call.id not in self.time.edit_s:
            await self._measure(task)
        self.services.times.check_next(self.time, task)
        if task.call.node == ENCODE:
            outputs, report = await self._encode(task)
        elif is_edit(task.call):
            self.time.sent[task.key] = edit_id(task, self.call.settings)
            with self.services.admission.room(self.call.owner) as room:
                outputs, report = await self._edit(task, room)
        else:
            outputs, report = await self._node(task)
        if any(isinstance(part, bytes) for part in parts_of(list(outputs.values()))):
            size = self.values.turn_bytes(nbytes(outputs))
            outputs = await self._turn(size, self.values.store_bytes, outputs)
        self.reservation.enter_context(
            self.services.admission.hold(self.call.owner, nbytes(outputs))
        )
        return outputs, report

    async def _edit(self, task: Task, room: EditRoom) -> NodeResult:
        """Run an edit at a worker.

        Args:
            task: the edit.
            room: memory of its request and answer.
        """
        begin, times = time.monotonic(), self.services.times
        due_s = times.due_of(self.time, task) - begin
        request = await self._turn(
            nbytes(task.inputs),
            edit_request,
            task,
            self.call.settings,
            self._streams,
            due_s,
            self.values,
        )
        deadline = times.deadline_of(self.time, task)
        left_s = None if deadline == math.inf else max(deadline - begin, 0.001)
        context = CallContext(self.call.owner, request.size, self.headers, _ROUTE, left_s)
        if self._streams:
            answers = self.services.edits.stream(request, context, room)
            outputs, meta = await _follow(answers, self._turn, partial(self._report_progress, task))
        else:
            answer = await self.services.edits.infer(request, context, room)
            outputs, meta = await self._turn(len(answer), edit_answer, answer)
        report = {name: meta[name] for name in _EDIT_FIELDS if name in meta}
        seconds = time.monotonic() - begin
        report["seconds"] = round(seconds, 4)
        times.learn(self.time, task, meta, seconds)
        return {"picture": picture_of(outputs["image"])}, report

    async def _encode(self, task: Task) -> NodeResult:
        """Encode a picture for edits of the run at a worker of this host. If that fails, or the run
        has no folder of values, they encode it themselves.
        """
        begin, encoded, meta = time.monotonic(), None, dict[str, Any]()
        if self.values.run:
            size = nbytes(task.inputs)
            request = await self._turn(size, encode_request, task, self.call.settings, self.values)
            try:
                answer = await self.services.edits.encode(request, self.call.owner)
                _, meta = edit_answer(answer)
                encoded = EncodingPlace(self.values.host, meta["timings_ms"]["encode"] / 1e3)
                self.services.times.learn_encoding(time.monotonic() - begin)
            except (MaskserveError, Failure) as error:
                log.info("%s: the edits encode by themselves: %s", task.key, error)
                drop_tracebacks(error)
        report = {name: meta[name] for name in _EDIT_FIELDS if name in meta}
        report["seconds"] = round(time.monotonic() - begin, 4)
        return {"encoding": encoded}, report

    async def _node(self, task: Task) -> NodeResult:
        """Run another node at a node server."""
        starts_by = self.services.times.due_of(self.time, task)
        node = await self.services.nodes.call(task, self.call.owner, starts_by, self.values.run)
        return node.outputs, {key: getattr(node, name) for key, name in _NODE_FIELDS.items()}

    async def _measure(self, task: Task) -> None:
        """Predict the seconds of an edit by its mask, or its size, as far as possible."""
        with suppress(MaskserveError):
            edit = edit_request(task, self.call.settings, False, math.inf, self.values)
            kind = kind_of_edit(task.call)  # its source may be unknown yet
            seconds = await self.services.edits.alone_s(edit, self.call.owner, kind)
            if seconds is not None:
                self.time.edit_s[task.key] = seconds

    async def _turn(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(*arguments)`, run in the client's turn; see `FairShare.run`."""
        return await self.services.fair_share.run(self.call.owner, size, work, *arguments)

    @property
    def _streams(self) -> bool:
        """True if the client gets progress or previews of edits."""
        return bool(self.call.settings.progress or self.call.settings.preview_every)

    @property
    def _client_request_id(self) -> str:
        """The request id as the client knows it."""
        return name_of(self.call.request_id)

    def _report(
        self,
        meta: Mapping[str, Any],
        outputs: Mapping[str, Any] | None = None,
        *,
        passing: bool = False,
    ) -> None:
        """Add an event for the client."""
        meta = {**meta, "request_id": self._client_request_id}
        event = run_event(self.time.plan, meta, outputs)
        self.events.put(Message(event.SerializeToString(), passing))

    def _report_progress(
        self, task: Task, meta: Mapping[str, Any], picture: Mapping[str, Any]
    ) -> None:
        """Add an event of an edit's progress, with its preview if the workflow gives an image."""
        preview = picture if "image" in self.time.plan.outputs else None
        self._report({**meta, "key": task.key, "node": task.call.node}, preview, passing=True)

    def _read(self) -> dict[str, Any] | None:
        """Return the outputs once all nodes have ended; None: some still run, or run again."""
        if not self.time.machine.ended:
            return None
        outputs = self.time.machine.outputs
        lost_values = [
            value for value in named_in(list(outputs.values())) if not self.values.exists(value)
        ]
        if lost_values:
            self.time.machine.rerun_sources_of(lost_values)
            return None
        return self.values.read(outputs)

    def _take_result(self, task: Task, call: asyncio.Task[NodeResult]) -> None:
        tries = self.time.machine.tries[task.key]
        try:
            outputs, call_report = call.result()
        except EngineFailed as error:
            # An edit has already been tried on another worker (`Dispatcher`).
            if is_edit(task.call) or tries == _TRIES:
                raise
            self._retry(task, error)
            return
        except (TemplateNotFound, InvalidRequest, Failure) as error:
            if error.code == TemplateNotFound.code and named_in(list(task.inputs.values())):
                if tries == _TRIES:
                    raise EngineFailed(f"{task.key}: its inputs were lost on every try") from None
                self._retry(task, error)
                return
            if error.code == DeadlineExceeded.code:
                raise DeadlineExceeded(f"{task.key} was not done in time") from None
            if error.code != InvalidRequest.code:
                raise
            text = error.details if isinstance(error, Failure) else str(error)
            raise InvalidRequest(task.key, split_code(text)[1]) from None
        total_tries = call_report.pop("tries", 1) + tries - 1
        self._add_report(
            {"key": task.key, "node": task.call.node, "tries": total_tries, **call_report}
        )
        self.values.register(outputs)
        self.time.machine.complete(task.key, outputs)

    def _add_report(self, report: dict[str, Any]) -> None:
        reports = self.call.reports
        # A node that runs again replaces its report.
        reports[:] = [old for old in reports if old["key"] != report["key"]]
        reports.append(report)
        if self.call.settings.progress:
            self._report({"event": "node", **report})

    def _retry(self, task: Task, error: MaskserveError | Failure) -> None:
        """Make the node ready again, without an error for the client."""
        # Its traceback would keep the frame of `outputs`, and so all outputs, in memory.
        drop_tracebacks(error)
        self.time.machine.retry(task.key)


def _edits_of_inputs(plan: WorkflowPlan) -> list[NodeCall]:
    """Return the edits whose masks are inputs of the workflow; of edits without a mask those whose
    pictures are, and the generations.
    """

    def follows(call: NodeCall) -> bool:
        refs = call.inputs.get("mask") or call.inputs.get("image")
        return refs is None or all(map(_input, refs_of(refs)))

    return [call for call in edit_calls(plan.steps) if follows(call)]


def _input(ref: str) -> str:
    """Return the workflow input that a reference names; empty: none."""
    owner, _, name = ref.partition(".")
    return name if owner == INPUTS else ""


async def _follow(
    answers: AsyncGenerator[bytes, None],
    call: Callable[..., Coroutine[Any, Any, NodeResult]],
    report: Callable[[dict[str, Any], dict[str, Any]], None],
) -> NodeResult:
    """Return the last message of an edit's stream; call `report` for progress and previews before
    it.
    """
    last: NodeResult = {}, {}
    async with aclosing(answers):
        async for answer in answers:
            picture, meta = await call(len(answer), stream_answer, answer)
            if meta.get("event") in _PROGRESS_EVENTS:
                report({name: meta[name] for name in _EVENT_FIELDS if name in meta}, picture)
            elif meta:
                last = picture, meta
    return last
