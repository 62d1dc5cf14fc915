"""Receipts on their way from a front to the denoiser."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskserve_core.backend.receipts import ReceiptDesk, give_receipt


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[ReceiptDesk]:
    desk = ReceiptDesk(tmp_path / "runtime")
    yield desk
    desk.close()


def test_each_receipt_arrives_under_its_key(desk: ReceiptDesk, tmp_path: Path) -> None:
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    desk.keep("a", lambda: seen.put("a"))
    desk.keep("b", lambda: seen.put("b"))
    for key in ("a", "b", "nobody's", "b"):
        give_receipt(tmp_path / "runtime", key)
    assert [seen.get(timeout=5) for _ in range(3)] == ["a", "b", "b"]


def test_a_dropped_key_is_forgotten(desk: ReceiptDesk, tmp_path: Path) -> None:
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    desk.keep("old", lambda: seen.put("old"))
    desk.keep("new", lambda: seen.put("new"))
    desk.drop("old")
    for key in ("old", "new"):
        give_receipt(tmp_path / "runtime", key)
    assert seen.get(timeout=5) == "new"
    assert seen.empty()


def test_more_than_a_pipe_holds(desk: ReceiptDesk, tmp_path: Path) -> None:
    seen: queue.SimpleQueue[None] = queue.SimpleQueue()
    key = "k" * 32
    desk.keep(key, lambda: seen.put(None))
    for _ in range(5000):
        give_receipt(tmp_path / "runtime", key)
    for _ in range(5000):
        seen.get(timeout=5)


def test_a_call_that_fails_is_nobody_elses_trouble(
    desk: ReceiptDesk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no sender")

    seen: queue.SimpleQueue[None] = queue.SimpleQueue()
    desk.keep("broken", broken)
    desk.keep("good", lambda: seen.put(None))
    with caplog.at_level(logging.ERROR):
        give_receipt(tmp_path / "runtime", "broken")
        give_receipt(tmp_path / "runtime", "good")
        seen.get(timeout=5)
    assert "an event could not be sent" in caplog.text


def test_a_receipt_without_a_denoiser_is_lost(tmp_path: Path) -> None:
    give_receipt(tmp_path, "a")  # there is no pipe
    desk = ReceiptDesk(tmp_path)
    desk.close()
    give_receipt(tmp_path, "a")  # nobody reads it


def test_a_killed_denoisers_pipe_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "receipts").write_text("left behind", encoding="ascii")
    desk = ReceiptDesk(tmp_path)
    seen: queue.SimpleQueue[None] = queue.SimpleQueue()
    desk.keep("a", lambda: seen.put(None))
    give_receipt(tmp_path, "a")
    seen.get(timeout=5)
    desk.close()
