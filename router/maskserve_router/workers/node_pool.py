"""The node servers: Tritons that run the workflow nodes other than edits."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import msgspec
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.errors import EngineFailed, InvalidRequest, TemplateNotFound, split_code
from maskserve_common.files.values import NO_VALUES, Values, parse
from maskserve_common.imaging.images import as_file
from maskserve_common.lru_cache import LruCache
from maskserve_common.shares import PATIENCE_S, urgency
from maskserve_router.config import WorkflowFiles
from maskserve_router.dns import Discovery
from maskserve_router.fair_share import FairPlaces, FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.failures import Blame, Failure
from maskserve_router.workers.upstream import Upstream, failures
from maskserve_workflows.live_placement import LivePlacement
from maskserve_workflows.node_types import NodeType
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.run import Task
from maskserve_workflows.values import NamedValue, map_parts, named_in
from maskserve_workflows.wire import (
    MOST_ELEMENTS,
    NOT_HOSTED,
    OTHER_VERSION,
    PLACED,
    RECORD,
    NodeResult,
    NodeTask,
    nbytes,
    pack_values,
    read_all,
    unpack_values,
)

log = logging.getLogger("maskserve.router")
_TIMEOUT_S = 120.0
_STATUS_S = 5.0
_PATIENCE_S = 120.0
"""Seconds to wait for a lost server, which its supervisor restarts."""
_POLL_S = 0.2
"""First wait in seconds after no server took a call; it doubles each time."""
_MOST_POLL_S = 2.0
_RESOLVE_S = 5.0
"""Seconds between two name resolutions."""
_PLACE_S = 5.0
_MODEL = "nodes"
_UNKNOWN = ("unknown model", NOT_HOSTED, OTHER_VERSION)
"""Errors of a server that does not run a node, from Triton or from the server's model."""
_NEVER_BEGUN = ("failed to connect", "resolution failed", "Server is stopping", "Server not ready")
"""UNAVAILABLE errors, from gRPC and Triton, of a server that did not take the call. Any other error
without our code means a connection lost during the call."""
_MOST_LOST = 2
"""Servers that a call may lose before it is given up: the call itself may crash them."""
_AT_A_SERVER = 2
"""Calls of a model that are sent to each server at a time: one runs, the next waits."""
_SMALL = 512
"""Bytes of a kept answer beside its values."""
_LONG = 2**30
"""A size that always takes a thread."""
_REMEMBERED = 0.2
"""Weight of the newest call in the mean seconds of a node type."""


class NodeAnswer(NamedTuple):
    """A node's answer."""

    outputs: dict[str, Any]
    server: str
    seconds: float
    """Seconds that the node ran."""
    tries: int
    """2 if a server was lost, failed the call, or had to be waited for."""
    reused: bool = False
    """True if an earlier call made the answer."""


class _AnswerKey(NamedTuple):
    """Key of a kept answer: the client's scope and the digest of the call."""

    scope: str
    digest: bytes


class _Message(NamedTuple):
    """A request to run a node."""

    digest: bytes
    """Digest of node, settings and inputs."""
    whole: bytes
    """Encoded request for a server of this host, with names of values."""
    plain: Callable[[], bytes] | None
    """Makes the encoded request for other hosts, with values; None: `whole` fits all."""


class NodePool:
    """Calls nodes. Use it from the event loop only.

    Keys share the servers in turns. A server answers in order of arrival, so only as many calls
    wait there as keep it busy. The answers of a key are kept: an equal call gets the kept answer,
    or waits for the one being made. Servers of this host get names of values, others get the values
    (`maskserve_common.files.values`).

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
        self._fair_share, self._order = fair_share, order
        self._addresses = files.nodes
        self._discovery = Discovery(files.nodes, _RESOLVE_S, self._addresses_changed)
        self._place_s = place_s
        self._values, self._keeping = values, set[str]()
        self._keeper = f"kept{secrets.token_hex(8)}"
        """Owner of the values of kept answers, in place of a run; unique to this router."""
        self._shares_folder: dict[str, bool] = {}
        """Address -> whether the server shares the folder; lost servers have no entry."""
        self._stored: LruCache[_AnswerKey, NodeAnswer] = LruCache(
            files.kept_bytes,
            _nbytes,
            lambda answer_key: answer_key.scope,
            files.kept_s,
            on_evict=self._forget,
        )
        self._pending: dict[_AnswerKey, asyncio.Future[NodeAnswer]] = {}
        """Answers that are being made."""
        self._places: dict[str, FairPlaces] = {}
        """Triton model -> places for its calls."""
        self._servers: dict[str, Upstream] = {}
        self._load: dict[str, float] = {}
        """Address -> seconds of work sent and not yet answered."""
        self._numbers: dict[str, int] = {}
        """Address -> number of the server, including servers that are gone."""
        self._leaving = set[asyncio.Task[None]]()
        self._hosted: set[str] = set()
        """Models that some server has reported."""
        self._seconds: dict[str, float] = {}
        """Node type -> mean seconds of its recent calls."""
        self._warned: set[tuple[str, str]] = set()
        """Servers with another version of a node, and their errors."""
        self._placement = LivePlacement()
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
        """Read what servers have loaded and tell them what to load."""
        records = await self._all_records()
        changes = await asyncio.to_thread(self._placement.observe, records, time.monotonic())
        for address, models in changes.items():
            log.info("node server %s is assigned %s", address, ", ".join(sorted(models)) or "none")
            await self._record(address, {PLACED: sorted(models)})

    async def close(self) -> None:
        if self._placing is not None:
            self._placing.cancel()
            await asyncio.gather(self._placing, return_exceptions=True)
        for scope in self._keeping:
            await self._fair_share.locked(self._values.end, scope, self._keeper)
        await self._discovery.close()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for server in self._servers.values():
            await server.close()

    @property
    def known(self) -> bool:
        """True if the configuration names node servers."""
        return bool(self._addresses)

    def busy(self) -> Mapping[str, float]:
        """Return model -> servers that its recent calls kept busy, over all routers."""
        return self._placement.busy()

    async def records(self, client: KeyHolder) -> dict[str, Any]:
        """Return each server's record (`NodeModels.record`), by its name for this client.

        None: the server does not answer.
        """
        records = await self._all_records()
        return {self._known(address, client): record for address, record in records.items()}

    async def check(self, nodes: Collection[str]) -> None:
        """Check that a run's nodes can be called, before its edits run.

        Args:
            nodes: node types of the run.

        Raises:
            EngineFailed: all servers answer, and none of them runs one of the nodes.
        """
        missing = [name for name in sorted(nodes) if NODE_TYPES[name].model not in self._hosted]
        if not missing:
            return
        records = (await self._all_records()).values()
        for record in filter(None, records):
            self._hosted.update(model["name"] for model in record["models"])
        for name in missing:
            if all(records) and NODE_TYPES[name].model not in self._hosted:
                raise EngineFailed(f"{name}: no node server runs {NODE_TYPES[name].model}")

    def _addresses_changed(self, new: Sequence[str], removed: Sequence[str]) -> None:
        for address in new:
            self._servers[address] = Upstream(address)
            self._load.setdefault(address, 0.0)
            self._numbers.setdefault(address, len(self._numbers))
        for address in removed:  # calls under way are waited for
            task = asyncio.create_task(self._servers.pop(address).close(_TIMEOUT_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for line in self._places.values():
            line.resize(self._most())

    def _most(self) -> int:
        return max(1, _AT_A_SERVER * len(self._servers))

    def _known(self, address: str, client: KeyHolder) -> str:
        """Return a server's name for a client: its address for operators, otherwise its number."""
        return address if client.admin else f"nodes-{self._numbers[address]}"

    async def _all_records(self) -> dict[str, dict[str, Any] | None]:
        await self._discovery.ready()
        servers = list(self._servers)
        records = await asyncio.gather(*map(self._record, servers))
        return dict(zip(servers, records, strict=True))

    async def _record(
        self, address: str, settings: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any] | None:
        request = _request(NodeTask(RECORD, (), dict(settings)), ())
        server = self._servers.get(address)
        if server is None:
            return None
        try:
            with failures():
                answer = await server.infer(request.SerializeToString(), _STATUS_S)
            (raw,) = bytes_tensor.elements(_contents(answer)["RESULT"], 1)
            record: dict[str, Any] = msgspec.json.decode(raw)
        except (Failure, KeyError, ValueError, msgspec.MsgspecError):
            return None
        self._shares_folder[address] = self._values.host == record.get("values", {}).get("host", "")
        return record

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
        answer = await self._stored_answer(task, client, due, run)
        return answer._replace(server=self._known(answer.server, client))

    async def _stored_answer(
        self, task: Task, client: KeyHolder, due: float, run: str
    ) -> NodeAnswer:
        """Return a kept answer or make one; like `call`, with the server's address."""
        kind, size = NODE_TYPES[task.call.node], nbytes(task.inputs)
        message = await self._fair_share.run(
            client, size, self._message, task, kind, client.scope, run
        )
        if not kind.deterministic:
            return await self._call_node(message, kind, client, due)
        cache_key = _AnswerKey(client.scope, message.digest)
        while (answer := self._stored.get(cache_key)) is not None or cache_key in self._pending:
            if answer is None:
                await asyncio.wait([pending := self._pending[cache_key]])
                if pending.cancelled():
                    continue
                answer = pending.result()
            run_answer = await self._fair_share.locked(self._taken_over, answer, client.scope, run)
            if run_answer is not None:
                return run_answer._replace(reused=True)
            self._stored.drop(cache_key)
        pending = self._pending[cache_key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._call_node(message, kind, client, due)
            cache_copy = _copied(answer)  # the run's values may be made again under other names
            await self._keep(cache_key, cache_copy)
            pending.set_result(cache_copy)
            return answer
        finally:
            del self._pending[cache_key]
            pending.cancel()  # no effect after an answer; otherwise a waiting call makes its own

    async def _keep(self, key: _AnswerKey, answer: NodeAnswer) -> None:
        if names := _names(answer):
            self._keeping.add(key.scope)
            if not await self._fair_share.locked(self._have, names, key.scope):
                return
        self._stored.put(key, answer)

    def _have(self, names: Sequence[str], scope: str) -> bool:
        """Own the values of a kept answer. Return False: they no longer exist."""
        self._values.begin(scope, self._keeper)
        return self._values.share(names, scope, self._keeper)

    def _forget(self, key: _AnswerKey, answer: NodeAnswer) -> None:
        """Free the values of an answer that is no longer kept."""
        if names := _names(answer):
            self._fair_share.later(self._values.free, names, key.scope, self._keeper)

    def _taken_over(self, answer: NodeAnswer, scope: str, run: str) -> NodeAnswer | None:
        """Return a kept answer for a run, which then owns its values; None: they are gone."""
        if not (names := _names(answer)):
            return answer
        if not self._values.share(names, scope, self._keeper):  # renews their time to live
            return None
        if run:
            return _copied(answer) if self._values.share(names, scope, run) else None
        try:
            files = read_all(answer.outputs, self._values, scope)
        except TemplateNotFound:
            return None
        return answer._replace(outputs={k: map_parts(v, _as_sent) for k, v in files.items()})

    def _message(self, task: Task, kind: NodeType, scope: str, run: str) -> _Message:
        layout, elements = pack_values(task.inputs, kind.inputs)
        node_task = NodeTask(kind.name, layout, task.call.settings, scope, signature=kind.signature)
        digest = hashlib.sha256(msgspec.json.encode(node_task, order="sorted"))
        for element in elements:
            digest.update(b"%d:" % len(element))
            digest.update(element)
        whole = _request(structs.replace(node_task, run=run), elements).SerializeToString()

        def plain() -> bytes:
            values = read_all(task.inputs, self._values, scope)
            return bytes(
                _request(node_task, pack_values(values, kind.inputs)[1]).SerializeToString()
            )

        return _Message(digest.digest(), whole, plain if run else None)

    async def _is_local(self, address: str) -> bool:
        if address not in self._shares_folder:
            await self._record(address)
        return self._shares_folder.get(address, False)

    async def _call_node(
        self, message: _Message, kind: NodeType, client: KeyHolder, due: float
    ) -> NodeAnswer:
        await self._discovery.ready()
        line = self._places.setdefault(kind.model, FairPlaces(self._most()))
        starts_by = due - self._seconds.get(kind.name, kind.price_s)
        async with line.place(client.scope, self._urgency(starts_by)):
            answer, address, tries = await self._answer(message, kind, client)
            return await self._fair_share.run(client, len(answer), _parsed, answer, address, tries)

    def _urgency(self, starts_by: float) -> float:
        due_time = None if self._order == "fcfs" else starts_by
        return urgency(time.monotonic(), 0, 0.0, due_time, PATIENCE_S)

    async def _answer(
        self, message: _Message, kind: NodeType, client: KeyHolder
    ) -> tuple[bytes, str, int]:
        """Return a server's answer, its address and the number of tries; raises as `call`."""
        end, wait_s, tries, plain = time.monotonic() + _PATIENCE_S, _POLL_S, 1, b""
        failed: Failure | EngineFailed | None = None
        lost, broken, other_version = 0, set[str](), ""
        while True:  # tries each server once per round, until one takes the call
            await self._discovery.ready()
            is_unreachable = bool(self._addresses) and not self._servers
            candidates = self._servers.keys() - broken
            for address in sorted(candidates, key=partial(self._rank, kind.model)):
                raw = message.whole
                if message.plain is not None and not await self._is_local(address):
                    raw = plain = plain or await self._fair_share.run(client, _LONG, message.plain)
                if address not in self._servers:
                    is_unreachable = True
                    continue
                self._placement.count_call(kind.model, address)
                try:
                    return await self._sent(address, raw, kind), address, tries
                except Failure as error:
                    failure = error
                if failure.code != InvalidRequest.code:
                    self._shares_folder.pop(
                        address, None
                    )  # another server may take over the address
                if any(words in failure.details for words in _UNKNOWN):
                    if OTHER_VERSION in failure.details:
                        other_version = failure.details
                        self._warn(address, other_version)
                    continue
                tries = 2
                unavailable = failure.status is grpc.StatusCode.UNAVAILABLE
                if unavailable and (
                    failure.coded or any(words in failure.details for words in _NEVER_BEGUN)
                ):
                    is_unreachable = True
                elif not failure.coded:
                    log.warning("%s failed a call of %s: %s", address, kind.name, failure.details)
                    failed = EngineFailed(f"{kind.name}: its node server failed the call")
                    lost += 1
                    if lost == _MOST_LOST or failure.blame is Blame.REQUEST:
                        raise failed
                    if unavailable:  # a server that replaces it may be able to run the call
                        is_unreachable = True
                    else:
                        broken.add(address)
                elif failure.blame is Blame.WORKER:
                    failed = failure  # a load failed or there is no room on that server
                else:
                    raise failure
            if not is_unreachable or time.monotonic() > end:
                if failed is not None:
                    raise failed
                if other_version:
                    raise EngineFailed(split_code(other_version)[1])
                capability = f"runs {kind.model}" if not is_unreachable else "can be reached"
                raise EngineFailed(f"{kind.name}: no node server {capability}")
            tries = 2
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_POLL_S)

    def _warn(self, address: str, details: str) -> None:
        """Log once that a server has another version of a node."""
        if (address, details) not in self._warned:
            self._warned.add((address, details))
            log.warning("node server %s is left out: %s", address, details)

    def _rank(self, model: str, address: str) -> tuple[float, float, bool, str]:
        """Rank servers by predicted end; of equal ones those that take names come first."""
        score = self._placement.score(model, address, self._load[address])
        return *score, not self._shares_folder.get(address, True), address

    async def _sent(self, address: str, raw: bytes, kind: NodeType) -> bytes:
        """Send one call and count its work at the server while it is under way."""
        price_s = self._seconds.get(kind.name, kind.price_s)
        self._load[address] += price_s
        begin = time.monotonic()
        try:
            with failures():
                answer: bytes = await self._servers[address].infer(raw, _TIMEOUT_S)
        finally:
            self._load[address] -= price_s
        taken_s = time.monotonic() - begin
        self._seconds[kind.name] = price_s + _REMEMBERED * (taken_s - price_s)
        return answer


def _request(task: NodeTask, elements: Sequence[bytes]) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=_MODEL)
    bytes_tensor.add_input(request, "TASK", [msgspec.json.encode(task, order="sorted")])
    bytes_tensor.add_input(request, "VALUES", elements)
    return request


def _contents(answer: bytes) -> dict[str, bytes]:
    """Return the contents of an answer by output."""
    response = pb.ModelInferResponse.FromString(answer)
    names = (output.name for output in response.outputs)
    return dict(zip(names, response.raw_output_contents, strict=True))


def _names(answer: NodeAnswer) -> list[str]:
    parsed_names = (parse(value.element) for value in named_in(list(answer.outputs.values())))
    return [parsed_name[0] for parsed_name in parsed_names if parsed_name is not None]


def _copied(answer: NodeAnswer) -> NodeAnswer:
    def copied_part(part: Any) -> Any:
        return NamedValue(part.reference) if isinstance(part, NamedValue) else part

    return answer._replace(
        outputs={k: map_parts(v, copied_part) for k, v in answer.outputs.items()}
    )


def _as_sent(part: Any) -> Any:
    """Return a part as it is without a folder of values: bytes."""
    return as_file(part) if isinstance(part, memoryview) else part


def _nbytes(answer: NodeAnswer) -> int:
    return nbytes(answer.outputs) + _SMALL


def _parsed(answer: bytes, address: str, tries: int) -> NodeAnswer:
    try:
        contents = _contents(answer)
        result = msgspec.json.decode(bytes_tensor.only(contents["RESULT"]), type=NodeResult)
        parts = bytes_tensor.elements(contents["MADE"], MOST_ELEMENTS)
        return NodeAnswer(unpack_values(result.outputs, parts), address, result.seconds, tries)
    except (KeyError, ValueError, msgspec.MsgspecError):
        raise EngineFailed("a node server answered with something else") from None


def hosts(model: str, records: Mapping[str, Any]) -> list[str]:
    """Return the addresses of the node servers that run a model."""
    return [
        address
        for address, record in records.items()
        if record and any(entry["name"] == model for entry in record["models"])
    ]
