"""Answers of the HTTP listeners: messages and errors as JSON, with their status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from google.protobuf.message import Message
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from maskserve_core.errors import MaskserveError
from maskserve_router.failures import (
    Failure,
    guarded,
    http_status,
    let_go,
    retry_after,
    text_of,
)
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


_PATH = ("not_found_error", "not_found")
_METHOD = ("invalid_request_error", "method_not_allowed")
"""OpenAI's type and code of what is not there."""


async def refused(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (no such path, no such method) as JSON, like all others: below
    `/v1` in OpenAI's form, else in KServe's.
    """
    assert isinstance(error, HTTPException)
    told: Any = f"{error.detail}: {request.method} {request.url.path}"[:300]
    if request.url.path.startswith("/v1/"):
        kind, code = _PATH if error.status_code == 404 else _METHOD
        told = {"message": told, "type": kind, "param": None, "code": code}
    return Response(msgspec.json.encode({"error": told}), error.status_code, error.headers, JSON)


def error_response(error: MaskserveError | Failure) -> Response:
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return Response(error_json(error), http_status(error), headers, JSON)


def error_json(error: MaskserveError | Failure) -> bytes:
    let_go(error)
    return msgspec.json.encode({"error": text_of(error)})


def json_response(message: Message) -> Response:
    return Response(msgspec.json.encode(values_of(message)), media_type=JSON)
