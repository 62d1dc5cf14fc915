"""A failed call to a Triton, and the conclusions from its error."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import grpc

from maskserve_common.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    Refused,
    TemplateNotFound,
    split_code,
)

Status = grpc.StatusCode
_MOST_LOST = 2
"""Servers that a call may lose before it is given up: the call itself may crash them."""
_NEVER_BEGUN = ("failed to connect", "resolution failed", "Server is stopping", "Server not ready")
"""UNAVAILABLE errors, from gRPC and Triton, of a server that did not take the call. Any other error
without our code means a connection lost during the call."""
_CODES = {
    Status.INVALID_ARGUMENT: InvalidRequest.code,
    Status.NOT_FOUND: TemplateNotFound.code,
    Status.UNIMPLEMENTED: InvalidRequest.code,
    Status.RESOURCE_EXHAUSTED: Overloaded.code,
    Status.DEADLINE_EXCEEDED: DeadlineExceeded.code,
    Status.CANCELLED: Cancelled.code,
}


class Blame(enum.Enum):
    """Who caused a failure, which decides whether a retry can help."""

    REQUEST = "request"
    """The client's request: no other server would do better."""
    REFUSED = "refused"
    """The server did not take the call; others may."""
    WORKER = "worker"
    """The server failed."""
    UNKNOWN = "unknown"
    """An error of Triton or of the network, without one of our codes. Another server may do better.
    The request may have caused it, so it does not count against the server. A server that is down
    is noticed by its missing answers."""
    CLIENT = "client"
    """The client: it cancelled, or its deadline passed."""


@dataclass(eq=False)
class Failure(Exception):
    """A server's error, unchanged."""

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
        """True if the server did not take the call and may take it later: it is full or stopping,
        or nobody listens there.
        """
        if self.coded:
            return self.code == Overloaded.code
        unavailable = self.status is Status.UNAVAILABLE
        return unavailable and any(words in self.details for words in _NEVER_BEGUN)

    @property
    def blame(self) -> Blame:
        if self.untaken:
            return Blame.REFUSED
        match self.code:
            case TemplateNotFound.code | AdapterNotFound.code if self.coded:
                return Blame.REFUSED
            case Cancelled.code | DeadlineExceeded.code:
                return Blame.CLIENT
            case InvalidRequest.code | TemplateNotFound.code | Refused.code:
                return Blame.REQUEST
        return Blame.WORKER if self.coded else Blame.UNKNOWN

    @property
    def lost(self) -> bool:
        """True if the server failed or was lost, perhaps by this call."""
        return self.blame in (Blame.WORKER, Blame.UNKNOWN)


class Tries:
    """Counts the tries of one call, and decides whether another server gets it.

    A server that did not take the call costs nothing. A call that lost a server gets one more.
    """

    def __init__(self) -> None:
        self._lost = 0

    def goes_on(self, failure: Failure) -> bool:
        """Note a failed try, and return whether another server may do better."""
        self._lost += failure.lost
        return self._lost < _MOST_LOST if failure.lost else failure.blame is Blame.REFUSED
