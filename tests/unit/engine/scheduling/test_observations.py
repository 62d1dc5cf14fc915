"""The queue between a step and the metrics: in order, bounded, from any thread."""

from __future__ import annotations

import threading

from maskserve_common.observations import Observations


def test_values_come_out_once_and_in_order() -> None:
    observations = Observations()
    observations.add("step_seconds", 0.5)
    observations.add("edit_ends_total", 1.0, "done", "OK")
    assert list(observations.take()) == [
        ("step_seconds", 0.5, ()),
        ("edit_ends_total", 1.0, ("done", "OK")),
    ]
    assert list(observations.take()) == []


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    observations = Observations(capacity=3)
    for number in range(5):
        observations.add("step_seconds", number)
    assert observations.dropped == 2
    assert [value for _, value, _ in observations.take()] == [0, 1, 2]
    observations.add("step_seconds", 5)
    assert [value for _, value, _ in observations.take()] == [5]


def test_nothing_is_lost_between_threads() -> None:
    observations, samples = Observations(10**6), []
    ended = threading.Event()

    def add() -> None:
        for number in range(20_000):
            observations.add("step_seconds", number)

    def take() -> None:
        while not ended.is_set():
            samples.extend(observations.take())

    adders = [threading.Thread(target=add) for _ in range(3)]
    taker = threading.Thread(target=take)
    for thread in (taker, *adders):
        thread.start()
    for thread in adders:
        thread.join()
    ended.set()
    taker.join()
    samples.extend(observations.take())
    assert sorted(value for _, value, _ in samples) == sorted(list(range(20_000)) * 3)
