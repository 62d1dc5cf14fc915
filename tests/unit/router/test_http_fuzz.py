"""The HTTP listener beside h11, an independent parser: what each takes for requests in the same
bytes, sent over sockets. A body that one of them takes for a request is a hole in whatever stands
between clients and the router.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import h11
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from maskserve_router.config import Http
from maskserve_router.listeners.http_server import HttpServer
from maskserve_router.metrics import Metrics
from tests.support.draws import fresh_seed
from tests.support.examples import number

MESSAGES = 10_000
AT_ONCE = 16
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: hidden\r\n\r\n"
JAVA = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n"
)
METHODS = ["POST"] * 6 + ["GET", "GET", "PUT", "DELETE", "OPTIONS", "HEAD"]
TARGETS = ["/a", "/b?x=1", "/c%20d", "/", "//x", "http://h/x"]
LENGTHS = [
    "{0}",
    "0{0}",
    "+{0}",
    "-{0}",
    "{0}, {0}",
    "{0},{0}",
    "{0} 1",
    "{1}",
    "{2}",
    "0x{0:x}",
    "{0}\t",
    " ",
    "1e1",
    "99999999999999999999999",
    "{0}\r\nContent-Length: {0}",
    "{0}\r\nContent-Length: {1}",
]
CODINGS = [
    "chunked",
    "Chunked",
    "chunked, identity",
    "identity",
    "identity, chunked",
    "gzip, chunked",
    "xchunked",
    "chunked\x0b",
    "\tchunked",
    "chunked\r\nTransfer-Encoding: chunked",
    "chunked\r\nTransfer-Encoding: identity",
    "\r\n chunked",
]
OTHERS = [
    "Connection: close",
    "Connection: keep-alive",
    "Upgrade: h2c",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Connection: upgrade, close\r\nUpgrade: h2c",
    "Connection: X, Upgrade , y\r\nUpgrade: h2c, foo/2",
    "Expect: 100-continue",
    "Host: second",
    "Name : value",
    "Na me: value",
    ": value",
    "Name",
    "Name: folded\r\n line",
    "Name: \x01",
    "Name: a\x00b",
    "Name: \x7f",
    "Trailer: Content-Length",
]


class ReadRequest(NamedTuple):
    """A request as it was read."""

    method: str
    target: str
    body: bytes


def message(rng: random.Random) -> bytes:
    """One request, right or wrong in some places."""
    wrong = rng.random() < 0.5
    body = rng.choice([b"", b"hello", HIDDEN, HIDDEN, b"0\r\n\r\n" + HIDDEN, bytes(40)])
    line = f"{rng.choice(METHODS)} {rng.choice(TARGETS)} HTTP/1.1"
    if wrong and rng.random() < 0.2:
        line = rng.choice(
            [
                line.replace("1.1", "1.0"),
                line.replace("HTTP/1.1", "HTTP/2.0"),
                line.replace(" HTTP", "  HTTP"),
                line.replace("HTTP/1.1", ""),
                "CONNECT h:1 HTTP/1.1",
                "PRI * HTTP/2.0",
                " " + line,
                "\r\n" + line,
                line + " ",
            ]
        )
    headers = [b"Host: x"] if rng.random() < 0.95 else []
    if rng.random() < 0.3:
        headers.append(JAVA[:-2])
    chunked = rng.random() < 0.4
    if chunked:
        coding = rng.choice(CODINGS) if wrong and rng.random() < 0.4 else "chunked"
        headers.append(f"Transfer-Encoding: {coding}".encode())
        content = b"".join(chunks(rng, body, wrong))
    else:
        length = rng.choice(LENGTHS) if wrong and rng.random() < 0.4 else "{0}"
        size = len(body)
        headers.append(
            f"Content-Length: {length.format(size, size + 7, max(size - 3, 0))}".encode()
        )
        content = body
    if wrong and rng.random() < 0.2:  # both
        headers.append(b"Content-Length: 5" if chunked else b"Transfer-Encoding: chunked")
    headers += [
        header.encode("latin-1") for header in OTHERS if rng.random() < (0.05 if wrong else 0)
    ]
    rng.shuffle(headers)
    end = b"\n" if wrong and rng.random() < 0.1 else b"\r\n"
    return end.join((line.encode(), *headers, b"", b"")) + content


def chunks(rng: random.Random, body: bytes, wrong: bool) -> list[bytes]:
    parts, at = [], 0
    while at < len(body):
        step = rng.randint(1, len(body) - at)
        size = rng.choice([f"{step:x}", f"{step:X}", f"0{step:x}"])
        if wrong and rng.random() < 0.1:
            size = rng.choice(
                [f"+{step:x}", f"{step:x} ", f"0x{step:x}", f"{step + 1:x}", "", "-1"]
            )
        if rng.random() < 0.1:
            size += rng.choice([";a=b", ";a", ';a="b"', ";\x01"] if wrong else [";a=b"])
        end = rng.choice([b"\n", b"", b"\r"]) if wrong and rng.random() < 0.05 else b"\r\n"
        parts += [size.encode(), b"\r\n", body[at : at + step], end]
        at += step
    last = rng.choice([b"0\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nX: y\r\n\r\n"])
    return [*parts, b"0\r\n\r\n" if rng.random() < 0.7 else last]


def conversation(rng: random.Random) -> tuple[bytes, bool]:
    """The bytes that a client sends on one connection, and whether one of them was changed on the
    way: a body may be none then.
    """
    raw = b"".join(message(rng) for _ in range(rng.randint(1, 3)))
    if changed := rng.random() < 0.25:
        at = rng.randrange(len(raw))
        raw = rng.choice(
            [
                raw[:at],
                raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
                raw[:at] + raw[at + 1 :],
                raw[:at] + rng.choice([b"\r", b"\n", b"\0", b" ", b"\t"]) + raw[at:],
            ]
        )
    return raw, changed


def by_h11(raw: bytes) -> tuple[list[ReadRequest], bool]:
    """The requests that h11 takes, whole, and whether it refuses what is behind them."""
    connection, requests = h11.Connection(h11.SERVER), list[ReadRequest]()
    connection.receive_data(raw)
    request, body = None, b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return requests, True
        match event:
            case h11.Request():
                if event.method == b"CONNECT":
                    return requests, True
                request, body = event, b""
            case h11.Data():
                body += bytes(event.data)
            case h11.EndOfMessage():
                assert request is not None
                requests.append(
                    ReadRequest(request.method.decode(), request.target.decode("latin-1"), body)
                )
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return requests, False
                connection.start_next_cycle()
            case _:
                return requests, event is h11.PAUSED


class Listener:
    """The router's listener before an application that writes down what it is asked."""

    def __init__(self) -> None:
        self.requests: dict[int, list[ReadRequest]] = {}
        """By the client's port."""
        self.port = 0

    async def read(self, request: Request) -> Response:
        assert request.client is not None
        with suppress(ClientDisconnect):
            body = await request.body()
            target = request.scope["raw_path"].decode("latin-1")
            if query := request.scope["query_string"]:
                target += "?" + query.decode("latin-1")
            self.requests.setdefault(request.client.port, []).append(
                ReadRequest(request.method, target, body)
            )
        return Response()

    async def exchange(self, raw: bytes, rng: random.Random) -> tuple[list[ReadRequest], bytes]:
        """Send bytes in pieces; return the requests that the listener takes, and its answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client_port = int(writer.get_extra_info("sockname")[1])
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randint(0, 3)))
        answer = b""
        with suppress(OSError):  # it may have ended the connection
            for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
                writer.write(raw[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
        with suppress(OSError):
            while part := await asyncio.wait_for(reader.read(2**16), 20.0):
                answer += part
        writer.close()
        return self.requests.pop(client_port, []), answer


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    listener = Listener()
    methods = sorted({*METHODS, "CONNECT", "PRI"})
    routes = [Route("/{rest:path}", listener.read, methods=methods)]
    app = Starlette(routes=routes)
    server = HttpServer(app, Http(), 256, Metrics(), "127.0.0.1", 0)
    await server.start()
    listener.port = server.port
    try:
        yield listener
    finally:
        await server.stop()


def path_of(target: str) -> str:
    """Return a target in absolute form, of any scheme, without its scheme and host."""
    return re.sub(r"^[a-z]+://h(?=/|$)", "", target)


async def test_java_gets_one_answer_to_its_body():
    async with listening() as listener:
        head = b"POST /a HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
        for offer in (b"", JAVA, b"Connection: upgrade\r\nUpgrade: websocket\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            client_port = writer.get_extra_info("sockname")[1]
            writer.write(head % (offer, len(HIDDEN)))
            await asyncio.sleep(0.05)  # the body comes a moment later
            writer.write(HIDDEN[:7])
            await asyncio.sleep(0.05)
            writer.write(HIDDEN[7:] + head % (offer, 2) + b"hi")
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 10.0)
            writer.close()
            assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 2
            assert listener.requests[client_port] == [
                ReadRequest("POST", "/a", HIDDEN),
                ReadRequest("POST", "/a", b"hi"),
            ]


@pytest.mark.parametrize("ask", ["CONNECT h:1 HTTP/1.1\r\nHost: x", "PRI * HTTP/2.0\r\n\r\nSM"])
async def test_tunnels_and_other_versions_are_refused(ask: str):
    async with listening() as listener:
        requests, answer = await listener.exchange(
            f"{ask}\r\n\r\n".encode() + HIDDEN, random.Random(0)
        )
        assert not requests
        assert answer[:12] in (b"HTTP/1.1 400", b"")  # or its end was faster


async def test_the_same_requests_are_in_the_same_bytes():
    rng = random.Random(fresh_seed())
    raws = [conversation(rng) for _ in range(number(MESSAGES // 2))]
    places = asyncio.Semaphore(AT_ONCE)
    mismatches: list[str] = []
    shared_count = 0

    async def compare(raw: bytes, changed: bool, dice: random.Random) -> None:
        nonlocal shared_count
        async with places:
            requests, answer = await listener.exchange(raw, dice)
        h11_requests, refused = by_h11(raw)
        server_requests = [request._replace(target=path_of(request.target)) for request in requests]
        h11_requests = [
            request._replace(target=path_of(request.target)) for request in h11_requests
        ]
        shared = min(len(server_requests), len(h11_requests))
        shared_count += shared
        if server_requests[:shared] != h11_requests[:shared] or (
            len(server_requests) > shared and not refused
        ):
            mismatches.append(
                f"{raw!r}\n  ours {server_requests}\n  h11 {h11_requests}, refused {refused}"
            )
        if not changed and any(request.target == "/hidden" for request in server_requests):
            mismatches.append(
                f"{raw!r}\n  a body is a request: {server_requests}\n  h11 {h11_requests}"
            )
        if b" 500 " in answer:
            mismatches.append(f"{raw!r}\n  {answer!r}")

    async with listening() as listener:
        seeds = [random.Random(rng.random()) for _ in raws]
        await asyncio.gather(
            *(compare(*raw, piece_rng) for raw, piece_rng in zip(raws, seeds, strict=True))
        )
    assert not mismatches, f"{len(mismatches)} of {len(raws)}:\n" + "\n".join(mismatches[:5])
    assert shared_count > len(raws) / 4
