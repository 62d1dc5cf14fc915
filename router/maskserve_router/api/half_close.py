"""HTTP clients that shut their sending side once they have asked.

To the server that looks as if they had left: both send FIN. Only a write tells them apart. Who has
left answers it with RST, and who still reads skips an interim response (RFC 9110, section 15.2).
"""

from __future__ import annotations

import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HALF_CLOSED = "half closed"
"""In a request's state: its client has shut its sending side, or has left. An answer that has begun
tells which by what is written of it, so that it should not be silent."""
_LOOK_S = 0.05
_LOOKS_PER_WRITE = 20


class HalfClose(HttpToolsProtocol):
    """Uvicorn's protocol, which answers what a half-closed connection has asked.

    Over TLS asyncio knows no half-closed connections: there the client has left. Who asks by
    HTTP/1.0 gets no interim response, so that nobody notices if it leaves.
    """

    _half_closed = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open."""
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
        """See whether the client still reads, until it is answered."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        # Not into another answer, nor behind the beginning of this one, which is a write itself.
        first = not self.pipeline and not self.cycle.response_started
        if looks % _LOOKS_PER_WRITE == 0 and first and self.scope["http_version"] == "1.1":
            self.transport.write(_INTERIM)
        self.loop.call_later(_LOOK_S, self._look, looks + 1)
