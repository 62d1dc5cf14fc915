"""Answers of the HTTP listeners: messages and errors as JSON, with their status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from maskserve_core.errors import MaskserveError
from maskserve_router.failures import Failure, guarded, http_status, retry_after, text_of
from maskserve_router.json_values import values_of

JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]


def answering(handler: Handler) -> Handler:
    """`handler`, with its errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except (MaskserveError, Failure) as error:
            return error_response(error)
        except Exception as error:
            return error_response(guarded("", error))

    return answer


async def refused(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, no such method) as JSON, like all others."""
    assert isinstance(error, HTTPException)
    told = f"{error.detail}: {request.method} {request.url.path}"
    body = msgspec.json.encode({"error": told[:300]})
    return Response(body, error.status_code, error.headers, JSON)


def error_response(error: MaskserveError | Failure) -> Response:
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return Response(error_json(error), http_status(error), headers, JSON)


def error_json(error: MaskserveError | Failure) -> bytes:
    return msgspec.json.encode({"error": text_of(error)})


def json_response(message: Message) -> Response:
    return Response(msgspec.json.encode(values_of(message)), media_type=JSON)
