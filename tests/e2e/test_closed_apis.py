"""Closed APIs stay closed: to a user of the host, whatever it reads and sends, and to pages."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from maskserve_common.config import Config
from maskserve_serving import command, ports, runtime
from maskserve_serving.options import CLOSED_APIS, ServeOptions, default_cache_dir
from maskserve_serving.worker import WorkerProcess
from tests.support.eventually import eventually

CALLS = {
    "shared-memory": ("GET /v2/systemsharedmemory/status", "SystemSharedMemoryStatus"),
    "model-repository": ("POST /v2/repository/index", "RepositoryIndex"),
    "logging": ("GET /v2/logging", "LogSettings"),
}
DATA, HEADERS, SETTINGS = 0, 1, 4


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, ports.Ports]]:
    """The process and ports of a Triton without models."""
    folder = tmp_path_factory.mktemp("repository")
    base = ports.free_base_port()
    listens = ports.Ports(base, base + 1, base + 2)
    server = runtime.find_runtime(None, default_cache_dir())
    options = ServeOptions(model="m", repositories=(folder,))
    line = command.command(options, Config(), server, listens, f"closed-{base}-")
    env = command.environment(server, folder / "config.toml", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        eventually("it listens", lambda: _listens(listens.http) and _listens(listens.grpc))
        yield process.pid, listens
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def as_nobody(*line: str) -> subprocess.CompletedProcess[bytes]:
    user = "nobody" if os.geteuid() == 0 else None
    return subprocess.run(line, user=user, capture_output=True, check=False)


def sent(port: int, message: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    """All that comes back, until it is a whole answer or ten seconds pass without more."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), 5) as client:
        client.sendall(message)
        client.settimeout(10)
        try:
            while not is_whole(received) and (more := client.recv(2**16)):
                received += more
        except TimeoutError:
            pass
    return received


def by_http(port: int, message: bytes) -> bytes:
    def is_whole(received: bytes) -> bool:
        head, end, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        return bool(end) and len(body) >= (int(length[1]) if length else 0)

    return sent(port, message, is_whole)


def by_grpc(port: int, message: bytes) -> bytes:
    """Up to the trailers, which end the call's stream."""
    return sent(
        port,
        message,
        lambda back: any(kind == HEADERS and flags & 1 for kind, flags, _ in frames(back)),
    )


def http(call: str, header: bytes = b"") -> bytes:
    return call.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + header + b"\r\n"


def grpc(call: str, *header: bytes) -> bytes:
    """A call as bytes: no library would send such headers."""

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body

    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/inference.GRPCInferenceService/{call}".encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *([header] if header else []),
    ]
    block = b""
    for name, value in fields:  # literal, never indexed
        block += b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")
    return preface + frame(HEADERS, 4, 1, block) + frame(DATA, 1, 1, bytes(5))


def test_who_reads_the_command_line_opens_nothing(triton: tuple[int, ports.Ports]) -> None:
    process, listens = triton
    if os.geteuid() == 0:
        assert as_nobody("cat", f"/proc/{process}/environ").stdout == b""
    line = as_nobody("cat", f"/proc/{process}/cmdline").stdout
    pairs = set(re.findall(rb"restricted-(?:api|protocol)=[^:\0]+:([^=\0]+)=([^\0]+)", line))
    assert len(pairs) == 1, line
    name, value = pairs.pop()
    assert CALLS.keys() == set(CLOSED_APIS)
    for path, method in CALLS.values():
        for spelling in (name, name.lower()):
            for header in (
                b"",
                spelling + b": " + value + b"\r\n",
                spelling + b":" + value + b"\r\n",
            ):
                assert by_http(listens.http, http(path, header)).startswith(b"HTTP/1.1 403")
            field = b"triton-grpc-protocol-" + spelling, value
            answer = by_grpc(listens.grpc, grpc(method, *field))
            assert not _answered(answer), answer
        assert b"This protocol is restricted" in by_grpc(listens.grpc, grpc(method))


def test_what_is_open_is_answered(triton: tuple[int, ports.Ports]) -> None:
    """The bytes of the test above are calls that Triton takes."""
    _, listens = triton
    assert by_http(listens.http, http("GET /v2/health/live")).startswith(b"HTTP/1.1 200")
    assert _answered(by_grpc(listens.grpc, grpc("ServerLive")))


def frames(back: bytes) -> Iterator[tuple[int, int, int]]:
    """Kind, flags and size of the whole frames of an HTTP/2 connection."""
    while len(back) >= 9 and len(back) >= 9 + (size := int.from_bytes(back[:3], "big")):
        yield back[3], back[4], size
        back = back[9 + size :]


def _answered(back: bytes) -> bool:
    """Whether an HTTP/2 connection carries a message."""
    return any(kind == DATA and size for kind, _, size in frames(back))


def test_a_page_that_a_browser_shows_drains_no_worker(worker: WorkerProcess) -> None:
    """Triton answers simple requests of every page; `control` does none of them."""
    operation = {"name": "OP", "datatype": "BYTES", "shape": [1], "data": ['{"op": "drain"}']}
    request = urllib.request.Request(
        f"{worker.http_url}/v2/models/control/infer",
        json.dumps({"inputs": [operation]}).encode(),
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=30)
    with refusal.value as answer:
        assert "Origin: is set, so a web page sends the request" in json.load(answer)["error"]
    assert worker.admission.state() == "open"
