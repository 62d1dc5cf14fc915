"""Runs one edit: admission, cost, memory, choice of a worker, sending, retries.

admit    check the limits on edits under way, per key and in total
measure  get the amount of work from the mask, and the most bytes of the answer
room     reserve the bytes of request and answer before the edit is sent
place    wait for the worker that will finish the edit first
send     send the request as received, with seed and request id in its SETTINGS
retry    send the same edit to another worker, within the retry budget; progress restarts
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace

from maskserve_common.contracts.due_times import OK, due_by_size
from maskserve_common.contracts.edit_kinds import edit_kind
from maskserve_common.contracts.keys import try_id
from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import (
    MaskserveError,
)
from maskserve_common.files.values import NO_VALUES, Values
from maskserve_common.routing import Edit, NoWorkerAvailable
from maskserve_common.servers.failure import Blame, Failure, Tries
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.edit_call import EditCall, make_edit_call
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.client_calls import ClientCalls, messages_of
from maskserve_router.scheduling.edit_cost import EditCosts, references_factor
from maskserve_router.scheduling.edit_forecast import EditForecast
from maskserve_router.scheduling.model_choice import model_of
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.scheduling.result_homes import ResultHomes
from maskserve_router.scheduling.retry_budget import RetryBudget
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.stream_buffer import StreamBuffer
from maskserve_router.workers.worker import SentEdit, Worker, WorkerEpoch
from maskserve_router.workers.worker_call import Send, result_of, streamed, template_of, unary

_ENCODE_S = 60.0
"""Most seconds of an encoder that runs alone."""


class Dispatcher:
    """Answers every edit exactly once. Use it from the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        pool: Pool,
        pending: PendingQueue,
        admission: Admission,
        fair_share: FairShare,
        metrics: Metrics,
        values: Values = NO_VALUES,
    ) -> None:
        self._config = config
        self._pool, self._pending, self._admission = pool, pending, admission
        self._metrics = metrics
        self._costs = EditCosts(config, fair_share, values)
        self._budget = RetryBudget(config.faults.retry_share, config.faults.retry_floor)
        self._forecast = EditForecast(pool, pending, config.admission.deadline_slack, metrics)
        self.homes = ResultHomes(pool, config.routing.remembered_images)
        self._calls: ClientCalls[EditCall] = ClientCalls()

    def cancel(self, request_id: str) -> bool:
        """Cancel an edit in any phase. Return False: none with this id is under way."""
        return self._calls.cancel(request_id)

    async def alone_s(
        self, message: ModelRequest, client: KeyHolder, kind: EditKind
    ) -> float | None:
        """Return the seconds from sending the edit to an idle worker until its answer.

        None: no worker takes edits.

        Args:
            message: the edit; it is not sent, and its source may be missing.
            client: holder of the key that asks.
            kind: kind of the edit.

        Raises:
            MaskserveError: its mask or settings cannot be used.
        """
        call = make_edit_call(message, message.size, client)
        edit, _ = await self._cost_of(call, kind)
        return self._forecast.alone_s(call, edit)

    async def encode(self, message: ModelRequest, client: KeyHolder) -> bytes:
        """Have the encoder of a worker of the message's host run alone, and return the answer: of
        the worker that would finish the edit first.

        Args:
            message: the edit, with the request parameter ENCODING.
            client: holder of the key that asks.

        Raises:
            MaskserveError: it cannot be used, or no worker has a place now.
            Failure: the worker's error.
        """
        call = make_edit_call(message, message.size, client, timeout=_ENCODE_S)
        with self._admission.operation(client, message.size):
            edit, _ = await self._cost_of(call)
            workers, now_s = self._pool.workers.values(), time.monotonic()
            elsewhere = {worker.number for worker in workers if worker.host != message.host}
            roster = self._pool.roster
            number = roster.table(now_s).choose(edit, now_s, elsewhere)
            if number is None:
                raise NoWorkerAvailable(edit, [worker.view(now_s) for worker in workers])
            worker = roster.worker(number)
            # A record lists no encoder, so none is missed in it; the call ends with its worker.
            sent = SentEdit(
                call.sent_as, replace(edit, steps=1), worker, now_s, worker.predict(edit, now_s),
                listed_at=math.inf,
            )  # fmt: skip
            worker.add(sent)
            try:
                [answer] = [message.content async for message in unary(sent, call)]
            finally:
                worker.remove(sent)
            return answer

    def share_left(self, request_id: str) -> float | None:
        """Return the share of steps left of an edit with a row; None: it waits for a row."""
        call = self._calls.get(request_id)
        worker = None if call is None else self._pool.workers.get(call.worker)
        return None if call is None or worker is None else worker.share_left(call.sent_as)

    async def infer(self, call: EditCall, room: EditRoom) -> bytes:
        """Run a unary edit and return the worker's answer unchanged.

        Args:
            call: the edit.
            room: memory of the request as sent, and then of its answer.

        Raises:
            MaskserveError: the router refused or cancelled the edit.
            Failure: the worker failed the edit.
        """
        async with aclosing(self._run(call, room, unary)) as answers:
            # Read to the end of the generator, which accounts for the edit after its only answer.
            (answer,) = [response async for response in answers]
        return answer

    def stream(self, call: EditCall, room: EditRoom) -> AsyncGenerator[bytes, None]:
        """Run a streamed edit and yield the worker's messages; otherwise like `infer`."""
        return self._run(call, room, streamed)

    async def _run(self, call: EditCall, room: EditRoom, send: Send) -> AsyncGenerator[bytes, None]:
        with ExitStack() as exit_stack:
            exit_stack.enter_context(self._count_outcome(call))
            exit_stack.enter_context(self._calls.under_way(call))
            exit_stack.enter_context(self._admission.edit(call.owner))
            edit, digest = await self._cost_of(call)
            await room.take(self._most_bytes(call))
            if self._config.routing.order != "fcfs":
                edit = replace(edit, due=call.due)
            if edit.due < math.inf:
                call.starts_by = edit.due - (self._forecast.alone_s(call, edit) or 0.0)
            self._forecast.check_deadline(call, edit)
            buffer = StreamBuffer()
            work = self._attempts(call, edit, digest, send, buffer)
            async with aclosing(messages_of(call, work, buffer)) as answers:
                async for answer in answers:
                    buffered_bytes = len(answer) + buffer.size
                    if call.answered:
                        call.drop_pictures()
                        room.resize(buffered_bytes)
                    else:
                        room.resize(max(call.size + buffered_bytes, room.size))
                    yield answer

    def _most_bytes(self, call: EditCall) -> int:
        """Return the bytes to reserve: the larger of the request as sent and its answer.

        They leave the owner room for the request as received, which it holds, too. Otherwise the
        edit could never run.
        """
        return max(
            call.size, min(call.answer_bytes, self._admission.most_bytes(call.owner) - call.size)
        )

    async def _attempts(
        self, call: EditCall, edit: Edit, digest: bytes, send: Send, buffer: StreamBuffer
    ) -> None:
        """Run the edit on a worker, and after a failure on others if a retry may succeed."""
        avoid: frozenset[WorkerEpoch] = frozenset()
        non_home_workers = self.homes.workers_without(edit, call.settings)
        failure: Failure | None = None
        tries = Tries()
        with ExitStack() as exit_stack:
            while True:
                sent_edit = await self._place(call, edit, avoid | non_home_workers, failure)
                non_home_workers = frozenset()
                epoch = sent_edit.worker.epoch
                call.worker, call.tries = sent_edit.worker.address, call.tries + 1
                begun = False
                try:
                    with self._attempt(sent_edit):
                        if sent_edit.end_reason is not None:
                            raise sent_edit.end_reason
                        answer = b""
                        async for message in send(sent_edit, call):
                            begun, answer = True, message.content
                            buffer.put(message)
                        self._learn(call, digest, answer, sent_edit.worker, send, failure)
                        return
                except Failure as error:
                    failure = error
                    avoid |= {epoch}
                    if not (tries.goes_on(failure) and self._may_retry(failure, avoid)):
                        raise
                    call.restarts += begun
                    if failure.lost:
                        exit_stack.enter_context(self._budget.spend())
                    self._metrics.retries.labels(failure.blame.value).inc()

    async def _place(
        self, call: EditCall, edit: Edit, avoid: frozenset[WorkerEpoch], failure: Failure | None
    ) -> SentEdit:
        """Wait for a place for the edit.

        After a failure, wait up to `faults.retry_wait_s` until another worker takes edits, since
        the cause of the failure may briefly affect that worker, too.

        Raises:
            MaskserveError: as `PendingQueue.enter` does.
            Failure: the previous one, if no other worker takes edits in time.
        """
        call.sent_as = try_id(call.request_id, call.tries + 1)
        patience_s = 0.0 if failure is None else self._config.faults.retry_wait_s
        try:
            return await self._pending.enter(
                call.sent_as,
                edit,
                call.arrival,
                call.waits_until,
                avoid,
                patience_s,
                call.starts_by,
            )
        except NoWorkerAvailable:
            if failure is None:
                raise
            raise failure from None

    @contextmanager
    def _count_outcome(self, call: EditCall) -> Iterator[None]:
        """When the block ends, count the edit by its code and slack, if it has a due time."""
        code: str | None = OK
        try:
            yield
        except (MaskserveError, Failure) as error:
            code = error.code
            raise
        except BaseException:  # the client has left
            code = None
            raise
        finally:
            slack_s = self._slack_s(call)
            if slack_s is not None and code is not None:
                self._metrics.due(code, slack_s)

    def _slack_s(self, call: EditCall) -> float | None:
        """Return the seconds left until the answer is due; None: the edit has no due time."""
        due_s = call.due_s
        if due_s is not None:
            return call.arrival + due_s - time.monotonic()
        # The edit was refused before its size, and so its due time, was known.
        by_size = self._pool.roster.some_due_by_size(time.monotonic())
        return -math.inf if by_size else None

    async def _cost_of(self, call: EditCall, kind: EditKind | None = None) -> tuple[Edit, bytes]:
        """Return the edit's cost and its image's digest; placeholders if no worker can take it.

        Args:
            call: the edit.
            kind: its kind; None: as its pictures say.

        Raises:
            InvalidRequest: the mask cannot be used, or no worker serves the model.
        """
        if call.settings is None:
            return Edit(1, 1, 1), b""
        kind = kind or edit_kind(call.settings, image=bool(call.image), mask=bool(call.mask))
        default, pictures = self._config.routing.default_model, 1 + call.references
        model = model_of(self._pool, default, call.settings.model, kind, pictures)
        served = next(
            (w.served for w in self._pool.workers.values() if w.model == model and w.served), None
        )
        if served is None:
            return Edit(call.settings.num_inference_steps or 1, 1, 1, model=model), b""
        edit, digest, call.answer_bytes = await self._costs.cost_of(
            call.owner,
            call.image,
            call.mask,
            call.settings,
            served,
            model,
            references=call.references,
            prompted=call.prompted,
        )
        edit = replace(edit, encoded=call.message.encoding)
        passes = 2 if call.settings.negative_prompt is not None else 1
        tokens = edit.total_tokens / passes / references_factor(call.references)
        pixels = round(tokens) * served.token_pixels**2
        call.by_size_ms = due_by_size(served.due_ms, pixels)
        return edit, digest

    @contextmanager
    def _attempt(self, sent: SentEdit) -> Iterator[None]:
        """Keep an edit in the worker's ledger for the block, and report its end to the breaker."""
        breaker, name = sent.worker.breaker, sent.request_id
        try:
            yield
            breaker.record_success(name)
            seconds = time.monotonic() - sent.at
            sent.worker.record_answer(sent, seconds)
            self._metrics.record_answer(sent, seconds)
        except Failure as failure:
            if failure.blame is Blame.WORKER:
                may_eject = self._pool.may_eject()
                if breaker.record_failure(name, time.monotonic(), may_eject=may_eject):
                    self._metrics.ejections.labels(sent.worker.address).inc()
            raise
        finally:
            breaker.record_unknown(name)
            self._pending.leave(sent)

    def _may_retry(self, failure: Failure, avoid: frozenset[WorkerEpoch]) -> bool:
        """Return whether there is another worker, which may also be one that is down now, and the
        budget allows the retry.
        """
        has_alternative = any(w.epoch not in avoid for w in self._pool.workers.values())
        return has_alternative and (not failure.lost or self._budget.allows(len(self._calls)))

    def _learn(
        self,
        call: EditCall,
        digest: bytes,
        answer: bytes,
        worker: Worker,
        send: Send,
        failure: Failure | None,
    ) -> None:
        """Remember the template of the image and the home of the result, by which later edits are
        routed.
        """
        is_stream, settings = send is streamed, call.settings
        if not self._costs.knows(digest):
            self._costs.learn(digest, template_of(answer, streamed=is_stream))
        if settings is not None:
            result_id = result_of(answer, streamed=is_stream) if settings.keep_result else None
            self.homes.learn(settings, worker, result_id, failure)
