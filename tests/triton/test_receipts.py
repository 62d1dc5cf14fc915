"""Receipts on their way from a front to the denoiser."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_core.triton.acks import ReceiptDesk, Receipts


class Call:
    """Puts down what it is told."""

    def __init__(self, name: str, told: queue.SimpleQueue[str]) -> None:
        self._name, self._told = name, told

    def taken(self) -> None:
        self._told.put(f"{self._name} taken")

    def waits_s(self) -> float:
        return 0.0

    def release(self) -> None:
        self._told.put(f"{self._name} over")


class Broken:
    def taken(self) -> None:
        raise RuntimeError("no sender")

    release = taken

    def waits_s(self) -> float:
        return 0.0


@pytest.fixture
def told() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[ReceiptDesk]:
    desk = ReceiptDesk(tmp_path / "runtime")
    yield desk
    desk.close()


@pytest.fixture
def receipts(desk: ReceiptDesk, tmp_path: Path) -> tuple[Receipts, Receipts]:
    return Receipts(tmp_path / "runtime"), Receipts(tmp_path / "runtime")


def test_each_receipt_arrives_where_it_belongs(
    desk: ReceiptDesk, receipts: tuple[Receipts, Receipts], told: queue.SimpleQueue[str]
) -> None:
    for name, given in zip("ab", receipts, strict=True):
        desk.keep(given.key, Call(name, told))
    a, b = receipts
    a.taken()
    b.taken()
    b.over()
    a.taken()
    seen = [told.get(timeout=5) for _ in range(4)]
    assert seen == ["a taken", "b taken", "b over", "a taken"]


def test_a_dropped_key_is_forgotten(
    desk: ReceiptDesk, receipts: tuple[Receipts, Receipts], told: queue.SimpleQueue[str]
) -> None:
    old, new = receipts
    desk.keep(old.key, Call("old", told))
    desk.keep(new.key, Call("new", told))
    desk.drop(old.key)
    for given in (old, new):
        given.taken()
    assert told.get(timeout=5) == "new taken"
    assert told.empty()


def test_more_than_a_pipe_holds(
    desk: ReceiptDesk, receipts: tuple[Receipts, Receipts], told: queue.SimpleQueue[str]
) -> None:
    desk.keep(receipts[0].key, Call("a", told))
    for _ in range(5000):
        receipts[0].taken()
    for _ in range(5000):
        told.get(timeout=5)


def test_a_call_that_fails_is_nobody_elses_trouble(
    desk: ReceiptDesk,
    receipts: tuple[Receipts, Receipts],
    told: queue.SimpleQueue[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = receipts
    desk.keep(broken.key, Broken())
    desk.keep(good.key, Call("good", told))
    with caplog.at_level(logging.ERROR):
        broken.taken()
        good.taken()
        told.get(timeout=5)
    assert "an event could not be sent" in caplog.text


def test_a_receipt_without_a_denoiser_is_lost(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path)
    receipts.taken()  # there is no pipe
    desk = ReceiptDesk(tmp_path)
    desk.close()
    receipts.taken()  # nobody reads it


def test_a_killed_denoisers_pipe_is_replaced(tmp_path: Path, told: queue.SimpleQueue[str]) -> None:
    (tmp_path / "receipts").write_text("left behind", encoding="ascii")
    desk, receipts = ReceiptDesk(tmp_path), Receipts(tmp_path)
    desk.keep(receipts.key, Call("a", told))
    receipts.taken()
    told.get(timeout=5)
    desk.close()


def test_an_event_that_never_arrives_is_not_waited_for(
    tmp_path: Path, told: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Call):
        def waits_s(self) -> float:
            return 31.0

    monkeypatch.setattr("maskserve_core.triton.acks._LOOK_EVERY_S", 0.01)
    desk = ReceiptDesk(tmp_path)
    desk.keep("well", Call("well", told))
    desk.keep("lost", Waiting("lost", told))
    assert told.get(timeout=5) == "lost over"
    desk.close()
