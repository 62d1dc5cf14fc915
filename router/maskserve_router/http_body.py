"""Bodies of HTTP requests, read within bounds on their size and pace."""

from __future__ import annotations

import asyncio
import time
import zlib
from contextlib import ExitStack

from starlette.requests import Request

from maskserve_core.errors import InvalidRequest
from maskserve_router.admission import Admission
from maskserve_router.config import Http
from maskserve_router.keys import KeyHolder

_PATIENCE_S = 10.0
_ACCEPTED_ENCODINGS = ("", "identity", "gzip", "deflate")


async def read_body(
    request: Request, bounds: Http, admission: Admission, client: KeyHolder, held: ExitStack
) -> bytes:
    """The request's body, held against the client's bytes under way until `held` is closed.

    Its content type is not looked at: clients send JSON as forms. Every part brings as much time
    as it may take at the least pace, and no more than `_PATIENCE_S` of it is saved up: a body that
    came fast at first cannot stand still for long behind that.

    Raises:
        InvalidRequest: too long, or too slow.
        RetryLater: too many bytes are under way.
    """
    encoding = request.headers.get("content-encoding", "").lower()
    if encoding not in _ACCEPTED_ENCODINGS:
        raise InvalidRequest("Content-Encoding", f"is {encoding[:20]}", "gzip, deflate or none")
    most, pace = bounds.max_body_bytes, max(bounds.min_bytes_per_s, 1)
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise InvalidRequest("body", f"is {told} bytes", f"up to {most}")
    parts: list[bytes] = []
    size, left_s = 0, _PATIENCE_S
    stream = aiter(request.stream())
    while True:
        began = time.monotonic()
        try:
            part = await asyncio.wait_for(anext(stream), max(left_s, 0.0))
        except StopAsyncIteration:
            break
        except (TimeoutError, asyncio.TimeoutError):
            raise InvalidRequest(
                "body", f"came too slowly: {size} bytes", "a body sent without pauses"
            ) from None
        left_s -= time.monotonic() - began
        left_s = min(left_s + len(part) / pace, _PATIENCE_S)
        size += len(part)
        if size > most:
            raise InvalidRequest("body", f"is over {most} bytes", f"up to {most}")
        held.enter_context(admission.hold(client, len(part)))
        parts.append(part)
    body = b"".join(parts)
    return _inflated(body, most) if encoding in ("gzip", "deflate") else body


def _inflated(body: bytes, most: int) -> bytes:
    inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip and zlib, by their headers
    try:
        plain = inflater.decompress(body, most)
    except zlib.error:
        raise InvalidRequest("body", "is not compressed as Content-Encoding says") from None
    if inflater.unconsumed_tail or not inflater.eof:
        raise InvalidRequest("body", f"is cut short, or over {most} bytes when decompressed")
    return plain
