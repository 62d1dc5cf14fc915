"""AckSender on their way from a front to the denoiser."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_triton.acks import AckReceiver, AckSender


class Call:
    """Puts down what it is told."""

    def __init__(self, name: str, events: queue.SimpleQueue[str]) -> None:
        self._name, self._events = name, events

    def acknowledge(self) -> None:
        self._events.put(f"{self._name} taken")

    def waits_s(self) -> float:
        return 0.0

    def release(self) -> None:
        self._events.put(f"{self._name} over")


class Broken:
    def acknowledge(self) -> None:
        raise RuntimeError("no sender")

    release = acknowledge

    def waits_s(self) -> float:
        return 0.0


@pytest.fixture
def events() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[AckReceiver]:
    receiver = AckReceiver(tmp_path / "runtime")
    yield receiver
    receiver.close()


@pytest.fixture
def acks(receiver: AckReceiver, tmp_path: Path) -> tuple[AckSender, AckSender]:
    return AckSender(tmp_path / "runtime"), AckSender(tmp_path / "runtime")


def test_each_receipt_arrives_where_it_belongs(
    receiver: AckReceiver, acks: tuple[AckSender, AckSender], events: queue.SimpleQueue[str]
) -> None:
    for name, sender in zip("ab", acks, strict=True):
        receiver.keep(sender.key, Call(name, events))
    a, b = acks
    a.acknowledge()
    b.acknowledge()
    b.over()
    a.acknowledge()
    messages = [events.get(timeout=5) for _ in range(4)]
    assert messages == ["a taken", "b taken", "b over", "a taken"]


def test_a_dropped_key_is_forgotten(
    receiver: AckReceiver, acks: tuple[AckSender, AckSender], events: queue.SimpleQueue[str]
) -> None:
    old, new = acks
    receiver.keep(old.key, Call("old", events))
    receiver.keep(new.key, Call("new", events))
    receiver.drop(old.key)
    for sender in (old, new):
        sender.acknowledge()
    assert events.get(timeout=5) == "new taken"
    assert events.empty()


def test_more_than_a_pipe_holds(
    receiver: AckReceiver, acks: tuple[AckSender, AckSender], events: queue.SimpleQueue[str]
) -> None:
    receiver.keep(acks[0].key, Call("a", events))
    for _ in range(5000):
        acks[0].acknowledge()
    for _ in range(5000):
        events.get(timeout=5)


def test_a_call_that_fails_is_nobody_elses_trouble(
    receiver: AckReceiver,
    acks: tuple[AckSender, AckSender],
    events: queue.SimpleQueue[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = acks
    receiver.keep(broken.key, Broken())
    receiver.keep(good.key, Call("good", events))
    with caplog.at_level(logging.ERROR):
        broken.acknowledge()
        good.acknowledge()
        events.get(timeout=5)
    assert "an event could not be sent" in caplog.text


def test_a_receipt_without_a_denoiser_is_lost(tmp_path: Path) -> None:
    acks = AckSender(tmp_path)
    acks.acknowledge()  # there is no pipe
    receiver = AckReceiver(tmp_path)
    receiver.close()
    acks.acknowledge()  # nobody reads it


def test_a_killed_denoisers_pipe_is_replaced(
    tmp_path: Path, events: queue.SimpleQueue[str]
) -> None:
    (tmp_path / "acks").write_text("left behind", encoding="ascii")
    receiver, acks = AckReceiver(tmp_path), AckSender(tmp_path)
    receiver.keep(acks.key, Call("a", events))
    acks.acknowledge()
    events.get(timeout=5)
    receiver.close()


def test_an_event_that_never_arrives_is_not_waited_for(
    tmp_path: Path, events: queue.SimpleQueue[str]
) -> None:
    class Waiting(Call):
        def waits_s(self) -> float:
            return 31.0

    receiver = AckReceiver(tmp_path, poll_s=0.01)
    receiver.keep("well", Call("well", events))
    receiver.keep("lost", Waiting("lost", events))
    assert events.get(timeout=5) == "lost over"
    receiver.close()
