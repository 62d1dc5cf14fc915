"""The node servers: Tritons that run the workflow nodes other than edits."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from maskserve_common.errors import EngineFailed, InvalidRequest, split_code
from maskserve_common.files.values import NO_VALUES, Values
from maskserve_common.resources.loading import NOT_LOADED
from maskserve_common.servers.call_tries import CallTries
from maskserve_common.servers.failure import Failure
from maskserve_common.servers.pool import ServerPool
from maskserve_common.shares import PATIENCE_S, urgency
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairPlaces, FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.nodes.kept_answers import AnswerKey, KeptAnswers
from maskserve_router.nodes.node_messages import NodeAnswer, node_answer, node_request
from maskserve_router.nodes.node_server import CALL_S, NodeServer, runs
from maskserve_workflows.live_placement import LivePlacement
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.run import Task
from maskserve_workflows.wire import (
    NO_ROOM,
    NOT_HOSTED,
    OTHER_VERSION,
    PLACED,
    NodeTask,
    nbytes,
    pack_values,
    read_all,
)

log = logging.getLogger("maskserve.router")
_RESOLVE_S = 5.0
"""Seconds between two name resolutions."""
_POLL_S = 1.0
"""Seconds between two polls of a server."""
_PLACE_S = 5.0
_PATIENCE_S = 120.0
"""Seconds to wait for a lost server, which its supervisor restarts."""
_UNKNOWN = ("unknown model", NOT_HOSTED)
"""Errors of a server that does not run a node, from Triton or from the server's model."""
_UNABLE = (NO_ROOM, NOT_LOADED)
"""Errors of a server that cannot load a node's model."""
_AT_A_SERVER = 2
"""Calls of a model that are sent to each server at a time: one runs, the next waits."""
_LONG = 2**30
"""A size that always takes a thread."""
_LEAST_TRANSFER = 2**16
"""Least bytes of a call to another host whose time is that of its bytes."""
_REMEMBERED = 0.2
"""Weight of the newest call in the mean seconds of a node type."""


@dataclass(slots=True, eq=False)
class _Message:
    """A request to run a node."""

    digest: bytes
    """Digest of node, settings and inputs."""
    whole: bytes
    """Encoded request for a server of this host, with names of values."""
    encode_plain: Callable[[], bytes] | None
    """Makes the encoded request for other hosts, with values; None: `whole` fits all."""
    nbytes: int
    """Bytes of the inputs."""
    plain: bytes = b""
    """The encoded request for other hosts, once it is made."""


class _Answered(NamedTuple):
    """A server's answer to a call."""

    raw: bytes
    server: NodeServer
    tries: int
    seconds: float
    """Seconds from sending to the answer."""


class NodePool(ServerPool[NodeServer]):
    """Calls nodes. Use it from the event loop only.

    Keys share the servers in turns. A server answers in order of arrival, so only as many calls
    wait there as keep it busy. The answers of a key are kept (`KeptAnswers`). Servers of this host
    get names of values, others get the values (`maskserve_common.files.values`).

    Args:
        files: addresses of the servers, and limits of kept answers.
        fair_share: threads that encode and decode messages.
        order: `[routing] order`, for a key's own calls.
        values: this host's folder of values.
        place_s: seconds between two placements of models.
    """

    def __init__(
        self,
        files: WorkflowFiles,
        fair_share: FairShare,
        order: str = "slack",
        values: Values = NO_VALUES,
        place_s: float = _PLACE_S,
    ) -> None:
        super().__init__(files.nodes, _RESOLVE_S)
        self._fair_share, self._order, self._values = fair_share, order, values
        self._answers = KeptAnswers(files, values, fair_share)
        self._places: dict[str, FairPlaces] = {}
        """Triton model -> places for its calls."""
        self._numbers: dict[str, int] = {}
        """Address -> number in names for clients, including addresses that are gone."""
        self._misfits = set[tuple[NodeServer, str]]()
        """Servers that were logged as having another revision of a model."""
        self._seconds: dict[str, float] = {}
        """Node type -> mean seconds of its recent calls."""
        self._byte_s = 0.0
        """Mean seconds of a byte to or from servers of other hosts."""
        self._placement, self._place_s = LivePlacement(), place_s
        self._placing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the placement of models on servers by demand."""
        if self.known:
            self._placing = asyncio.create_task(self._keep_placing())

    async def _keep_placing(self) -> None:
        while True:
            try:
                await self.place()
            except Exception:
                log.exception("placing the models of node servers")
            await asyncio.sleep(self._place_s)

    async def place(self) -> None:
        """Tell servers what to load, by what they have loaded and how busy they are."""
        records = await self._records()
        changes = await asyncio.to_thread(self._placement.observe, records, time.monotonic())
        for address, models in changes.items():
            log.info("node server %s is assigned %s", address, ", ".join(sorted(models)) or "none")
            if (server := self.servers.get(address)) is not None:
                with suppress(Failure, ValueError):
                    await self._ask(server, {PLACED: sorted(models)})

    async def close(self) -> None:
        """Close all connections. Calls under way end."""
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.gather(self._placing, return_exceptions=True)
        await self._answers.close()
        await super().close()

    def busy(self) -> Mapping[str, float]:
        """Return model -> servers that its recent calls kept busy, over all routers."""
        return self._placement.busy()

    async def records(self, client: KeyHolder) -> dict[str, Any]:
        """Return each server's record (`NodeModels.record`), by its name for this client.

        None: the server does not answer.
        """
        records = await self._records()
        return {self._name(address, client): record for address, record in records.items()}

    async def check(self, nodes: Collection[str]) -> None:
        """Check that a run's nodes can be called, before its edits run.

        Args:
            nodes: node types of the run.

        Raises:
            EngineFailed: all servers answer, and none of them runs one of the nodes.
        """
        for name in sorted(nodes):
            model = NODE_TYPES[name].model
            if await self._runs(model) is False:
                raise EngineFailed(f"{name}: no node server runs {model}")

    async def serves(self, model: str) -> bool:
        """Return whether a server that answers runs a model.

        Raises:
            EngineFailed: none that answers runs it, and others do not answer.
        """
        answer = await self._runs(model)
        if answer is None:
            raise EngineFailed(f"{model}: its node server does not answer; try again later")
        return answer

    async def _runs(self, model: str) -> bool | None:
        """Return whether a server that answers runs a model; None: others do not answer.

        It waits for no server once it has been polled.
        """
        await self._discovery.ready()
        while not any(server.up and runs(model, server.record) for server in self.servers.values()):
            if all(server.polled for server in self.servers.values()):
                return False if all(server.up for server in self.servers.values()) else None
            await self._polled.wait()
        return True

    def seconds(self, node: str) -> float | None:
        """Return the mean seconds of recent calls of a node type; None: unknown."""
        return self._seconds.get(node)

    async def call(
        self, task: Task, client: KeyHolder, due: float = math.inf, run: str = ""
    ) -> NodeAnswer:
        """Run a node at the server that finishes first among those that have its model.

        If that server is lost or cannot run it, the next one is tried, or the first one that comes
        back.

        Args:
            task: the node.
            client: holder of the key that asks.
            due: when it should be done, on time.monotonic's clock.
            run: run that owns outputs kept as files; empty: outputs are bytes.

        Raises:
            Failure: the node's own error, or the last server's.
            EngineFailed: no server runs it, or two servers failed it without an error code. The
                same call may succeed later.
        """
        kind, size = NODE_TYPES[task.call.node], nbytes(task.inputs)
        message = await self._fair_share.run(
            client, size, self._message, task, kind, client.scope, run
        )
        make = partial(self._call_node, message, kind, client, due)
        if kind.deterministic:
            answer = await self._answers.answer(AnswerKey(client.scope, message.digest), run, make)
        else:
            answer = await make()
        return answer._replace(server=self._name(answer.server, client))

    # Membership.

    def _add_server(self, address: str) -> NodeServer:
        self._numbers.setdefault(address, len(self._numbers))
        return NodeServer(address)

    async def _finish(self, server: NodeServer) -> None:
        self._polls[server].cancel()  # a connection that closes takes no new call
        await server.upstream.close(CALL_S)

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        super()._addresses_changed(new, removed)
        for line in self._places.values():
            line.resize(self._most())

    def _most(self) -> int:
        return max(1, _AT_A_SERVER * len(self.servers))

    def _name(self, address: str, client: KeyHolder) -> str:
        """Return a server's name for a client: its address for operators, otherwise its number."""
        return address if client.admin else f"nodes-{self._numbers[address]}"

    # Records.

    def _interval_s(self, server: NodeServer) -> float:
        return _POLL_S

    async def _ask(
        self, server: NodeServer, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        await server.ask(settings)
        return ""

    async def _records(self) -> dict[str, dict[str, Any] | None]:
        await self.all_polled()
        servers = self.servers.values()
        return {server.address: server.record if server.up else None for server in servers}

    async def _is_local(self, server: NodeServer) -> bool:
        """Return True if a server shares this host's folder of values."""
        if server.host is None:
            await self.poll(server)
        return server.host == self._values.host

    def able(self, name: str) -> list[NodeServer]:
        """Return the servers that get calls of a node. Where they have different revisions of its
        model, those with that of the first server that answers, or of the first if none does.
        """
        model, servers = NODE_TYPES[name].model, super().able(name)
        by_state = sorted(servers, key=lambda server: not server.up)
        revisions = (server.revision(model) for server in by_state)
        current = next(filter(None, revisions), "")
        able = [x for x in servers if x.revision(model) in ("", current)]
        for server in servers if len(able) < len(servers) else ():
            if server not in able and (server, model) not in self._misfits:
                self._misfits.add((server, model))
                problem = f"its model {model} is another than that of {able[0].address}"
                log.warning("node server %s is left out: %s", server.address, problem)
        return able

    # Calls.

    def _message(self, task: Task, kind: NodeType, scope: str, run: str) -> _Message:
        layout, elements = pack_values(task.inputs, kind.inputs)
        node_task = NodeTask(kind.name, layout, task.call.settings, scope, signature=kind.signature)
        digest = hashlib.sha256(msgspec.json.encode(node_task, order="sorted"))
        for element in elements:
            digest.update(b"%d:" % len(element))
            digest.update(element)

        def plain() -> bytes:
            values = read_all(task.inputs, self._values, scope)
            return node_request(node_task, pack_values(values, kind.inputs)[1])

        whole = node_request(structs.replace(node_task, run=run), elements)
        size = nbytes(task.inputs)
        return _Message(digest.digest(), whole, plain if run else None, size)

    async def _call_node(
        self, message: _Message, kind: NodeType, client: KeyHolder, due: float
    ) -> NodeAnswer:
        await self._discovery.ready()
        line = self._places.setdefault(kind.model, FairPlaces(self._most()))
        starts_by = due - self._price_s(kind)
        async with line.place(client.scope, self._urgency(starts_by)):
            raw, server, tries, seconds = await self._answer(message, kind, client)
            answer = await self._fair_share.run(
                client, len(raw), node_answer, raw, server.address, tries
            )
            if self._is_far(server):
                self._learn_transfer(message.nbytes + len(raw), seconds - answer.seconds)
            return answer

    def _learn_transfer(self, size: int, seconds: float) -> None:
        """Learn from a transfer of `size` bytes; of a few bytes nothing can be learned."""
        if size < _LEAST_TRANSFER:
            return
        byte_s = max(seconds, 0.0) / size
        average_s = self._byte_s or byte_s
        self._byte_s = average_s + _REMEMBERED * (byte_s - average_s)

    def _is_far(self, server: NodeServer) -> bool:
        """Return True if a server is known not to share this host's folder of values."""
        return server.host not in (None, self._values.host)

    def _urgency(self, starts_by: float) -> float:
        due_time = None if self._order == "fcfs" else starts_by
        return urgency(time.monotonic(), 0, 0.0, due_time, PATIENCE_S)

    def _price_s(self, kind: NodeType) -> float:
        """Return the predicted seconds of a call."""
        return self._seconds.get(kind.name, kind.price_s)

    async def _answer(self, message: _Message, kind: NodeType, client: KeyHolder) -> _Answered:
        """Return a server's answer; raises as `call`."""
        tries = CallTries(self, kind.name, _PATIENCE_S)
        rank = partial(self._rank, kind.model, message)
        while (server := await tries.next_server(rank)) is not None:
            request = await self._request(message, server, client)
            if self.servers.get(server.address) is not server:
                tries.returning = True
                continue
            self._placement.count_call(kind.model, server.address)
            try:
                begin = time.monotonic()
                raw = await self._sent(server, request, kind)
                return _Answered(raw, server, tries.count, time.monotonic() - begin)
            except Failure as failure:
                if failure.code != InvalidRequest.code:
                    server.host = None  # another server may take over the address
                if OTHER_VERSION in failure.details:
                    self.leave_out(server, kind.name, failure.details)
                elif _has(failure, _UNABLE) and not failure.untaken:
                    tries.pass_over(server, failure)
                elif not _has(failure, _UNKNOWN):
                    tries.record_failure(server, failure)
        if tries.failure is not None:
            raise tries.failure
        for server in self.servers.values():
            if kind.name in server.problems:
                raise EngineFailed(split_code(server.problems[kind.name])[1])
        capability = "can be reached" if tries.returning else f"runs {kind.model}"
        raise EngineFailed(f"{kind.name}: no node server {capability}")

    def _rank(
        self, model: str, message: _Message, server: NodeServer
    ) -> tuple[bool, float, float, bool, str]:
        """Rank servers by predicted end, those that do not answer last; of equal ones those that
        take names come first.
        """
        byte_s = self._byte_s if self._is_far(server) else 0.0
        score = (
            not server.up,
            *self._placement.score(model, server.address, server.load_s, message.nbytes, byte_s),
        )
        return *score, server.host not in (None, self._values.host), server.address

    async def _request(self, message: _Message, server: NodeServer, client: KeyHolder) -> bytes:
        """Return the encoded request for a server."""
        if message.encode_plain is None or await self._is_local(server):
            return message.whole
        if not message.plain:
            message.plain = await self._fair_share.run(client, _LONG, message.encode_plain)
        return message.plain

    async def _sent(self, server: NodeServer, request: bytes, kind: NodeType) -> bytes:
        """Return the answer to one call, and learn its seconds."""
        price_s, begin = self._price_s(kind), time.monotonic()
        with server.busy(price_s):
            answer = await server.infer(request, CALL_S)
        taken_s = time.monotonic() - begin
        self._seconds[kind.name] = price_s + _REMEMBERED * (taken_s - price_s)
        return answer


def _has(failure: Failure, errors: tuple[str, ...]) -> bool:
    return any(words in failure.details for words in errors)


def hosts(model: str, records: Mapping[str, Any]) -> list[str]:
    """Return the addresses of the node servers that run a model."""
    return [address for address, record in records.items() if runs(model, record)]
