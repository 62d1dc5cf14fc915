"""How many servers are wanted."""

from __future__ import annotations

import pytest

from maskserve_router.wanted import Busy, servers_wanted


def test_work_of_late_says_how_many_servers_it_keeps_busy() -> None:
    busy = Busy()
    for second in range(1000):
        busy.add(2.5, second)
    assert busy.servers(1000) == pytest.approx(2.5, rel=0.02)
    assert busy.servers(1060) == pytest.approx(2.5 / 2.718, rel=0.02)
    assert busy.servers(2000) < 1e-6


def test_servers_are_wanted_for_bursts_too_and_one_in_any_case() -> None:
    assert [servers_wanted(busy) for busy in (0.0, 0.8, 0.81, 2.5)] == [1, 1, 2, 4]
