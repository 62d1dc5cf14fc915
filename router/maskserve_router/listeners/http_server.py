"""HTTP listeners: uvicorn, with limits on each connection."""

from __future__ import annotations

import asyncio
import math
import socket
from asyncio import Protocol, Transport
from asyncio.events import TimerHandle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import uvicorn
from starlette.applications import Starlette

from maskserve_common import transport
from maskserve_common.errors import MaskserveError
from maskserve_router.api.half_close import HalfClose
from maskserve_router.config import Http
from maskserve_router.listeners.certificates import Certificates
from maskserve_router.listeners.connection_limits import Places
from maskserve_router.listeners.http_offers import OfferlessParser
from maskserve_router.messages.failures import RetryLater
from maskserve_router.metrics import Metrics

_PATIENCE_S = 30.0
"""Seconds for which a client may read nothing of an answer."""
_LAST_ANSWERS_S = 5
"""Seconds to finish answers while the listener closes."""
_ACCEPTED_AT_ONCE = 128
"""Listen backlog, which asyncio accepts at once; each is a descriptor before it can be ended."""
_TCP_KEEPALIVE = {
    socket.TCP_KEEPIDLE: transport.PING_MS // 1000,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 6,
}
"""Keep-alive probes, so that no device in between drops a connection while an edit runs."""
_MAX_PIPELINED = 32
"""Most requests that wait behind one under way; few clients pipeline any."""


class BoundedProtocol(HalfClose):
    """uvicorn's protocol with limits on a connection (ADR 0013).

    It ends a connection with slow or long headers, long trailers, a body of too many chunks, or too
    many pipelined bytes or requests. Each connection has a place and is silent between requests.
    uvicorn makes one object per connection; `bounded_protocol` gives a listener's class its limits.
    """

    bounds: ClassVar[Http]
    places: ClassVar[Places]
    _timer: TimerHandle | None = None
    _head_bytes = 0
    """Bytes of the request line, headers and trailers of the present message."""
    _unparsed_bytes = 0
    """Bytes since the parser last completed a part: it keeps incomplete ones."""
    _pipelined_bytes = 0
    """Bytes received since a request came while another is under way."""
    _chunks = 0
    _unread: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = OfferlessParser(self)  # type: ignore[assignment]
        self._expect_headers()
        try:
            self.places.take(self, self.client[0] if self.client else "")
        except RetryLater as reason:
            self.end(reason)

    def end(self, reason: MaskserveError) -> None:
        """End the connection: others need its place."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._on_headers()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self.places.mark(self, silent=True)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.timeout_keep_alive_task is not None:
            self._expect_headers()
        self._unparsed_bytes += len(data)
        self._pipelined_bytes = self._pipelined_bytes + len(data) if self.pipeline else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unparsed_bytes > self.bounds.max_header_bytes:
            self.send_400_response("The headers are too long.")
        elif self._pipelined_bytes > self.bounds.max_header_bytes:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._watch_unread()

    def _watch_unread(self) -> None:
        """Check repeatedly that the client reads, until little is left to write."""
        unsent_bytes = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(_PATIENCE_S, self._look_at_unread, unsent_bytes)

    def _look_at_unread(self, before: int) -> None:
        self._unread = None
        if self.transport.is_closing() or not self.flow.write_paused:
            return
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_unread()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests wait behind one")  # the parser stops
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._head_bytes += size
        if self._head_bytes > self.bounds.max_header_bytes:
            raise ValueError("too long")  # the parser stops, and uvicorn answers 400

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._check_head()
        self._on_headers()
        self.places.mark(self, silent=False)
        self._chunks = 0
        super().on_headers_complete()

    def _check_head(self) -> None:
        """Refuse heads that the parser accepts but other servers read differently.

        Raises ValueError, so that the parser stops (RFC 9112, sections 2.3, 3.2 and 6.1).
        """
        version = self.parser.get_http_version()
        values: dict[bytes, list[bytes]] = {b"host": [], b"transfer-encoding": []}
        for name, value in self.headers:
            if name in values:
                values[name].append(value.strip().lower())
        hosts, codings = values.values()
        if version not in ("1.0", "1.1"):
            raise ValueError(f"HTTP/{version}")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise ValueError("not one Host")
        if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            raise ValueError("another Transfer-Encoding than chunked")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        self._chunks += 1
        if self._chunks > self.bounds.max_chunks:
            if not self.transport.is_closing():
                self.send_400_response("The body has too many chunks.")
            return
        super().on_body(body)

    def _expect_headers(self) -> None:
        self._timer = self.loop.call_later(self.bounds.header_timeout_s, self._too_slow)

    def _on_headers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def bounded_protocol(bounds: Http, places: Places) -> type[Protocol]:
    """Return the protocol of one listener."""
    return type("ListenerProtocol", (BoundedProtocol,), {"bounds": bounds, "places": places})


class HttpServer(uvicorn.Server):
    """One listener, run inside the router's event loop.

    Args:
        app: application to serve.
        bounds: limits on a connection.
        most: most connections. Beyond, the longest silent one is closed, of the address that has
            the most.
        metrics: counts closed connections.
        host: address to listen at.
        port: port; 0 takes a free one.
        certificates: certificate for TLS; None: plain HTTP.
    """

    def __init__(
        self,
        app: Starlette,
        bounds: Http,
        most: int,
        metrics: Metrics,
        host: str,
        port: int,
        certificates: Certificates | None = None,
    ) -> None:
        files = certificates.files if certificates is not None else ()
        places = Places("connections", most, bounds.keep_alive_s, metrics, per_key=True)
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(bounds, places),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=math.ceil(bounds.keep_alive_s),
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
                backlog=_ACCEPTED_AT_ONCE,
                ssl_certfile=files[0] if files else None,
                ssl_keyfile=files[1] if files else None,
            )
        )
        self.config.load()
        if certificates is not None and self.config.ssl is not None:
            certificates.apply_to(self.config.ssl)
        self._host, self._address = host, (host, port)
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the router."""
        yield

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OSError: the port is not available.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server(self._address, family=family, backlog=_ACCEPTED_AT_ONCE)
        # Connections inherit it. asyncio sets it only on sockets that name their protocol. Without
        # it, an answer's body waits for the client's acknowledgement of its headers.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_KEEPALIVE.items():
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._task = asyncio.create_task(self.serve([self._socket]))
        while not self.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Close the listener and idle connections; wait for answers under way."""
        self.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
