"""HTTP clients that shut their sending side after the request.

To the server this looks like a client that has left: both send FIN. Only a write tells them apart.
A client that has left answers it with RST; a client that still reads skips an interim response (RFC
9110, section 15.2).
"""

from __future__ import annotations

import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HALF_CLOSED = "half closed"
"""Key of a request's state, set if its client has shut its sending side or has left. Once an answer
has begun, only writing tells which, so a stream must not stay silent."""
_POLL_S = 0.05
_LOOKS_PER_WRITE = 20


class HalfClose(HttpToolsProtocol):
    """Uvicorn's protocol, extended to answer requests of half-closed connections.

    Over TLS, asyncio has no half-closed connections: the client has left. HTTP/1.0 has no interim
    responses, so the server does not notice that such a client leaves.
    """

    _half_closed = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection open."""
        if self._half_closed:
            return True
        last = self.cycle
        if last is None or last.response_complete or last.more_body or self.scheme == "https":
            return False
        self._half_closed = True
        last.scope["state"][HALF_CLOSED] = True
        last.keep_alive = False
        self._look(0)
        return True

    def _look(self, looks: int) -> None:
        """Check repeatedly whether the client still reads, until it is answered."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        # Not into another answer, nor after the beginning of this one, which is a write itself.
        first = not self.pipeline and not self.cycle.response_started
        if looks % _LOOKS_PER_WRITE == 0 and first and self.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        self.loop.call_later(_POLL_S, self._look, looks + 1)
