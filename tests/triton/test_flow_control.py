"""Events that go one at a time."""

from __future__ import annotations

import random
import threading
import time

import pytest

from maskserve_triton.acks import FlowControl
from maskserve_triton.answer import Answer
from tests.fakes.pb_utils import FakeTriton, Sender


class Ends:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def sender(api: FakeTriton) -> Sender:
    return Sender(api.violations)


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def flow(api: FakeTriton, sender: Sender, ends: Ends) -> FlowControl:
    return FlowControl(Answer(api, sender), ends)


def events_of(sender: Sender) -> list[str]:
    return [response.text("META").decode() for response in sender.sent]


def show(flow: FlowControl, *events: str) -> None:
    """Events such as `progress 3`."""
    for event in events:
        flow.event(event.split()[0], {"META": event.encode()})


def test_the_next_goes_when_the_last_was_taken(flow: FlowControl, sender: Sender) -> None:
    show(flow, "progress 1", "preview 1", "progress 2")
    assert events_of(sender) == ["progress 1"]
    flow.acknowledge()
    assert events_of(sender) == ["progress 1", "preview 1"]
    flow.acknowledge()
    assert events_of(sender) == ["progress 1", "preview 1", "progress 2"]


def test_a_newer_event_replaces_one_of_its_kind_that_waits(
    flow: FlowControl, sender: Sender
) -> None:
    show(flow, "progress 1", "progress 2", "preview 2", "progress 3", "preview 4", "progress 5")
    for _ in range(5):
        flow.acknowledge()
    assert events_of(sender) == ["progress 1", "preview 4", "progress 5"]


def test_the_final_event_replaces_all_and_the_end_comes_after_it(
    flow: FlowControl, sender: Sender, ends: Ends
) -> None:
    show(flow, "progress 1", "preview 2", "progress 2")
    flow.finish({"META": b"final"})
    flow.acknowledge()
    assert events_of(sender) == ["progress 1", "final"]
    # Triton would send the end right behind it.
    assert not sender.finished.is_set()
    flow.acknowledge()
    assert sender.finished.is_set()
    assert ends.count == 1


def test_an_edit_without_events_ends_like_one_with(
    flow: FlowControl, sender: Sender, ends: Ends
) -> None:
    flow.finish({"META": b"final"})
    assert events_of(sender) == ["final"]
    flow.acknowledge()
    assert sender.finished.is_set()
    assert ends.count == 1


def test_nothing_follows_the_final_event(flow: FlowControl, sender: Sender, ends: Ends) -> None:
    flow.finish({"META": b"final"})
    show(flow, "progress 9")
    flow.finish({"META": b"another"})
    for _ in range(4):
        flow.acknowledge()
    assert events_of(sender) == ["final"]
    assert ends.count == 1


def test_a_receipt_for_nothing_is_ignored(flow: FlowControl, sender: Sender) -> None:
    flow.acknowledge()
    show(flow, "progress 1")
    flow.acknowledge()
    flow.acknowledge()
    show(flow, "progress 2", "progress 3")
    assert events_of(sender) == ["progress 1", "progress 2"]


def test_how_long_an_event_was_not_taken(flow: FlowControl) -> None:
    assert flow.waits_s() == 0.0
    begin = time.monotonic()
    show(flow, "progress 1")
    time.sleep(0.02)
    assert 0.02 <= flow.waits_s() <= time.monotonic() - begin
    flow.acknowledge()
    assert flow.waits_s() == 0.0
    show(flow, "progress 2")
    flow.release()
    assert flow.waits_s() == 0.0


@pytest.mark.parametrize("before", [True, False])
def test_once_released_nothing_waits(
    flow: FlowControl, sender: Sender, ends: Ends, before: bool
) -> None:
    """The final event may have come before, or come later."""
    show(flow, "progress 1", "progress 2")
    if before:
        flow.finish({"META": b"final"})
    flow.release()
    assert events_of(sender) == ["progress 1", "final" if before else "progress 2"]
    if not before:
        show(flow, "progress 3", "progress 4")
        flow.finish({"META": b"final"})
        assert events_of(sender)[2:] == ["progress 3", "progress 4", "final"]
    assert sender.finished.is_set()
    flow.acknowledge()
    flow.release()
    assert ends.count == 1


@pytest.mark.parametrize("seed", range(8))
def test_two_are_never_under_way(api: FakeTriton, seed: int) -> None:
    """With events from one thread and acks from another."""
    dice, sends, received_count = random.Random(seed), threading.Semaphore(0), 0

    class Watched(Sender):
        def send(self, response: object = None, flags: int = 0) -> None:
            assert len(self.sent) - received_count == (0 if response is not None or flags else 1)
            super().send(response, flags)  # type: ignore[arg-type]
            sends.release()

    sender, ends = Watched(api.violations), Ends()
    flow = FlowControl(Answer(api, sender), ends)

    def front() -> None:
        nonlocal received_count
        while not sender.finished.is_set():
            sends.acquire()
            time.sleep(dice.random() * 1e-3)
            received_count += 1
            flow.acknowledge()

    thread = threading.Thread(target=front)
    thread.start()
    for step in range(60):
        show(flow, f"{dice.choice(('progress', 'preview'))} {step}")
        time.sleep(dice.random() * 1e-3)
    flow.finish({"META": b"final"})
    sender.wait()
    sends.release()
    thread.join(5)
    assert not thread.is_alive()
    events = events_of(sender)
    assert events[-1] == "final"
    for kind in ("progress", "preview"):
        steps = [int(event.split()[1]) for event in events if event.startswith(kind)]
        assert steps == sorted(set(steps))
    assert ends.count == 1
