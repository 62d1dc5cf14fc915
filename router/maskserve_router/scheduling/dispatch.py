"""An edit's way through the router: admitted, measured, placed, sent, and tried once more if the
worker failed it.

    admit    bounds on edits under way, per key and in all
    measure  the mask says how much work it is, and how many bytes its answer may have
    room     bounds on bytes under way, of the answer too, before the edit is sent
    place    wait for the worker that will be done first
    send     the request as it came, its SETTINGS with seed and request id
    retry    on another worker, the same edit, within the budget; a stream's progress begins anew
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace

from maskserve_common.contracts.due_times import OK, due_by_size
from maskserve_common.contracts.keys import tried
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MaskserveError,
    TemplateNotFound,
)
from maskserve_common.files.values import NO_VALUES, Values
from maskserve_common.lru_cache import Kept
from maskserve_common.routing import Edit, NoWorkerAvailable, dealt
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import Turns
from maskserve_router.keys import KeyHolder
from maskserve_router.messages.edit_call import EditCall, make_edit_call
from maskserve_router.messages.failures import Blame, Failure, RetryLater
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission, EditRoom
from maskserve_router.scheduling.edit_cost import Measure
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.scheduling.retry_budget import RetryBudget
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.stream_buffer import Unread
from maskserve_router.workers.worker import Sent, Worker, WorkerEpoch
from maskserve_router.workers.worker_call import Send, result_of, streamed, template_of, unary

_ASKED = 16
"""Workers that are asked when an edit would be done there, where all are full: those that have a
place first."""


class Dispatcher:
    """Takes edits in and answers each exactly once; used from the event loop only."""

    def __init__(
        self,
        config: RouterConfig,
        pool: Pool,
        pending: PendingQueue,
        admission: Admission,
        turns: Turns,
        metrics: Metrics,
        values: Values = NO_VALUES,
    ) -> None:
        self._config = config
        self._pool, self._pending, self._admission = pool, pending, admission
        self._metrics = metrics
        self._measure = Measure(config, turns, values)
        self._budget = RetryBudget(config.faults.retry_share, config.faults.retry_floor)
        self._homes: Kept[str, str] = Kept(config.routing.remembered_images)
        """Kept results, and where they lie (`Worker.results_at`)."""
        self._calls: dict[str, EditCall] = {}
        """Edits under way by request id."""

    def cancel(self, request_id: str) -> bool:
        """End an edit, wherever it is on its way; False if it is not under way here."""
        call = self._calls.get(request_id)
        if call is None:
            return False
        call.cancelled = True
        self._pending.cancel(call.sent_as)
        for worker in self._pool.workers.values():
            if call.sent_as in worker.sent:
                worker.sent[call.sent_as].end(Cancelled("the edit was cancelled"))
        return True

    async def alone_s(self, message: ModelRequest, client: KeyHolder) -> float | None:
        """Seconds to an edit's answer from an idle worker; None: none takes edits.

        Args:
            message: the edit, which is not sent.
            client: whose it is.

        Raises:
            MaskserveError: its mask or settings cannot be used.
        """
        call = make_edit_call(message, message.size, scope=client.scope)
        edit, _ = await self._measured(call, client)
        return self._alone_s(call, edit)

    def share_left(self, request_id: str) -> float | None:
        """Of the steps of an edit that has a row at a worker; None: it waits for one."""
        call = self._calls.get(request_id)
        worker = None if call is None else self._pool.workers.get(call.worker)
        return None if call is None or worker is None else worker.share_left(call.sent_as)

    def forget_home(self, template_id: str) -> None:
        """A template is no result of some workers alone any more: it is registered, or gone."""
        self._homes.drop(template_id)

    async def infer(self, call: EditCall, client: KeyHolder, room: EditRoom) -> bytes:
        """The worker's answer to a unary request, as it came.

        Args:
            call: the edit.
            client: whose it is.
            room: what is taken up by the request as it is sent, and then by its answer.

        Raises:
            MaskserveError: the router's own.
            Failure: the worker's.
        """
        async with aclosing(self._run(call, client, room, unary)) as answers:
            # To its end, where the edit is booked, and not to its only answer.
            (answer,) = [response async for response in answers]
        return answer

    def stream(
        self, call: EditCall, client: KeyHolder, room: EditRoom
    ) -> AsyncGenerator[bytes, None]:
        """The worker's messages to one request of a stream, as they came; as `infer` otherwise."""
        return self._run(call, client, room, streamed)

    async def _run(
        self, call: EditCall, client: KeyHolder, room: EditRoom, send: Send
    ) -> AsyncGenerator[bytes, None]:
        with ExitStack() as exit_stack:
            exit_stack.enter_context(self._judged(call))
            exit_stack.enter_context(self._named(call))
            exit_stack.enter_context(self._admission.edit(client))
            edit, digest = await self._measured(call, client)
            await room.take(self._most_bytes(call, client))
            edit = replace(edit, due=self._due(call))
            if edit.due < math.inf:
                call.starts_by = edit.due - (self._alone_s(call, edit) or 0.0)
            self._check_deadline(call, edit)
            unread = Unread()
            work = asyncio.create_task(self._attempts(call, edit, digest, send, unread))
            work.add_done_callback(unread.end)
            try:
                async for answer in unread:
                    buffered_bytes = len(answer) + unread.size
                    if work.done() and work.exception() is None:
                        call.drop_pictures()
                        room.becomes(buffered_bytes)
                    else:
                        room.becomes(max(call.size + buffered_bytes, room.size))
                    yield answer
                await work
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    def _most_bytes(self, call: EditCall, client: KeyHolder) -> int:
        """That an edit takes up at a time: its request as it is sent, then its answer. A client can
        hold these beside the request as it came, or nobody could ever have the edit made.
        """
        return max(
            call.size, min(call.answer_bytes, self._admission.most_bytes(client) - call.size)
        )

    async def _attempts(
        self, call: EditCall, edit: Edit, digest: bytes, send: Send, unread: Unread
    ) -> None:
        """Have a worker do the edit, and another one if that fails it."""
        avoid: frozenset[WorkerEpoch] = frozenset()
        non_home_workers = self._others_than_home(edit.template_id)
        failure: Failure | None = None
        retried = False
        with ExitStack() as exit_stack:
            while True:
                sent_edit = await self._placed(call, edit, avoid | non_home_workers, failure)
                non_home_workers = frozenset()
                epoch = sent_edit.worker.epoch
                call.worker, call.tries = sent_edit.worker.address, call.tries + 1
                begun = False
                try:
                    with self._attempt(sent_edit):
                        if sent_edit.ended_for is not None:
                            raise sent_edit.ended_for
                        answer = b""
                        async for message in send(sent_edit, call):
                            begun, answer = True, message.content
                            unread.put(message)
                        self._learn(digest, answer, send)
                        self._learn_home(call, edit, sent_edit.worker, answer, send, failure)
                        return
                except Failure as error:
                    failure = error
                    avoid |= {epoch}
                    if not self._helps(failure, avoid, retried):
                        raise
                    call.restarts += begun
                    if failure.blame in (Blame.WORKER, Blame.UNKNOWN):
                        retried = True
                        exit_stack.enter_context(self._budget.spend())
                    self._metrics.retries.labels(failure.blame.value).inc()

    async def _placed(
        self, call: EditCall, edit: Edit, avoid: frozenset[WorkerEpoch], failure: Failure | None
    ) -> Sent:
        """A place for the edit; after a failure another worker's, which may be late to say that
        it takes edits: what ended the one may have held up the other.

        Raises:
            MaskserveError: as `PendingQueue.enter` does.
            Failure: the one before, if no other worker takes edits in time.
        """
        if call.cancelled:
            raise Cancelled("the edit was cancelled")
        call.sent_as = tried(call.request_id, call.tries + 1)
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
    def _judged(self, call: EditCall) -> Iterator[None]:
        """An edit until it is answered; if it is due at some time it is counted by its end."""
        code: str | None = OK
        try:
            yield
        except (MaskserveError, Failure) as error:
            code = error.code
            raise
        except BaseException:  # its client has left
            code = None
            raise
        finally:
            slack_s = self._slack_s(call)
            if slack_s is not None and code is not None:
                self._metrics.due(code, slack_s)

    def _slack_s(self, call: EditCall) -> float | None:
        """Seconds that are left until its answer is due; None: it is due at no time."""
        due_s = call.due_s
        if due_s is not None:
            return call.arrival + due_s - time.monotonic()
        # Refused before its size was known: due it was, at whatever time.
        by_size = self._pool.roster.some_due_by_size(time.monotonic())
        return -math.inf if by_size else None

    @contextmanager
    def _named(self, call: EditCall) -> Iterator[None]:
        """No two edits of one request id: their cancels could not be told apart."""
        if call.request_id in self._calls:
            raise InvalidRequest(
                "SETTINGS.request_id", "names an edit that is in flight", "a fresh id"
            )
        self._calls[call.request_id] = call
        try:
            yield
        finally:
            del self._calls[call.request_id]

    async def _measured(self, call: EditCall, client: KeyHolder) -> tuple[Edit, bytes]:
        """The edit and its image's digest; of a request that no worker will take, next to nothing.

        Raises:
            InvalidRequest: the mask cannot be used, or no worker serves the model.
        """
        if call.settings is None:
            return Edit(1, 1, 1), b""
        model = self._model(call.settings.model)
        served = next(
            (w.served for w in self._pool.workers.values() if w.model == model and w.served), None
        )
        if served is None:
            return Edit(call.settings.num_inference_steps or 1, 1, 1, model=model), b""
        edit, digest, call.answer_bytes = await self._measure.edit(
            client, call.image, call.mask, call.settings, served, model, prompted=call.prompted
        )
        passes = 2 if call.settings.negative_prompt is not None else 1
        pixels = edit.total_tokens // passes * served.token_pixels**2
        call.by_size_ms = due_by_size(served.due_ms, pixels)
        return edit, digest

    def _model(self, asked: str | None) -> str:
        """The model that is to run the edit: as asked, as configured, or what most workers serve,
        so that a single one which names another model confuses nobody.
        """
        models = self._pool.models()
        chosen = asked or self._config.routing.default_model
        if not chosen and models:
            common, workers = models.most_common(1)[0]
            chosen = common if 2 * workers > models.total() else ""
        if not chosen and models:
            raise InvalidRequest(
                "SETTINGS.model", "is needed where several are served", ", ".join(sorted(models))
            )
        if chosen and models and chosen not in models:
            raise InvalidRequest("SETTINGS.model", "is not served here", ", ".join(sorted(models)))
        return chosen

    def _check_deadline(self, call: EditCall, edit: Edit) -> None:
        """Refuse at once what would not be done in time.

        Raises:
            DeadlineExceeded: no worker would, whatever else it had to do.
            RetryLater: no worker would now.
        """
        if call.deadline is None:
            return
        least, slack = self._alone_s(call, edit), self._config.admission.deadline_slack
        limit = call.deadline - call.arrival
        if least is not None and least > limit * slack:
            self._metrics.rejections.labels("deadline").inc()
            raise DeadlineExceeded(
                f"{call.deadline_name}: {1e3 * limit:.0f} ms are too short for this edit; alone "
                f"on a worker it takes about {math.ceil(1e3 * least)} ms"
            )
        call.waits_until = call.deadline - (least or 0.0) / slack
        now_s = time.monotonic()
        soonest, remaining_s = self._soonest_s(call, edit, now_s), call.deadline - now_s
        if soonest is not None and soonest > remaining_s * slack:
            self._metrics.rejections.labels("deadline").inc()
            raise RetryLater(
                f"{call.deadline_name}: the edit would take about {soonest:.1f} s, and "
                f"{max(remaining_s, 0):.1f} s are left",
                soonest - remaining_s,
            )

    def _soonest_s(self, call: EditCall, edit: Edit, now: float) -> float | None:
        """Seconds to its answer from the worker that would be done first; where none has a place,
        behind all that gets one before it. None: no worker serves it.
        """
        roster = self._pool.roster
        board = roster.board(now)

        def asked(number: int, ahead: Sequence[Edit] = ()) -> float:
            return roster.worker(number).least_s(edit, now, ahead=ahead, primed=call.primed)

        if len(able := board.taking(edit)):
            return board.least_s(edit, now, able, asked, primed=call.primed)
        waiting = self._pending.before(call.request_id, edit, call.arrival, call.starts_by)
        # No other gets one of the edits that wait, nor can be better than those that get none.
        near = board.earliest(board.serving(edit), len(waiting) + _ASKED)
        assignment = dealt(waiting, [board.view(number) for number in near])
        near.sort(key=lambda number: assignment.free_s[board.view(number).worker])
        times = (asked(n, assignment.edits[board.view(n).worker]) for n in near[:_ASKED])
        return min(times, default=None)

    def _due(self, call: EditCall) -> float:
        """When its answer is due; infinite: at no time, or edits go by arrival."""
        if call.due_s is None or self._config.routing.order == "fcfs":
            return math.inf
        return call.arrival + call.due_s

    def _alone_s(self, call: EditCall, edit: Edit) -> float | None:
        """Seconds to its answer from a worker with nothing else to do; None: none takes edits."""
        now_s, roster = time.monotonic(), self._pool.roster
        board = roster.board(now_s)

        def asked(number: int) -> float:
            return roster.worker(number).least_s(edit, now_s, alone=True, primed=call.primed)

        able = board.there(edit)
        return board.least_s(edit, now_s, able, asked, alone=True, primed=call.primed)

    @contextmanager
    def _attempt(self, sent: Sent) -> Iterator[None]:
        """An edit at a worker: in the ledger until it ends, and what its end says of the worker."""
        breaker, name = sent.worker.breaker, sent.request_id
        try:
            yield
            breaker.succeeded(name)
            seconds = time.monotonic() - sent.at
            sent.worker.answered(sent, seconds)
            self._metrics.answered(sent, seconds)
        except Failure as failure:
            if failure.blame is Blame.WORKER:
                may_eject = self._pool.may_eject()
                if breaker.failed(name, time.monotonic(), may_eject=may_eject):
                    self._metrics.ejections.labels(sent.worker.address).inc()
            raise
        finally:
            breaker.gave_up(name)
            self._pending.leave(sent)

    def _helps(self, failure: Failure, avoid: frozenset[WorkerEpoch], retried: bool) -> bool:
        """Whether another worker is to be tried, one that may come back soon included."""
        workers = self._pool.workers.values()
        has_alternative = any(worker.epoch not in avoid for worker in workers)
        match failure.blame:
            case Blame.REFUSED:
                return has_alternative
            case Blame.WORKER | Blame.UNKNOWN:
                return has_alternative and not retried and self._budget.allows(len(self._calls))
        return False

    def _others_than_home(self, template_id: str) -> frozenset[WorkerEpoch]:
        """Of a kept result the workers without it, while one that has it takes edits."""
        home = self._homes.get(template_id)
        if home is None:
            return frozenset()
        ready = self._pool.ready()
        if all(worker.results_at != home for worker in ready):
            return frozenset()
        return frozenset(worker.epoch for worker in ready if worker.results_at != home)

    def _learn_home(
        self,
        call: EditCall,
        edit: Edit,
        worker: Worker,
        answer: bytes,
        send: Send,
        failure: Failure | None,
    ) -> None:
        """Remember where a result lies: the worker made it, or was found to have it."""
        settings = call.settings
        if settings is None:
            return
        if failure is not None and failure.code == TemplateNotFound.code and settings.template_id:
            self._homes.put(edit.template_id, worker.results_at)
        if settings.keep_result:
            result_id = result_of(answer, streamed=send is streamed)
            if result_id:
                self._homes.put(result_id, worker.results_at)

    def _learn(self, digest: bytes, answer: bytes, send: Send) -> None:
        """Remember which template the image is, so that its next edit finds its entries."""
        if not self._measure.knows(digest):
            self._measure.learn(digest, template_of(answer, streamed=send is streamed))
