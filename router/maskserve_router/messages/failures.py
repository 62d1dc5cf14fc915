"""Errors as clients get them."""

from __future__ import annotations

import logging
import math

import grpc

from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MaskserveError,
    Overloaded,
    Refused,
    TemplateNotFound,
)
from maskserve_common.logs import about
from maskserve_common.routing import NoWorkerAvailable
from maskserve_common.servers.failure import Failure
from maskserve_router.messages.edit_call import UnknownModel

log = logging.getLogger("maskserve.router")
Status = grpc.StatusCode


class Unauthorized(InvalidRequest):
    """The API key is missing, unknown, or may not do this."""


class NotSupported(InvalidRequest):
    """A part of the protocol that does not work across hosts, or is for operators only."""


class RetryLater(Overloaded):
    """Too many requests at once.

    Args:
        message: what there is too much of.
        retry_s: seconds after which to try again.
    """

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


_UNTOLD = "the worker ended the request; why is in the router's log"
_GRPC = {
    InvalidRequest.code: Status.INVALID_ARGUMENT,
    TemplateNotFound.code: Status.NOT_FOUND,
    AdapterNotFound.code: Status.NOT_FOUND,
    Refused.code: Status.INVALID_ARGUMENT,
    Overloaded.code: Status.UNAVAILABLE,
    DeadlineExceeded.code: Status.DEADLINE_EXCEEDED,
    Cancelled.code: Status.CANCELLED,
    EngineFailed.code: Status.INTERNAL,
}
_HTTP = {
    InvalidRequest.code: 400,
    TemplateNotFound.code: 404,
    AdapterNotFound.code: 404,
    Refused.code: 400,
    Overloaded.code: 429,
    DeadlineExceeded.code: 504,
    Cancelled.code: 499,
    EngineFailed.code: 503,
}


def grpc_status(error: MaskserveError | Failure) -> grpc.StatusCode:
    """Return a worker's own status; for errors of the router, the nearest one."""
    match error:
        case Failure():
            return error.status
        case Unauthorized():
            return Status.UNAUTHENTICATED
        case NotSupported():
            return Status.UNIMPLEMENTED
        case UnknownModel():
            return Status.NOT_FOUND
    return _GRPC[error.code]


def http_status(error: MaskserveError | Failure) -> int:
    match error:
        case Unauthorized():
            return 401
        case NotSupported():
            return 501
        case UnknownModel():
            return 404
        case NoWorkerAvailable() if not error.full:
            return 503
    return _HTTP[error.code]


def text_of(error: MaskserveError | Failure) -> str:
    """Return the text for the client. It always begins with a code.

    TRITON-2.51: its own texts may help an attacker, such as names of shared memory regions. They
    stay in the log.
    """
    if not isinstance(error, Failure):
        return str(error)
    return error.details if error.coded else f"[{error.code}] {_UNTOLD}"


def retry_after(error: MaskserveError | Failure) -> int | None:
    """Return the whole seconds after which a retry may help; None: it does not help."""
    if isinstance(error, RetryLater):
        return max(1, min(math.ceil(error.retry_s), 60))
    if error.code in (Overloaded.code, EngineFailed.code):
        return 1
    return None


def drop_tracebacks(error: BaseException | None) -> None:
    """Drop the tracebacks of an error that has been reported: they hold the objects of its call.

    A traceback often leads back to the error through a failed task. Large messages would stay in
    memory until Python looks for cycles.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__context__


def guarded(request_id: str, error: BaseException) -> MaskserveError:
    """Return the error for a client after an unexpected exception; the log gets the details."""
    log.error("%s: %s", type(error).__name__, error, exc_info=error, extra=about(request_id))
    return EngineFailed(f"internal error of the router (request {request_id or 'unknown'})")
