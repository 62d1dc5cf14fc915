"""The `execute` of a model that answers at once, one request after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maskserve_core.backend.wire import error_response, guarded, response

Outputs = dict[str, Any]


def respond(api: Any, requests: list[Any], work: Callable[[Any], Outputs]) -> list[Any]:
    """One response per request: what `work` makes of it, or its error."""
    return [_respond(api, request, work) for request in requests]


def _respond(api: Any, request: Any, work: Callable[[Any], Outputs]) -> Any:
    try:
        return response(api, work(request))
    except Exception as error:
        return error_response(api, guarded("", error))
