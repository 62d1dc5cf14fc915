"""Errors as clients get them, and the conclusions from a worker's error."""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass

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
    split_code,
)
from maskserve_common.logs import about
from maskserve_common.routing import NoWorkerAvailable
from maskserve_router.messages.edit_call import UnknownModel

log = logging.getLogger("maskserve.router")
Status = grpc.StatusCode
MOST_LOST = 2
"""Servers that a call may lose before it is given up: the call itself may crash them."""
_NEVER_BEGUN = ("failed to connect", "resolution failed", "Server is stopping", "Server not ready")
"""UNAVAILABLE errors, from gRPC and Triton, of a server that did not take the call. Any other error
without our code means a connection lost during the call."""


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


class Blame(enum.Enum):
    """Who caused a failure, which decides whether a retry can help."""

    REQUEST = "request"
    """The client's request: no other worker would do better."""
    REFUSED = "refused"
    """The worker did not take the edit; others may."""
    WORKER = "worker"
    """The worker failed."""
    UNKNOWN = "unknown"
    """An error of Triton or of the network, without one of our codes. Another worker may do better.
    The request may have caused it, so it does not count against the worker. A worker that is down
    is noticed by its missing answers."""
    CLIENT = "client"
    """The client: it cancelled, or its deadline passed."""


@dataclass(eq=False)
class Failure(Exception):
    """A worker's error, unchanged."""

    status: grpc.StatusCode
    details: str
    message: bytes = b""
    """In a stream: the message that carried it."""

    @property
    def coded(self) -> bool:
        """True if the text begins with one of our codes, unlike errors of Triton or gRPC."""
        return f"[{split_code(self.details)[0]}]" in self.details

    @property
    def code(self) -> str:
        """The code from maskserve_common.errors; without one, the code for the gRPC status."""
        if self.coded:
            return split_code(self.details)[0]
        return _CODES.get(self.status, EngineFailed.code)

    @property
    def untaken(self) -> bool:
        """True if the server did not take the call: it is stopping, or nobody listens there."""
        unavailable = self.status is Status.UNAVAILABLE
        return unavailable and (self.coded or any(words in self.details for words in _NEVER_BEGUN))

    @property
    def blame(self) -> Blame:
        match self.code:
            case Overloaded.code | TemplateNotFound.code | AdapterNotFound.code if self.coded:
                return Blame.REFUSED
            case Cancelled.code | DeadlineExceeded.code:
                return Blame.CLIENT
            case InvalidRequest.code | TemplateNotFound.code | Refused.code:
                return Blame.REQUEST
        return Blame.WORKER if self.coded else Blame.UNKNOWN


_UNTOLD = "the worker ended the request; why is in the router's log"
_CODES = {
    Status.INVALID_ARGUMENT: InvalidRequest.code,
    Status.NOT_FOUND: TemplateNotFound.code,
    Status.UNIMPLEMENTED: InvalidRequest.code,
    Status.RESOURCE_EXHAUSTED: Overloaded.code,
    Status.DEADLINE_EXCEEDED: DeadlineExceeded.code,
    Status.CANCELLED: Cancelled.code,
}
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


def let_go(error: BaseException | None) -> None:
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
