"""Which LoRAs stay on the device: uses that fade, per byte, and what comes back unasked."""

from __future__ import annotations

import pytest

from maskserve_benchmarks.adapter_calls import SERVICES, Service, draw_calls, popularity
from maskserve_common.resources.popularity import Popularity
from maskserve_studies.adapter_misses.command import misses, misses_of_lru

SEED = 4


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name)
def test_misses_under_the_published_skew(service: Service) -> None:
    shares = popularity(service)
    assert shares[: service.slots].sum() == pytest.approx(service.share)
    calls = draw_calls(service, 20_000, SEED)
    policy_misses, _ = misses(service, calls)
    assert policy_misses <= service.bar
    assert policy_misses < 0.75 * misses_of_lru(service.slots, calls)


def test_what_was_popular_makes_room_for_what_is() -> None:
    """Calls go by the law, and after a while by the law of another order."""
    service = SERVICES[0]
    first_calls = draw_calls(service, 5_000, SEED)
    later_calls = [
        service.adapters - 1 - adapter for adapter in draw_calls(service, 20_000, SEED + 1)
    ]
    policy_misses, _ = misses(service, [*first_calls, *later_calls])
    assert policy_misses < misses_of_lru(service.slots, [*first_calls, *later_calls])


def test_uses_fade_and_large_ones_are_worth_less() -> None:
    popular = Popularity(half_life=10)
    for name in ("a", "a", "b"):
        popular.record_use(name)
    assert popular.worth("a", 1) > popular.worth("b", 1) > popular.worth("never", 1)
    assert popular.worth("a", 8) < popular.worth("b", 1)
    for _ in range(100):
        popular.record_use("c")
    popular.record_use("b")
    assert popular.worth("a", 1) < popular.worth("b", 1)  # two uses long ago, and one just now
