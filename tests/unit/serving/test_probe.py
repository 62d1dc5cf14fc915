"""The probe and the fronts it asks: real gRPC, and a server that answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

from maskserve_serving.probe import Probe
from maskserve_triton.traffic import PROBE
from tests.support.eventually import eventually

LIMIT_S = 1.0


class Fronts(GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Both fronts of a worker."""

    def __init__(self) -> None:
        self.requests: list[pb.ModelInferRequest] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.stream_goes_on = threading.Event()
        self.stream_goes_on.set()
        self.error = ""

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.goes_on.wait(10)
        if self.error:
            context.abort(grpc.StatusCode.INTERNAL, self.error)
        return pb.ModelInferResponse()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
        self.requests += requests
        self.stream_goes_on.wait(10)
        yield pb.ModelStreamInferResponse(error_message=self.error)


@pytest.fixture
def fronts() -> Iterator[Fronts]:
    front_server = Fronts()
    yield front_server
    front_server.goes_on.set()
    front_server.stream_goes_on.set()


@pytest.fixture
def url(fronts: Fronts) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    add_GRPCInferenceServiceServicer_to_server(fronts, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def start() -> Iterator[Callable[[str], Probe]]:
    probes: list[Probe] = []

    def start(url: str) -> Probe:
        probes.append(Probe(url, LIMIT_S))
        probes[-1].start()
        return probes[-1]

    yield start
    for probe in probes:
        probe.stop()


def test_both_fronts_are_asked_and_answer(
    fronts: Fronts, url: str, start: Callable[[str], Probe]
) -> None:
    probe = start(url)
    eventually("they have answered", lambda: probe.rounds >= 2)
    assert probe.problem is None
    assert {request.model_name for request in fronts.requests} == {"edit", "edit_stream"}
    assert all(PROBE in request.parameters for request in fronts.requests)


@pytest.mark.parametrize("front", ["edit", "edit_stream"])
def test_a_front_that_does_not_answer_is_named(
    fronts: Fronts, url: str, start: Callable[[str], Probe], front: str
) -> None:
    """The other one's answers do not count for it; one that comes late does."""
    gate = fronts.goes_on if front == "edit" else fronts.stream_goes_on
    gate.clear()
    probe = start(url)
    eventually(
        "it has tried again", lambda: [r.model_name for r in fronts.requests].count(front) > 1
    )
    assert probe.rounds == 0
    assert probe.last_front == front
    gate.set()
    eventually("it answers again", lambda: probe.rounds > 0)


def test_what_a_front_says_is_wrong_is_told(
    fronts: Fronts, url: str, start: Callable[[str], Probe]
) -> None:
    fronts.error = "[ENGINE_FAILED] edits are stuck before the engine, for 9.0 s"
    probe = start(url)
    eventually("it is told", lambda: probe.problem)
    assert probe.problem == "edits are stuck before the engine, for 9.0 s"


def test_other_errors_are_answers(fronts: Fronts, url: str, start: Callable[[str], Probe]) -> None:
    fronts.error = "[OVERLOADED] the worker is stopping"
    probe = start(url)
    eventually("it is heard", lambda: probe.rounds >= 2)
    assert probe.problem is None


def test_a_port_that_refuses_tells_nothing(start: Callable[[str], Probe]) -> None:
    """As one that speaks TLS, or none: what lives there is asked over HTTP too."""
    probe = start("127.0.0.1:1")
    eventually("it goes on", lambda: probe.rounds >= 2)
    assert probe.problem is None
