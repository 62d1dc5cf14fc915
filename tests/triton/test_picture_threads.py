"""Pictures in threads: small ones do not wait for large ones, and keys take turns."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from maskserve_common.errors import InvalidRequest
from maskserve_common.niceness import Niceness
from maskserve_common.tracing import Tracer
from maskserve_triton.picture_threads import LARGE_PIXELS, PictureJob, PictureThreads
from maskserve_triton.tensor_io import Outputs
from tests.fakes.pb_utils import FakeTriton, Request

LARGE, SMALL = LARGE_PIXELS + 1, LARGE_PIXELS


class Desk:
    """Makes requests whose jobs put their names into `began` and wait for a permit to end."""

    def __init__(self, api: FakeTriton) -> None:
        self._api, self._jobs = api, dict[int, PictureJob]()
        self.permits, self.began = threading.Semaphore(0), queue.SimpleQueue[str]()
        self.threads = PictureThreads(api, Tracer(), "work", lambda r: self._jobs[id(r)])

    def send(self, name: str, pixels: int, key: str = "a", *, waits: bool = True) -> Request:
        def work() -> Outputs:
            self.began.put(name)
            assert not waits or self.permits.acquire(timeout=30)
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return {"IMAGE": name.encode(), "META": str(niceness).encode()}

        return self.send_job(PictureJob(key, lambda: pixels, work))

    def send_job(self, job: PictureJob) -> Request:
        request: Request = self._api.request()
        self._jobs[id(request)] = job
        self.threads.execute([request])
        return request

    def pass_large_pictures_on(self, key: str) -> None:
        """Wait until the large pictures sent under a key so far wait for their own threads.

        The threads of small pictures pass them on; both do so no more when both are in a barrier.
        """
        barrier = threading.Barrier(3, timeout=30)

        def work() -> Outputs:
            barrier.wait()
            return {"IMAGE": b""}

        for _ in range(2):
            self.send_job(PictureJob(key, lambda: SMALL, work))
        barrier.wait()


@pytest.fixture
def desk(api: FakeTriton) -> Iterator[Desk]:
    desk = Desk(api)
    yield desk
    desk.permits.release(100)
    desk.threads.close()


def test_a_small_picture_does_not_wait_for_large_ones(desk: Desk) -> None:
    large = [desk.send(f"large {number}", LARGE) for number in range(8)]
    small = desk.send("small", SMALL, waits=False).sender.wait()
    assert not any(request.sender.finished.is_set() for request in large)
    desk.permits.release(8)
    niceness = {int(request.sender.wait().text("META")) for request in large}
    assert niceness == {min(19, int(small.text("META")) + Niceness.LARGE_PICTURES)}


@pytest.mark.parametrize("pixels", [SMALL, LARGE])
def test_a_key_that_sends_many_pictures_waits_behind_itself(desk: Desk, pixels: int) -> None:
    for number in range(8):
        desk.send(f"greedy {number}", pixels)
    assert all(desk.began.get(timeout=30).startswith("greedy") for _ in range(2))
    desk.send("modest", pixels, "b")
    if pixels == LARGE:
        desk.pass_large_pictures_on("b")
    desk.permits.release()
    assert desk.began.get(timeout=30) == "modest"


def test_one_key_alone_uses_all_threads(desk: Desk) -> None:
    barrier = threading.Barrier(2, timeout=30)

    def work() -> Outputs:
        barrier.wait()
        return {"IMAGE": b""}

    requests = [desk.send_job(PictureJob("a", lambda: SMALL, work)) for _ in range(2)]
    assert all(request.sender.wait().error() is None for request in requests)


def test_errors_reach_the_client_and_the_threads_go_on(desk: Desk) -> None:
    def bad() -> Any:
        raise InvalidRequest("IMAGE", "is not an image")

    def bug() -> Any:
        raise KeyError("a client's secret")

    unreadable = desk.send_job(PictureJob("a", bad, bad)).sender.wait()
    assert unreadable.error().message() == "[INVALID_REQUEST] IMAGE: is not an image"
    surprise = desk.send_job(PictureJob("a", lambda: LARGE, bug)).sender.wait()
    assert "[ENGINE_FAILED]" in surprise.error().message()
    assert "secret" not in surprise.error().message()
    event = desk.send_job(PictureJob("a", lambda: 1, bug, lambda error: {"IMAGE": b"no"}))
    assert event.sender.wait().text("IMAGE") == b"no"
    assert desk.send("next", LARGE, waits=False).sender.wait().error() is None
