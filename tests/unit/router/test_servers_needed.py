"""How many servers are wanted."""

from __future__ import annotations

from maskserve_router.workers.autoscaling import servers_needed


def test_servers_are_wanted_for_bursts_too_and_one_in_any_case() -> None:
    assert [servers_needed(busy) for busy in (0.0, 0.8, 0.81, 2.5)] == [1, 1, 2, 4]
