"""Bodies of HTTP requests, read within limits on size and rate."""

from __future__ import annotations

import asyncio
import io
import time
import zlib
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from starlette.requests import Request

from maskserve_common.errors import InvalidRequest
from maskserve_router.config import Http
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.scheduling.admission import Admission

_PATIENCE_S = 10.0
_ACCEPTED_ENCODINGS = ("", "identity", "gzip", "deflate")
_INFLATED_AT_A_TIME = 2**20
_INFLATED_FREELY, _MOST_INFLATION = 4 * 2**20, 100
"""Bytes that any body may inflate to, and the most inflation of larger ones. Pictures in JSON
inflate 1.3 times, numbers as text about five times. Larger ratios are attacks."""


class Bodies:
    """Reads the bodies of one router's requests.

    Args:
        bounds: limits on one body.
        admission: counts bytes in memory.
        fair_share: threads that inflate.
    """

    def __init__(self, bounds: Http, admission: Admission, fair_share: FairShare) -> None:
        self._bounds, self._admission, self._fair_share = bounds, admission, fair_share

    async def read(self, request: Request, client: KeyHolder, resources: ExitStack) -> bytes:
        """Read and inflate the request's body, and count its bytes until `resources` is closed.

        The content type is ignored: some clients send JSON as a form.

        Raises:
            InvalidRequest: too long, or too slow.
            RetryLater: too many bytes are under way.
        """
        encoding = request.headers.get("content-encoding", "").lower()
        if encoding not in _ACCEPTED_ENCODINGS:
            raise InvalidRequest("Content-Encoding", f"is {encoding[:20]}", "gzip, deflate or none")
        most, declared_length = (
            self._bounds.max_body_bytes,
            request.headers.get("content-length", ""),
        )
        if declared_length.isdigit() and int(declared_length) > most:
            raise InvalidRequest("body", f"is {declared_length} bytes", f"up to {most}")
        parts = self._chunks(request)
        if encoding in ("gzip", "deflate"):
            parts = self._inflated(parts, client)
        await self._fair_share.may_read(client)
        body = io.BytesIO()  # returns its content without a copy
        size = 0
        async with aclosing(parts):
            async for part in parts:
                size += len(part)
                if size > most:
                    raise InvalidRequest("body", f"is over {most} bytes", f"up to {most}")
                resources.enter_context(self._admission.hold(client, len(part)))
                body.write(part)
        return body.getvalue()

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the body's parts as the client sends them.

        Each part adds the time that it may take at the least rate, up to `_PATIENCE_S`, so that a
        body that begins fast cannot pause for long.
        """
        pace, left_s, size = max(self._bounds.min_bytes_per_s, 1), _PATIENCE_S, 0
        stream = aiter(request.stream())
        while True:
            began = time.monotonic()
            try:
                part = await asyncio.wait_for(anext(stream), max(left_s, 0.0))
            except StopAsyncIteration:
                return
            except (TimeoutError, asyncio.TimeoutError):
                raise InvalidRequest(
                    "body", f"came too slowly: {size} bytes", "a body sent without pauses"
                ) from None
            left_s -= time.monotonic() - began
            left_s = min(left_s + len(part) / pace, _PATIENCE_S)
            size += len(part)
            yield part

    async def _inflated(
        self, chunks: AsyncGenerator[bytes, None], client: KeyHolder
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts inflated in small pieces: a kilobyte may hold a megabyte."""
        inflater = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip and zlib, by their headers
        received_bytes = inflated_bytes = 0
        async for part in chunks:
            received_bytes += len(part)
            while part and not inflater.eof:
                try:
                    plain = await self._fair_share.run(
                        client, _INFLATED_AT_A_TIME, inflater.decompress, part, _INFLATED_AT_A_TIME
                    )
                except zlib.error:
                    problem = "is not compressed as Content-Encoding says"
                    raise InvalidRequest("body", problem) from None
                inflated_bytes += len(plain)
                part = inflater.unconsumed_tail
                read = received_bytes - len(part)
                if inflated_bytes > max(_INFLATED_FREELY, _MOST_INFLATION * read):
                    problem = f"becomes over {inflated_bytes - 1} bytes from {read}"
                    raise InvalidRequest(
                        "body", problem, f"up to {_MOST_INFLATION} times what is sent"
                    )
                yield plain
        if not inflater.eof:
            raise InvalidRequest("body", "is cut short")
