"""The `execute` of a model that answers at once, one request after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from maskserve_common.contracts.meta import failed_meta
from maskserve_common.errors import guarded
from maskserve_triton.tensor_io import error_response, response

Outputs = dict[str, Any]


def respond(
    api: Any,
    requests: list[Any],
    work: Callable[[Any], Outputs],
    failed: Callable[[Any, Exception], Outputs] | None = None,
) -> list[Any]:
    """Return one response per request.

    Args:
        api: triton_python_backend_utils.
        requests: requests of Triton.
        work: makes the outputs of a request.
        failed: makes the outputs of a request whose `work` raised; by default a Triton error.
    """
    return [_respond(api, request, work, failed) for request in requests]


def failed_event(meta: bytes, error: Exception) -> bytes:
    """Return META that reports an event of the denoiser's whose decoding failed.

    A Triton error would not arrive before the edit's last event has gone, which may be held back
    until this event arrives (acks.py).
    """
    try:
        request_id = str(json.loads(meta)["request_id"])
    except (ValueError, KeyError, TypeError):
        request_id = ""  # not an event of the denoiser's
    return failed_meta(guarded(request_id, error), request_id)


def _respond(
    api: Any,
    request: Any,
    work: Callable[[Any], Outputs],
    failed: Callable[[Any, Exception], Outputs] | None,
) -> Any:
    try:
        return response(api, work(request))
    except Exception as error:
        if failed is None:
            return error_response(api, guarded("", error))
        return response(api, failed(request, error))
