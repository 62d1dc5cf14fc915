"""What went wrong, as the router's clients are told, and what a worker's error says of it."""

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


class Unauthorized(InvalidRequest):
    """No API key, an unknown one, or one that may not do this."""


class NotSupported(InvalidRequest):
    """A part of the protocol that means nothing across hosts, or is an operator's."""


class RetryLater(Overloaded):
    """Too much at once.

    Args:
        message: what there is too much of.
        retry_s: when to try again.
    """

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Blame(enum.Enum):
    """Whose failure it is, and so what helps."""

    REQUEST = "request"
    """The client's: no other worker would do better."""
    REFUSED = "refused"
    """The worker did not take it, and others may."""
    WORKER = "worker"
    """The worker failed it."""
    UNKNOWN = "unknown"
    """An error without a code: not in our words but Triton's, or the network's. Another worker may
    do better. What the client sent may have caused it, so it is no sign of a worker that fails;
    one that is down is noticed by its silence."""
    CLIENT = "client"
    """Nobody waits for it any more."""


@dataclass(eq=False)
class Failure(Exception):
    """A worker's error, as it came."""

    status: grpc.StatusCode
    details: str
    message: bytes = b""
    """Of a stream: the message that carried it."""

    @property
    def coded(self) -> bool:
        """Whether it is in our words, which begin with a code, and not Triton's or gRPC's."""
        return f"[{split_code(self.details)[0]}]" in self.details

    @property
    def code(self) -> str:
        """Of maskserve_common.errors; of an error without any by its gRPC status."""
        if self.coded:
            return split_code(self.details)[0]
        return _CODES.get(self.status, EngineFailed.code)

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
    """A worker's own status; of the router's errors the nearest."""
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
    """What the client reads; it begins with a code in every case.

    TRITON-2.51: its own texts may tell what helps to attack it, such as the name of a region of
    shared memory. They stay in the log.
    """
    if not isinstance(error, Failure):
        return str(error)
    return error.details if error.coded else f"[{error.code}] {_UNTOLD}"


def retry_after(error: MaskserveError | Failure) -> int | None:
    """Whole seconds after which trying again may help; None where it does not."""
    if isinstance(error, RetryLater):
        return max(1, min(math.ceil(error.retry_s), 60))
    if error.code in (Overloaded.code, EngineFailed.code):
        return 1
    return None


def let_go(error: BaseException | None) -> None:
    """An error has been told: nobody needs its traceback, which holds whatever its call held.

    It often leads back to the error, by way of a task that failed with it, so that a message of
    many megabytes would stay until Python looks for cycles.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__context__


def guarded(request_id: str, error: BaseException) -> MaskserveError:
    """What a client is told of an exception that nobody foresaw; the log has the rest."""
    log.error("%s: %s", type(error).__name__, error, exc_info=error, extra=about(request_id))
    return EngineFailed(f"internal error of the router (request {request_id or 'unknown'})")
