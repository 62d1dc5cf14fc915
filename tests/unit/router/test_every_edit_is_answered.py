"""Whatever workers do while edits come, wait and run: each edit ends, and names its cause."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from maskserve_benchmarks.emulator.server import answer_of
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.status_record import RowStatus, Served, ValuesHeld
from maskserve_common.errors import CODES, MaskserveError
from maskserve_common.routing import POLICIES, Edit, assign, make_policy
from maskserve_common.servers.failure import Failure
from maskserve_router.config import router_config_of
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.edit_call import EditCall, make_edit_call, parse_request
from maskserve_router.metrics import Metrics
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.dispatch import Dispatcher
from maskserve_router.scheduling.pending_queue import PendingQueue
from maskserve_router.workers.pool import Pool
from maskserve_router.workers.worker import PolledStatus
from tests.support.examples import examples
from tests.support.router_requests import edit_request, mask_of

SIDE = 8
WORKERS = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
STATES = ("ready", "loading", "draining", "failed", "silent", "not a record")
MODELS = ("m", "n")
PRICING = Pricing(step=0.001, dense_row=0.001, cached_row=0.0005, active_token=1e-6)
ANSWER = answer_of("edit", {"IMAGE": [b"png"], "META": [b'{"event":"final"}']})
FAILS = (
    (grpc.StatusCode.INTERNAL, "[ENGINE_FAILED] the process of its denoiser has died"),
    (grpc.StatusCode.UNAVAILABLE, "[OVERLOADED] the queue is full"),
    (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
    (grpc.StatusCode.NOT_FOUND, "[TEMPLATE_NOT_FOUND] it is not here"),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "[DEADLINE_EXCEEDED] late"),
    (grpc.StatusCode.INVALID_ARGUMENT, "[INVALID_REQUEST] MASK: selects nothing"),
)


class ScriptedCall:
    """One call to a worker, which ends when the test says so."""

    def __init__(self, request: bytes) -> None:
        message = pb.ModelInferRequest.FromString(request)
        self.request_id = json.loads(message.raw_input_contents[3][4:])["request_id"]
        self.end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def cancel(self) -> bool:
        return self.end.cancel()

    def __await__(self) -> Any:
        return self.end.__await__()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        answer = pb.ModelInferResponse.FromString(await self.end)
        yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()


class ScriptedUpstream:
    """A worker as the router calls it; the test sets its state and ends its calls."""

    def __init__(self, address: str) -> None:
        self.state, self.model, self.max_waiting = "ready", "m", 1
        self.priced = True
        self.calls: list[ScriptedCall] = []

    def infer(self, request: bytes, timeout: float | None, metadata: object) -> ScriptedCall:
        self.calls.append(ScriptedCall(request))
        return self.calls[-1]

    stream = infer

    def under_way(self) -> list[ScriptedCall]:
        return [call for call in self.calls if not call.end.done()]

    async def control(self, request: bytes, timeout: float) -> bytes:
        if self.state == "silent":
            raise Failure(grpc.StatusCode.UNAVAILABLE, "no answer")
        if self.state == "not a record":
            return b"{"
        rows = tuple(RowStatus(call.request_id, "dense", 64, 64, 4) for call in self.under_way())
        status = PolledStatus(
            "w",
            self.model,
            self.state,  # type: ignore[arg-type]
            max_rows=1,
            max_waiting=self.max_waiting,
            running=rows[:1],
            waiting=rows[1:],
            served=Served(SIDE, 1, 4),
            pricing=PRICING if self.priced else None,
            values=ValuesHeld(""),
        )
        return msgspec.json.encode(status)

    async def close(self, grace_s: float | None = None) -> None:
        for call in self.under_way():
            call.cancel()


def _error(status: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status, nothing, nothing, details=text)


class Site:
    """Pool, queue and dispatcher over scripted workers, and the edits that have come."""

    def __init__(self, policy: str, order: str) -> None:
        self.config = router_config_of(
            {
                "workers": {
                    "addresses": list(WORKERS),
                    "poll_interval_s": 5,
                    "dns_interval_s": 3600,
                },
                "routing": {"order": order},
                "admission": {"waiting_per_worker": 1, "deadline_slack": 1},
                "faults": {
                    "retry_wait_s": 0.02,
                    "failures_to_eject": 1,
                    "eject_s": 0.05,
                    "max_eject_s": 0.05,
                    "max_ejected_share": 1,
                    "drain_grace_s": 0.01,
                },
            }
        )
        self.pool = Pool(self.config, lambda: self.pending.dispatch())
        self.pending = PendingQueue(self.pool, make_policy(policy), 5.0, lambda _: None)
        metrics = Metrics()
        self.admission = Admission(self.config.admission, metrics)
        self.turns = FairShare(1)
        self.dispatcher = Dispatcher(
            self.config, self.pool, self.pending, self.admission, self.turns, metrics
        )
        self.edits: dict[str, asyncio.Task[Any]] = {}
        self.left: set[str] = set()
        """Names of edits whose clients have gone."""

    @property
    def upstreams(self) -> list[ScriptedUpstream]:
        return [worker.upstream for worker in self.pool.workers.values()]  # type: ignore[misc]

    async def measure_once(self) -> None:
        """A first edit, whose mask a thread decodes: those behind it enter the queue at once."""
        self.edit("", False, None, {})
        while not any(upstream.calls for upstream in self.upstreams):
            await asyncio.sleep(0.001)
        self.end_a_call(None)
        await asyncio.gather(*self.edits.values())
        self.edits.clear()

    async def poll(self) -> None:
        """As often as it takes for a silent one to count as down."""
        for _ in range(self.config.workers.misses):
            for worker in list(self.pool.workers.values()):
                await self.pool.poll(worker)

    async def want(self, number: int) -> None:
        """The first so many workers are those of the configuration."""
        workers = replace_addresses(self.config, WORKERS[:number])
        await self.pool.reload(workers)

    def edit(
        self, key: str, streamed: bool, timeout: float | None, settings: dict[str, Any]
    ) -> None:
        client = KeyHolder(key, 64, admin=False, scope=key)
        name = f"e{len(self.edits)}"
        raw = edit_request(
            b"", mask_of(32, SIDE), template_id="0" * 32, request_id=name, **settings
        )
        call = make_edit_call(parse_request(raw), len(raw), client, (), timeout)
        self.edits[call.request_id] = asyncio.create_task(self._answered(call, streamed))

    async def _answered(self, call: EditCall, streamed: bool) -> None:
        with self.admission.room(call.owner) as room:
            if not streamed:
                await self.dispatcher.infer(call, room)
                return
            async for _ in self.dispatcher.stream(call, room):
                pass

    def end_a_call(self, end: int | None) -> None:
        """The oldest call of the worker with most of them is answered, or fails."""
        busiest = max(self.upstreams, key=lambda upstream: len(upstream.under_way()), default=None)
        for call in busiest.under_way()[:1] if busiest is not None else ():
            if end is None:
                call.end.set_result(ANSWER)
            else:
                call.end.set_exception(_error(*FAILS[end]))

    async def close(self) -> None:
        await self.pool.close()
        self.turns.close()


def replace_addresses(config: Any, addresses: tuple[str, ...]) -> Any:
    return msgspec.structs.replace(
        config, workers=msgspec.structs.replace(config.workers, addresses=addresses)
    )


workers = st.integers(0, len(WORKERS) - 1)
actions = st.one_of(
    st.tuples(
        st.just("edit"),
        st.sampled_from([1, 1, 2, 5]),
        st.sampled_from(["", "a", "b"]),
        st.booleans(),
        st.sampled_from([None, None, 0.002, 0.05, 60.0]),
        st.fixed_dictionaries(
            {},
            optional={
                "deadline_ms": st.sampled_from([1, 20, 30_000, 60_000]),
                "priority": st.integers(-2, 2),
                "model": st.sampled_from(MODELS),
                "cache": st.sampled_from(["require", "off"]),
            },
        ),
    ),
    st.tuples(st.just("state"), workers, st.sampled_from(STATES)),
    st.tuples(st.just("model"), workers, st.sampled_from(["m", "n", ""])),
    st.tuples(st.just("places"), workers, st.integers(0, 2)),
    st.tuples(st.just("priced"), workers, st.booleans()),
    st.tuples(st.just("drain"), workers, st.booleans()),
    st.tuples(st.just("workers"), st.integers(0, len(WORKERS))),
    st.tuples(st.just("end"), st.sampled_from([None, None, None, *range(len(FAILS))])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.just("poll")),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.0, 0.003, 0.025])),
)


async def act(site: Site, action: tuple[Any, ...]) -> None:
    workers, edits = list(site.pool.workers.values()), list(site.edits)
    match action:
        case ("edit", number, *edit):
            for _ in range(number):
                site.edit(*edit)
        case ("state" | "model" | "places" | "priced" as field, number, value):
            name = {"places": "max_waiting"}.get(field, field)
            if number < len(workers):
                setattr(workers[number].upstream, name, value)
        case ("drain", number, value) if number < len(workers):
            workers[number].draining = value
        case ("workers", number):
            await site.want(number)
        case ("end", end):
            site.end_a_call(end)
        case ("cancel", number) if number < len(edits):
            site.dispatcher.cancel(edits[number])
        case ("leave", number) if number < len(edits):
            site.left.add(edits[number])
            site.edits[edits[number]].cancel()
        case ("poll",):
            await site.poll()
        case ("wait", seconds):
            await asyncio.sleep(seconds)
    for _ in range(12):  # what it sets off begins
        await asyncio.sleep(0)


async def settle(site: Site, last: str) -> None:
    """Workers stay as they are and answer what they have, until all edits have ended."""
    for upstream in site.upstreams:
        upstream.state = last
    for worker in site.pool.workers.values():
        worker.draining = False
    loop = asyncio.get_running_loop()
    late = loop.time() + 2.0
    while not all(task.done() for task in site.edits.values()):
        assert loop.time() < late, "an edit has no end"
        await site.poll()
        site.end_a_call(None)
        await asyncio.sleep(0.001)


async def run(policy: str, order: str, script: list[tuple[Any, ...]], last: str) -> None:
    with patch("maskserve_common.servers.pool.Upstream", ScriptedUpstream):
        site = Site(policy, order)
        await site.pool.all_polled()
        try:
            await site.measure_once()
            for action in script:
                await act(site, action)
            await settle(site, last)
            ends = await asyncio.gather(*site.edits.values(), return_exceptions=True)
        finally:
            await site.close()
    for name, end in zip(site.edits, ends, strict=True):
        if end is None or (isinstance(end, asyncio.CancelledError) and name in site.left):
            continue
        assert isinstance(end, MaskserveError | Failure), repr(end)
        assert end.code in CODES
    assert (site.admission.edits, site.admission.bytes, len(site.pending)) == (0, 0, 0)
    assert not any(worker.sent for worker in site.pool.workers.values())


@examples(1000)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(["slack", "fcfs"]),
    st.lists(actions, min_size=5, max_size=60),
    st.sampled_from(STATES),
)
def test_each_edit_ends_and_its_end_names_its_cause(
    policy: str, order: str, script: list[tuple[Any, ...]], last: str
) -> None:
    asyncio.run(run(policy, order, script, last))


def test_an_edit_with_a_deadline_that_comes_while_others_wait_and_no_worker_is_ready() -> None:
    waits = ("edit", 9, "", False, None, {"deadline_ms": 30_000})
    late = ("edit", 1, "", False, None, {"deadline_ms": 60_000})
    drained = [("drain", number, True) for number in range(len(WORKERS))]
    asyncio.run(run("mask_aware", "slack", [waits, *drained, late], "ready"))


def test_nobody_gets_what_waits_where_there_is_nobody() -> None:
    assert assign([Edit(4, 1, 9)], []).edits == {}
