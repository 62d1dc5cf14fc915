"""The page's buttons after an edit that is answered at once, by an emulated worker."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import FloatRect, Page, Route, expect

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


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A page with a picture on which something is painted. Its answers to edits are held until they
    are complete, so that all updates come in one read, as after an edit of few milliseconds.
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
        yield page


def box(page: Page, selector: str) -> FloatRect:
    bounds = page.locator(selector).first.bounding_box()
    assert bounds is not None, selector
    return bounds


def contrast(page: Page, selector: str) -> float:
    """WCAG's contrast of a button's words and its colour."""
    styles = "b => [getComputedStyle(b).color, getComputedStyle(b).backgroundColor]"
    luminances = []
    for colour in page.locator(selector).evaluate(styles):
        channels = np.array([int(value) for value in re.findall(r"\d+", colour)[:3]]) / 255
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        luminances.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    darker, lighter = sorted(luminances)
    return (lighter + 0.05) / (darker + 0.05)


@needs_browser
@pytest.mark.timeout(300)
def test_edit_is_back_when_all_updates_come_at_once(page: Page) -> None:
    page.locator("#run").click()
    expect(page.locator("#status")).to_contain_text("done")
    expect(page.locator("#done")).to_be_visible()
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#stop")).not_to_be_visible()
    page.add_style_tag(content="* { transition: none !important }")
    for theme in ("light", "dark"):
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        assert min(contrast(page, button) for button in ("#run", "#stop")) >= 4.5, theme
    # A phone: the button is under the prompt, and those of the result stand in one line.
    page.set_viewport_size({"width": 390, "height": 844})
    assert box(page, "#run")["y"] > box(page, "#prompt")["y"] + box(page, "#prompt")["height"]
    assert len({box(page, name)["y"] for name in ("#done button", "#undo", "#download")}) == 1
    left = box(page, "#editor .stack")["x"]
    assert abs(box(page, "#pictures .thumbnail-item")["x"] - left) <= 1
