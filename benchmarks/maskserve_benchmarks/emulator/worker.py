"""An emulated worker: a real gRPC server and the production step scheduler, with steps that last as
long as the model of a device says. It edits nothing.

Its model has one token per pixel, so the mask's pixels are the computed tokens.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.server import Context, answer_of, server_of
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings, parse_settings
from maskserve_common.contracts.status_record import RowStatus, Served, ValuesHeld, WorkerStatus
from maskserve_common.errors import DeadlineExceeded
from maskserve_common.listings import TemplateListings
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from maskserve_router.scheduling.edit_cost import count_tokens


@dataclass(slots=True, eq=False)
class _Edit:
    ticket: Ticket
    status: RowStatus
    left: int
    began: float = 0.0
    """When the edit got a row."""
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)


_STEPS = 28
"""Steps of an edit that does not say how many."""
RESULT_ID = "a" * 32
"""Name under which a result is kept, if the edit asks for it."""


class EmulatedWorker:
    """One worker; use `start` and `stop`.

    Args:
        name: name of the worker.
        hardware: the device; None: the worker answers an edit at once.
        templates: ids of the templates with entries.
        answer: picture of each response; by default a few bytes that are no picture.
        max_rows: largest number of rows in its batch.
        max_waiting: largest number of edits in its queue.
        model: name of the model that it serves.
        order: order of waiting edits: `slack`: by their due times, as at any worker; `fcfs`: in
            order of arrival.
    """

    def __init__(
        self,
        name: str,
        hardware: Hardware | None,
        templates: tuple[str, ...] = (),
        answer: bytes = bytes(100),
        max_rows: int = 8,
        max_waiting: int = 100_000,
        model: str = "flux",
        order: str = "slack",
    ) -> None:
        self._hardware, self._order = hardware, order
        self._scheduler = StepScheduler(max_rows, max_waiting)
        self._edits: dict[str, _Edit] = {}
        self._running: tuple[Ticket, ...] = ()
        self._wake = asyncio.Event()
        self._answer = answer
        side = round((hardware.tokens if hardware else 4096) ** 0.5)
        self._status = WorkerStatus(
            name,
            model,
            "ready",
            max_rows,
            max_waiting,
            templates={"host": templates},
            served=Served(side, 1, _STEPS, True, hardware.dense_above_ratio if hardware else 1.0),
            pricing=hardware.pricing if hardware else None,
        )
        self.host = ""
        """Name of the host, for workers that share its folder of values."""
        self._listings = TemplateListings()
        self._stepped_ns = time.monotonic_ns()
        self._server, self.port = server_of(
            {
                "ModelInfer": grpc.unary_unary_rpc_method_handler(self._infer),
                "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
            }
        )
        self._loop: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self._server.start()
        self._loop = asyncio.create_task(self._run_steps())

    async def stop(self) -> None:
        await self._server.stop(0)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    # Calls

    async def _infer(self, raw: bytes, context: Context) -> bytes:
        message = pb.ModelInferRequest.FromString(raw)
        inputs = {
            tensor.name: content[4:]  # behind the length of the one element
            for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True)
        }
        if message.model_name == "control":
            result = self.control_answer(msgspec.json.decode(inputs["OP"]))
            return answer_of("control", {"RESULT": [result]})
        settings = parse_settings(inputs["SETTINGS"])
        wait_s = 0.0
        if self._hardware is not None:
            try:
                wait_s = await self._edit(inputs["MASK"], settings, self._hardware)
            except DeadlineExceeded as late:
                problem = f"[{late.code}] {late}"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
        steps = settings.num_inference_steps or _STEPS
        meta = {
            "event": "final",
            "template_id": settings.template_id or "0" * 32,
            "seed": settings.seed,
            "step": steps,
            "steps": steps,
            "worker": self._status.worker,
            "timings_ms": {"queue": 1e3 * wait_s},
            **({"result_template_id": RESULT_ID} if settings.keep_result else {}),
        }
        picture = self.picture(settings)
        return answer_of("edit", {"IMAGE": [picture], "META": [msgspec.json.encode(meta)]})

    def picture(self, settings: EditSettings) -> bytes:
        """Return the picture for the response to an edit."""
        return self._answer

    async def _stream(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        async for raw in requests:
            answer = pb.ModelInferResponse.FromString(await self._infer(raw, context))
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    def control_answer(self, operation: dict[str, Any]) -> bytes:
        """Return the response of `control`."""
        if operation["op"] != "status":
            return b"{}"
        running = {ticket.request_id for ticket in self._running} & self._edits.keys()
        changes = None
        if "templates" in operation:
            listings = msgspec.json.encode(self._status.templates)
            self._listings.take(memoryview(listings))
            changes = self._listings.changes(operation["templates"])
        record = structs.replace(
            self._status,
            templates={} if changes else self._status.templates,
            monotonic_ns=time.monotonic_ns(),
            running=tuple(self._edits[name].status for name in running),
            waiting=tuple(e.status for name, e in self._edits.items() if name not in running),
            values=ValuesHeld(self.host),
        )
        age_s = (time.monotonic_ns() - self._stepped_ns) / 1e9 if running else 0.0
        more = {"age_s": age_s, "alive": True, "in_flight": len(self._edits)}
        if changes is not None:
            more["template_changes"] = msgspec.to_builtins(changes)
        return msgspec.json.encode({**msgspec.to_builtins(record), **more})

    async def _edit(self, mask: bytes, settings: EditSettings, hardware: Hardware) -> float:
        """Run an edit through the batch; return the seconds that it waited for a row.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        assert self._status.served is not None
        active, total, *_ = count_tokens(mask, settings, self._status.served, LimitsConfig())
        name, now_s = settings.request_id, time.monotonic()
        assert name is not None
        cached = hardware.cacheable(active)
        steps, computed = settings.num_inference_steps or _STEPS, active if cached else total
        deadline, due_time = (
            None if ms is None else now_s + ms / 1e3
            for ms in (settings.limit_ms, settings.deadline_ms)
        )
        ticket = Ticket(
            name,
            steps,
            total,
            computed,
            now_s,
            settings.priority,
            deadline=deadline,
            due=due_time if self._order == "slack" else math.inf,
        )
        row = RowStatus(
            name,
            "cached" if cached else "dense",
            computed,
            total,
            steps,
            settings.template_id or "",
            settings.priority,
            due_ns=0 if ticket.due in (None, math.inf) else int(1e9 * ticket.due),
        )
        self._scheduler.submit(ticket)
        edit = self._edits[name] = _Edit(ticket, row, steps)
        self._wake.set()
        try:
            await edit.done
        finally:
            if self._edits.pop(name, None) is not None:  # the edit was cancelled
                self._scheduler.cancel(name)
        return edit.began - now_s

    # Steps

    async def _run_steps(self) -> None:
        """Step while there are rows to step.

        A step begins at the scheduled end of the step before, not when this process notices that
        end. Otherwise a delay of a millisecond on this machine would make every step longer.
        """
        begins = time.monotonic()
        while True:
            decision = self._scheduler.schedule(time.monotonic())
            self._running = decision.running
            for ticket in decision.expired:
                late = DeadlineExceeded("SETTINGS.deadline_ms passed")
                self._edits.pop(ticket.request_id).done.set_exception(late)
            for ticket in decision.admitted:
                self._edits[ticket.request_id].began = time.monotonic()
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                begins = time.monotonic()
                continue
            self._stepped_ns = int(begins * 1e9)
            begins += self._seconds()
            await asyncio.sleep(max(begins - time.monotonic(), 0.0))
            for ticket in self._running:
                edit = self._edits.get(ticket.request_id)
                if edit is not None:
                    self._advance(edit)

    def _advance(self, edit: _Edit) -> None:
        edit.left -= 1
        edit.status.steps_left = edit.left
        if not edit.left:
            self._scheduler.finish(edit.ticket.request_id)
            del self._edits[edit.ticket.request_id]
            if not edit.done.done():
                edit.done.set_result(None)

    def _seconds(self) -> float:
        assert self._hardware is not None
        cached = [t.active_tokens for t in self._running if t.active_tokens < t.total_tokens]
        dense = len(self._running) - len(cached)
        return self._hardware.step_seconds(len(cached), sum(cached), dense)
