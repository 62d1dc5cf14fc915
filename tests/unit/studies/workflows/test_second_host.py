"""Second hosts on one machine, as two runs of a bench have them at once."""

from __future__ import annotations

import contextlib
import socket

import pytest

from maskserve_studies.workflows.second_host import can_make_second_host, second_host

pytestmark = pytest.mark.skipif(not can_make_second_host(), reason="needs root and iproute2")


def test_two_at_once_are_both_reached() -> None:
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(second_host()) for _ in range(2)]
        for host in (*hosts, *hosts[::-1]):
            with pytest.raises(ConnectionRefusedError):  # nothing listens there
                socket.create_connection((host.remote_address, 9), timeout=60.0)
        assert (
            len({host.remote_address for host in hosts}) == len({host.name for host in hosts}) == 2
        )
