"""The page's buttons after an edit that is answered at once, by an emulated worker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Route, expect

from maskserve_benchmarks.emulator.worker import EmulatedWorker
from tests.fakes.pictures import encode
from tests.support.page import chromium, needs_browser, opened, paint, pick, served

SIDE = 64


class InstantWorker(EmulatedWorker):
    """Answers edits at once, and takes templates."""

    def control_answer(self, operation: dict[str, Any]) -> bytes:
        if operation["op"] == "templates":
            return b'{"templates": []}'
        if operation["op"] == "register":
            return json.dumps({"template_id": "0" * 32}).encode()
        return super().control_answer(operation)


@contextmanager
def instant_worker(picture: Image.Image) -> Iterator[str]:
    addresses: Queue[str] = Queue()
    loop, done = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        worker = InstantWorker("w", None, answer=encode(picture))
        await worker.start()
        addresses.put(worker.address)
        await done.wait()
        await worker.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield addresses.get(timeout=60)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@needs_browser
@pytest.mark.timeout(300)
def test_edit_is_back_when_all_updates_come_at_once(tmp_path: Path) -> None:
    """The page's answer to an edit is held until it is complete, so its updates come in one read,
    as they do after an edit of few milliseconds.
    """
    picture = Image.new("RGB", (SIDE, SIDE), "navy")
    picture.save(tmp_path / "picture.png")

    def hold(route: Route) -> None:
        route.fulfill(response=route.fetch())

    with (
        instant_worker(picture) as worker,
        served(worker, tmp_path) as address,
        chromium() as browser,
        opened(browser, address) as page,
    ):
        pick(page, SIDE, SIDE)
        paint(page, [(20, 20), (30, 30)])
        page.route("**/queue/data**", hold)
        page.locator("#run").click()
        expect(page.locator("#status")).to_contain_text("done")
        expect(page.locator("#done")).to_be_visible()
        expect(page.locator("#run")).to_be_visible()
        expect(page.locator("#stop")).not_to_be_visible()
