"""A worker's encoder and decoder send their requests on to a server in this process, which answers,
fails, is killed, or is another. tests/unit/engine/stages/test_shared_stages.py has real stages.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from maskserve_common.config import Config, ConfigError, StagesConfig
from maskserve_common.contracts.postprocess_context import NOTHING, PostprocessContext, request_in
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.files.stages import NO_ANSWER, PRIMING_PROMPT_FILE, StageOutages
from maskserve_common.servers import call_tries
from maskserve_common.servers.failure import Failure
from maskserve_common.tracing import make_tracer
from maskserve_triton import replicas
from maskserve_triton.batched_requests import BatchedRequests, batched, view_item
from maskserve_triton.forwarded_stages import ForwardedDecoder, ForwardedEncoder, ForwardedStage
from maskserve_triton.replicas import StageReplica
from maskserve_triton.stage_requests import NO_PIXELS, PRIMING_PROMPT, check_revision
from maskserve_triton.tensor_io import Outputs, error_response, failed_event, read_bytes
from tests.fakes.pb_utils import FakeTriton, Request
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually
from tests.support.stage_server import StageServer

REVISION = "of these stages"


class Encoder:
    """Stands for the real one: what it gives follows from all that it is given."""

    def __init__(self, api: FakeTriton, config: Config) -> None:
        self._api = api
        tracer = make_tracer(config, "encoder")
        self._requests = BatchedRequests(api, tracer, "encode", self._read, self._encode)

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def _read(self, request: Any) -> tuple[bytes, Any, Any, Any, Any]:
        check_revision(request, lambda: REVISION)
        return (
            read_bytes(self._api, request, "REQUEST"),
            np.array(view_item(self._api, request, "PIXELS", np.uint8, ndim=3)),
            np.array(view_item(self._api, request, "EDIT_MASK", np.uint8, ndim=2)),
            np.array(view_item(self._api, request, "CONTROLS", np.uint8, ndim=4)),
            np.array(view_item(self._api, request, "REFERENCES", np.uint8, ndim=1)),
        )

    def _encode(self, edits: Sequence[Any]) -> Iterator[Outputs | Exception]:
        for request, pixels, mask, controls, references in edits:
            if request == b"{":
                yield InvalidRequest("REQUEST", "is broken")
                continue
            text = b"primed" if request == PRIMING_PROMPT else request
            yield {
                "MOMENTS": pixels.astype(np.float32),
                "MASKED_MOMENTS": mask[None].astype(np.float32),
                "REFERENCE_MOMENTS": references.astype(np.float32),
                "CONTROL_MOMENTS": controls.astype(np.float32),
                "CONDITIONING": np.frombuffer(text, np.uint8),
                "ENCODED": json.dumps({"batch": len(edits)}).encode(),
            }


class Decoder:
    """A decoder whose answer follows from its request."""

    def __init__(self, api: FakeTriton, config: Config) -> None:
        self._api = api
        self.contexts: list[int] = []
        tracer = make_tracer(config, "decoder")
        self._requests = BatchedRequests(
            api, tracer, "decode", self._read, self._decode, self._failed, output="PIXELS"
        )

    def execute(self, requests: list[Any]) -> None:
        self._requests.execute(requests)

    def _read(self, request: Any) -> tuple[Any, bytes, Any]:
        check_revision(request, lambda: REVISION)
        return (
            view_item(self._api, request, "LATENTS", np.float32, ndim=3),
            read_bytes(self._api, request, "META"),
            view_item(self._api, request, "CONTEXT", np.uint8, ndim=1),
        )

    def _decode(self, events: Sequence[Any]) -> Iterator[Outputs | Exception]:
        for latents, meta, context in events:
            self.contexts.append(len(context))
            request_bytes = np.frombuffer(request_in(context), np.uint8)
            if len(latents) != 3:
                yield ValueError("channels")
                continue
            pixels = np.moveaxis(latents, 0, -1).astype(np.uint8) + request_bytes.sum(
                dtype=np.uint8
            )
            yield {"PIXELS": pixels, "META": meta, "CONTEXT": context}

    def _failed(self, request: Any, error: Exception) -> Outputs:
        meta = failed_event(read_bytes(self._api, request, "META"), error)
        return {"PIXELS": NO_PIXELS, "META": meta, "CONTEXT": NOTHING}


class Foreign:
    """An encoder of another model."""

    def __init__(self, api: FakeTriton) -> None:
        self._api = api

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            with pytest.raises(EngineFailed) as refused:
                check_revision(request, lambda: "another")
            answer = error_response(self._api, refused.value)
            flags = self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(answer, flags=flags)


class Site:
    """Stages of a worker's own, a service with such, and workers that ask it."""

    def __init__(self, api: FakeTriton, config: Config, opened: ExitStack) -> None:
        self._api, self._config, self._opened = api, config, opened
        self.local_stages = self.new_stages()
        self.served = self.new_stages()
        self.server = opened.enter_context(StageServer(api, self.served))

    def new_stages(self) -> dict[str, Any]:
        return {
            "encoder": Encoder(self._api, self._config),
            "decoder": Decoder(self._api, self._config),
        }

    def new_server(self) -> StageServer:
        """A second replica."""
        return self._opened.enter_context(StageServer(self._api, self.new_stages()))

    def worker(self, name: str = "worker", **keys: Any) -> Config:
        """The configuration of one that asks the service."""
        stages = StagesConfig(**{"service": self.server.url, "service_timeout_s": 50.0, **keys})
        folder = Path(self._config.runtime_dir) / name
        return replace(self._config, stages=stages, runtime_dir=str(folder))

    def open(
        self, kind: Callable[..., ForwardedStage], config: Config, revision: str = REVISION
    ) -> ForwardedStage:
        model = kind(self._api, config, revision)
        self._opened.callback(model.close)
        return model


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def site(api: FakeTriton, config: Config, opened: ExitStack) -> Site:
    return Site(api, config, opened)


def to_encode(api: FakeTriton, request_json: bytes = b'{"prompt":"a star"}') -> Request:
    rng = fresh_rng()
    height, width = rng.integers(8, 24, 2)
    tensors = {
        "REQUEST": request_json,
        "PIXELS": rng.integers(0, 256, (height, width, 3), np.uint8),
        "EDIT_MASK": rng.integers(0, 256, (height, width), np.uint8),
        "CONTROLS": rng.integers(0, 256, (rng.integers(3), height, width, 3), np.uint8),
        "REFERENCES": rng.integers(0, 256, rng.integers(40), np.uint8),
    }
    return api.request("", **batched(tensors))


def to_decode(api: FakeTriton, channels: int = 3) -> Request:
    rng = fresh_rng()
    latents = rng.uniform(0, 255, (channels, 5, 7)).astype(np.float32)
    if not channels:
        latents = np.zeros((0, 0, 0), np.float32)
    source = rng.bytes(5000)
    context = PostprocessContext(b'{"mine":1}', source, b"paste", decoded=True).pack()
    meta = b'{"event":"final","request_id":"mine"}'
    tensors = {"LATENTS": latents, "META": meta, "CONTEXT": context if channels else NOTHING}
    return api.request("", **batched(tensors))


def again(api: FakeTriton, request: Request) -> Request:
    """The same one."""
    tensors = {name: tensor.as_numpy() for name, tensor in request.tensors.items()}
    return api.request("", **tensors)


def answer_to(stage: Any, request: Request) -> dict[str, Any]:
    stage.execute([request])
    return tensors_of(request)


def tensors_of(request: Request) -> dict[str, Any]:
    response = request.sender.wait(60)
    assert not response.has_error(), response.error().message()
    arrays = {tensor.name(): np.asarray(tensor.as_numpy()) for tensor in response.output_tensors()}
    return {name: (tensor.dtype, tensor.shape, tensor.tolist()) for name, tensor in arrays.items()}


def test_what_is_sent_on_comes_back_as_the_worker_s_own_would_give_it(
    api: FakeTriton, site: Site
) -> None:
    encoder = site.open(ForwardedEncoder, site.worker())
    decoder = site.open(ForwardedDecoder, site.worker())
    assert (Path(site.worker().runtime_dir) / PRIMING_PROMPT_FILE).read_bytes() == b"primed"
    for _ in range(20):
        request = to_encode(api)
        expected = answer_to(site.local_stages["encoder"], again(api, request))
        assert answer_to(encoder, request) == expected
        request = to_decode(api)
        expected = answer_to(site.local_stages["decoder"], again(api, request))
        assert answer_to(decoder, request) == expected
    assert max(site.served["decoder"].contexts) < 100  # the source's pixels stay here
    passing = to_decode(api, 0)
    call_count = len(site.served["decoder"].contexts)
    assert answer_to(decoder, again(api, passing))["META"][2] == [
        [b'{"event":"final","request_id":"mine"}']
    ]
    assert len(site.served["decoder"].contexts) == call_count


def test_requests_of_several_workers_meet_in_one_call(api: FakeTriton, site: Site) -> None:
    workers = [site.open(ForwardedEncoder, site.worker(f"worker-{n}")) for n in range(2)]
    model = site.server.models["encoder"]
    model.idle.clear()
    requests = [to_encode(api) for _ in range(3)]
    for number, request in enumerate(requests):
        workers[min(number, 1)].execute([request])
    eventually("all have come", lambda: model.waiting.qsize() == 2)  # and one is taken
    model.idle.set()
    assert [tensors_of(worker_request)["ENCODED"][2] for worker_request in requests] == [
        [[b'{"batch": 3}']]
    ] * 3


def test_a_request_that_fails_harms_no_other_and_says_what_its_own_would(
    api: FakeTriton, site: Site
) -> None:
    encoder = site.open(ForwardedEncoder, site.worker())
    decoder = site.open(ForwardedDecoder, site.worker())
    bad, good = to_encode(api, b"{"), to_encode(api)
    missing = to_encode(api)
    del missing.tensors["PIXELS"]
    encoder.execute([bad, missing, good])
    assert not good.sender.wait(60).has_error()
    errors = [request.sender.wait(60).error().message() for request in (bad, missing)]
    assert errors == [
        "[INVALID_REQUEST] REQUEST: is broken",
        "[INVALID_REQUEST] PIXELS: is missing",
    ]
    meta = json.loads(answer_to(decoder, to_decode(api, 4))["META"][2][0][0])
    assert (meta["event"], meta["request_id"]) == ("failed", "mine")
    assert meta["error"] == "[ENGINE_FAILED] internal error (request mine)"


def test_what_a_killed_service_had_is_asked_again(api: FakeTriton, site: Site) -> None:
    encoder = site.open(ForwardedEncoder, site.worker())
    decoder = site.open(ForwardedDecoder, site.worker())
    requests = {"encoder": to_encode(api), "decoder": to_decode(api)}
    expected = {
        k: answer_to(site.local_stages[k], again(api, request)) for k, request in requests.items()
    }
    for name, stage in (("encoder", encoder), ("decoder", decoder)):
        model = site.server.models[name]
        model.idle.clear()
        stage.execute([requests[name]])
        eventually("it has come", lambda model=model: model.has_begun and model.waiting.empty())
    site.server.kill()
    assert not any(request.sender.finished.is_set() for request in requests.values())
    with StageServer(api, site.new_stages(), site.server.port):
        assert {name: tensors_of(request) for name, request in requests.items()} == expected


def test_a_service_gone_for_good_is_told_and_found_again(api: FakeTriton, site: Site) -> None:
    config = site.worker(service_timeout_s=0.2)
    encoder, decoder = site.open(ForwardedEncoder, config), site.open(ForwardedDecoder, config)
    away = StageOutages(config)
    assert [node.state for node in away.nodes("m")] == ["ready", "ready"]
    site.server.kill()
    # More than are with the service at a time.
    requests = [to_encode(api) for _ in range(40)]
    encoder.execute(requests)
    errors = {request.sender.wait(60).error().message() for request in requests}
    assert errors == {f"[OVERLOADED] {NO_ANSWER}"}
    eventually("both are missed", lambda: away.names() == ["encoder", "decoder"], 60)
    assert [node.state for node in away.nodes("m")] == ["loading", "loading"]
    meta = json.loads(answer_to(decoder, to_decode(api))["META"][2][0][0])
    assert (meta["event"], meta["error"]) == ("failed", f"[OVERLOADED] {NO_ANSWER}")
    answer_to(decoder, to_decode(api, 0))  # what needs no service passes
    with StageServer(api, site.new_stages(), site.server.port):
        eventually("it is back", lambda: away.names() == [], 60)
        answer_to(encoder, to_encode(api))


def test_a_worker_waits_for_its_service_to_start(
    api: FakeTriton, site: Site, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = site.worker(service=f"127.0.0.1:{port}", service_timeout_s=0.1)
    sleep, tries = asyncio.sleep, []

    async def sleep_or_start(seconds: float) -> None:
        """The service starts once it was asked in vain for longer than edits would wait."""
        if call_tries._WAIT_S <= seconds <= call_tries._MOST_WAIT_S:
            tries.append(seconds)
            if len(tries) == 5:
                opened.enter_context(StageServer(api, site.new_stages(), port))
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep_or_start)
    encoder = site.open(ForwardedEncoder, config)
    assert len(tries) >= 5
    answer_to(encoder, to_encode(api))


def test_requests_go_to_the_replica_with_the_fewest(api: FakeTriton, site: Site) -> None:
    servers = [site.server, site.new_server(), site.new_server()]
    names = ", ".join(server.url for server in servers)
    encoder = site.open(ForwardedEncoder, site.worker(service=names))
    models = [server.models["encoder"] for server in servers]
    busy = models[fresh_rng().integers(3)]
    busy.idle.clear()
    requests = [to_encode(api) for _ in range(12)]
    answered = [request.sender.finished for request in requests]
    for count, request in enumerate(requests, 1):
        encoder.execute([request])
        eventually(
            "it is answered, or at the busy one",
            lambda n=count: sum(e.is_set() for e in answered) + len(busy.pending) == n,
        )
    assert len(busy.pending) == 1
    for model in models:
        model.idle.clear()
    shares = []
    for count in range(2, 10):
        encoder.execute([to_encode(api)])
        eventually("it has come", lambda n=count: sum(len(m.pending) for m in models) == n)
        shares.append(sorted(len(model.pending) for model in models))
    assert shares[1::3] == [[n, n, n] for n in (1, 2, 3)]
    for model in models:
        model.idle.set()


@pytest.mark.parametrize("how", ["killed", "deaf"])
def test_a_replica_that_ends_loses_no_request(api: FakeTriton, site: Site, how: str) -> None:
    """At any moment: the other answers with the same bytes, long before a service is given up."""
    rng = fresh_rng()
    other = site.new_server()
    config = site.worker(service=f"{site.server.url},{other.url}")
    opened = {"encoder": ForwardedEncoder, "decoder": ForwardedDecoder}
    stages = {name: site.open(kind, config) for name, kind in opened.items()}
    makers = {"encoder": to_encode, "decoder": to_decode}
    names = [str(rng.choice(list(stages))) for _ in range(40)]
    requests = [makers[name](api) for name in names]
    expected = [
        answer_to(site.local_stages[name], again(api, request))
        for name, request in zip(names, requests, strict=True)
    ]
    for model in site.server.models.values():
        model.idle.clear()
    end_at = int(rng.integers(4, 36))
    for number, (name, request) in enumerate(zip(names, requests, strict=True)):
        stages[name].execute([request])
        if number == end_at:
            models = site.server.models.values()
            eventually("it has requests", lambda m=models: any(model.pending for model in m))
            site.server.kill() if how == "killed" else site.server.fall_silent()
    answers = [tensors_of(request) for request in requests]
    for answer in (*answers, *expected):
        answer.pop("ENCODED", None)  # it says how many shared a call
    assert answers == expected
    assert StageOutages(config).names() == []


def test_a_request_that_ends_its_replicas_is_given_up(
    api: FakeTriton, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went round all, again and again, until the service was given up."""
    servers = [site.server, site.new_server(), site.new_server()]
    names = ",".join(server.url for server in servers)
    encoder = site.open(ForwardedEncoder, site.worker(service=names))
    ended: list[str] = []

    async def ends(replica: StageReplica, request: bytes, limit_s: float) -> bytes:
        ended.append(replica.address)
        raise Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    monkeypatch.setattr(StageReplica, "infer", ends)
    request = to_encode(api)
    encoder.execute([request])
    error = request.sender.wait(20).error().message()
    assert error == "[ENGINE_FAILED] encoder: its stage replica failed the call"
    assert len(set(ended)) == len(ended) == 2


def test_a_replica_away_is_told_and_found_again(api: FakeTriton, site: Site) -> None:
    other = site.new_server()
    config = site.worker(service=f"{site.server.url},{other.url}", service_timeout_s=0.2)
    encoder, away = site.open(ForwardedEncoder, config), StageOutages(config)

    def states() -> dict[str, str]:
        return {node.name: node.state for node in away.services()}

    assert states() == {site.server.url: "ready", other.url: "ready"}
    other.kill()
    missed = {site.server.url: "ready", other.url: "loading"}  # a busy machine can miss both once
    eventually("it alone is missed", lambda: (states(), away.names()) == (missed, []), 60)
    answer_to(encoder, to_encode(api))
    with StageServer(api, site.new_stages(), other.port) as same:
        eventually("it is back", lambda: states()[other.url] == "ready", 60)
        model = site.server.models["encoder"]
        model.idle.clear()
        requests = [to_encode(api) for _ in range(6)]
        encoder.execute(requests)
        eventually("both have some", lambda: model.pending and same.models["encoder"].has_begun)
        model.idle.set()
        for request in requests:
            tensors_of(request)


def test_a_replica_of_another_model_is_refused_and_the_others_go_on(
    api: FakeTriton, site: Site, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    monkey = opened.enter_context(pytest.MonkeyPatch.context())
    monkey.setattr(replicas, "_POLL_S", 60.0)  # a replica that misses two polls gets no requests
    foreign = site.new_server()
    monkey.setattr(foreign.models["encoder"], "_stage", Foreign(api))
    empty = opened.enter_context(StageServer(api, {}))
    addresses = [foreign.url, empty.url, site.server.url]
    config = site.worker(service=",".join(addresses))
    encoder = site.open(ForwardedEncoder, config)
    for _ in range(5):
        request = to_encode(api)
        expected = answer_to(site.local_stages["encoder"], again(api, request))
        assert answer_to(encoder, request) == expected
    states = {node.name: node.state for node in StageOutages(config).services()}
    assert states == {foreign.url: "failed", empty.url: "failed", site.server.url: "ready"}
    problems = (f"{foreign.url} is left out: has the enc", f"{empty.url} is left out: has no enc")
    assert [caplog.text.count(text) for text in problems] == [1, 1]
    with pytest.raises(ConfigError, match=rf"{foreign.url} has the .*; {empty.url} has no encoder"):
        site.open(ForwardedEncoder, site.worker(service=",".join(addresses[:2])))


def test_replicas_behind_a_name_are_found_anew(
    api: FakeTriton, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of one port, as pods have it."""
    port, hosts, tries = site.server.port, ["127.0.0.1"], itertools.count()

    def addresses_of(host: str, port: int, **more: Any) -> Any:
        assert host == "stages"
        if next(tries) < 3:
            raise OSError("no such name yet")
        return [(None, None, None, "", (address, port)) for address in hosts]

    monkeypatch.setattr("socket.getaddrinfo", addresses_of)
    monkeypatch.setattr(replicas, "_RESOLVE_S", 0.01)
    config = site.worker(service=f"dns:stages:{port}")
    encoder, away = site.open(ForwardedEncoder, config), StageOutages(config)
    answer_to(encoder, to_encode(api))
    with StageServer(api, site.new_stages(), port, "127.0.0.2") as other:
        hosts[:] = ["127.0.0.2"]
        eventually("it is found", lambda: [n.name for n in away.services()] == [other.url])
        request = to_encode(api)
        answer_to(encoder, request)
        assert other.models["encoder"].has_begun


def test_a_service_of_another_model_is_refused(api: FakeTriton, site: Site) -> None:
    problem = f"[stages] service: {site.server.url} has the encoder and decoder of another model"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        site.open(ForwardedEncoder, site.worker(), "of others")
    decoder = site.open(ForwardedDecoder, site.worker(), "of others")
    meta = json.loads(answer_to(decoder, to_decode(api))["META"][2][0][0])
    assert "of another model" in meta["error"]


def test_a_server_without_the_models_is_refused(api: FakeTriton, site: Site) -> None:
    error_pattern = r"\[stages\] service: .* has no encoder"
    with StageServer(api, {}) as none, pytest.raises(ConfigError, match=error_pattern):
        site.open(ForwardedEncoder, site.worker(service=none.url))


def test_what_is_under_way_as_the_worker_ends_is_answered(api: FakeTriton, site: Site) -> None:
    encoder = site.open(ForwardedEncoder, site.worker())
    site.server.models["encoder"].idle.clear()
    requests = [to_encode(api) for _ in range(20)]
    encoder.execute(requests)
    encoder.close()
    assert {request.sender.wait().error().message() for request in requests} == {
        "[OVERLOADED] the worker is stopping"
    }
