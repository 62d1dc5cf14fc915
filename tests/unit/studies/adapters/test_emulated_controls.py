"""The network that a bench puts before a ControlNet service."""

from __future__ import annotations

import socket
import time

import msgspec

from maskserve_engine.control_link.transport import AddedPart, Answered, Lost
from maskserve_studies.adapters.emulated_controls import SlowConnection
from tests.support.eventually import eventually

RATE = 2_000.0


def answered(number: int, *shape: int) -> Answered:
    return Answered(number, (AddedPart("row", 0, 0, 0, 0, shape, "bfloat16"),))


def test_messages_come_in_turn_when_their_bytes_would_have() -> None:
    client_socket, link_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client_socket:
        link = SlowConnection(RATE, link_socket)
        begin = time.monotonic()
        for message in (answered(1, 2, 300), answered(2, 300), Answered(3, ended=True)):
            link.send(message)
        assert time.monotonic() - begin < 1.5, "sending has waited"
        arrivals = []
        for _ in range(3):
            answer = msgspec.msgpack.decode(client_socket.recv(4096), type=Answered)
            arrivals.append((answer.number, time.monotonic() - begin))
        assert [number for number, _ in arrivals] == [1, 2, 3]
        for (_, seconds), nbytes in zip(arrivals, (1200, 1800, 1800), strict=True):
            assert seconds >= nbytes / RATE
        link.close()


def test_a_denoiser_that_has_ended_is_told_of() -> None:
    client_socket, link_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = SlowConnection(RATE, link_socket)
    client_socket.close()
    link.send(answered(1, 1))

    def is_told() -> bool:
        try:
            link.send(answered(2, 1))
        except Lost as error:
            return "has ended" in str(error)
        return False

    eventually("it is told, when the first has been carried there", is_told)
    link.close()
