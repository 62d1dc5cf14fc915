"""Protection of the page: scripts of other sites can neither call it nor read its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maskserve_common.sites import foreign_site

_UPLOADS = "/gradio_api/upload"
"""Gradio stores uploads at this path from anybody. The page does not use it: pictures come in calls
that are counted."""


class SameOrigin:
    """An ASGI application that filters requests for another application.

    A browser sends the calling script's site as `Origin` and the requested name as `Host`. A
    request with a foreign one gets 403. CORS headers are removed: Gradio's own allow every origin,
    with cookies.

    Args:
        app: the page.
        most_bytes: most bytes of a request's body.
        names: accepted host names, as `maskserve_common.sites.has_name`.
    """

    def __init__(self, app: Any, most_bytes: int, names: Sequence[str] = ()) -> None:
        self._app, self._most, self._names = app, most_bytes, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        text_headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()
        }
        if foreign := foreign_site(text_headers, self._names):
            hint = " (maskserve web --name NAME adds one)" if foreign.startswith("Host") else ""
            refusal = f"{foreign}; the page answers its own origin alone{hint}."
            await _refuse(scope, send, 403, refusal.encode("ascii", "replace"))
            return
        if scope["path"].rstrip("/").endswith(_UPLOADS):
            await _refuse(scope, send, 404, b"Nothing is uploaded here.")
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most:
            await _refuse(scope, send, 413, b"The request is too large.")
            return
        remaining_bytes = self._most

        async def bounded() -> Any:
            nonlocal remaining_bytes
            message = await receive()
            remaining_bytes -= len(message.get("body", b""))
            # A body that grows beyond the bound looks like a disconnect to the application.
            return message if remaining_bytes >= 0 else {"type": "http.disconnect"}

        async def plain(message: Any) -> None:
            if message["type"] == "http.response.start":
                allowed_headers = [
                    (name, value)
                    for name, value in message.get("headers", ())
                    if not name.lower().startswith(b"access-control-")
                ]
                message = {**message, "headers": allowed_headers}
            await send(message)

        await self._app(scope, bounded, plain)


async def _refuse(scope: Any, send: Any, status: int, body: bytes) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
