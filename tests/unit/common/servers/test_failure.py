"""Failed calls, and which of them another server gets."""

from __future__ import annotations

import socket

import grpc
import pytest

from maskserve_common.servers.failure import Blame, Failure, Status, Tries
from maskserve_common.servers.pool import Server

_LOST = Failure(Status.UNAVAILABLE, "Socket closed")
_FAILED = Failure(Status.INTERNAL, "[ENGINE_FAILED] a denoising step failed")
_ABSENT = Failure(Status.UNAVAILABLE, "failed to connect to all addresses")
_FULL = Failure(Status.UNAVAILABLE, "[OVERLOADED] draining")
_BAD = Failure(Status.INVALID_ARGUMENT, "[INVALID_REQUEST] MASK: no")
_LATE = Failure(Status.UNAVAILABLE, "[DEADLINE_EXCEEDED] late")


@pytest.mark.parametrize(
    ("failures", "tries"),
    [
        ([_LOST, _LOST], 2),
        ([_FAILED, _LOST], 2),
        ([_ABSENT] * 9 + [_LOST] + [_FULL] * 9 + [_FAILED], 20),
        ([_FULL, _BAD], 2),
        ([_LATE], 1),
    ],
)
def test_a_call_goes_on_until_it_lost_two_servers_or_none_would_do_better(
    failures: list[Failure], tries: int
) -> None:
    call = Tries()
    assert [call.goes_on(failure) for failure in failures] == [True] * (tries - 1) + [False]


async def test_a_server_that_misses_the_callers_own_limit_is_lost() -> None:
    with socket.socket() as mute:  # takes connections and never says a word
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        server = Server(f"127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(Failure) as failed:
            await server.infer(b"", 0.05)
        assert failed.value.status is grpc.StatusCode.UNKNOWN
        assert failed.value.blame is Blame.UNKNOWN
        await server.upstream.close()
