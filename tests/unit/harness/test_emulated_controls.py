"""The network that a bench puts before a ControlNet service."""

from __future__ import annotations

import socket
import time

import msgspec

from maskserve_engine.control_link.transport import AddedPart, Answered, Lost
from maskserve_harness.benchmarks.emulated_controls import SlowConnection
from tests.support.eventually import eventually

RATE = 2_000.0


def answered(number: int, *shape: int) -> Answered:
    return Answered(number, (AddedPart("row", 0, 0, 0, 0, shape, "bfloat16"),))


def test_messages_come_in_turn_when_their_bytes_would_have() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        link = SlowConnection(RATE, theirs)
        begin = time.monotonic()
        for message in (answered(1, 2, 300), answered(2, 300), Answered(3, ended=True)):
            link.send(message)
        assert time.monotonic() - begin < 0.5, "sending has waited"
        came = []
        for _ in range(3):
            found = msgspec.msgpack.decode(ours.recv(4096), type=Answered)
            came.append((found.number, time.monotonic() - begin))
        assert [number for number, _ in came] == [1, 2, 3]
        for (_, seconds), nbytes in zip(came, (1200, 1800, 1800), strict=True):
            assert seconds >= nbytes / RATE
        link.close()


def test_a_denoiser_that_has_ended_is_told_of() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SlowConnection(RATE, theirs)
    ours.close()
    link.send(answered(1, 1))

    def is_told() -> bool:
        try:
            link.send(answered(2, 1))
        except Lost as error:
            return "has ended" in str(error)
        return False

    eventually("it is told, when the first has been carried there", is_told)
    link.close()
