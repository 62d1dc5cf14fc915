"""The page of `maskserve web` in a real browser, used as people use it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser, Locator, Page, Request, expect, sync_playwright

from tests.support.eventually import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="page: there is no chromium")
FLAGS = ["--no-sandbox"]
"""Flags for Chromium as root, in a container, without a GPU."""
expect.set_options(timeout=60_000)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launch = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launch
        launch.close()


@contextmanager
def served(server: str, pictures: Path, *more: str) -> Iterator[str]:
    """Serve the page of a worker or router, with the pictures of a folder."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    program = Path(sys.executable).with_name("maskserve")
    command = [program, "web", "--url", server, "--port", str(port), "--images", pictures, *more]
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        eventually("the page answers", lambda: answers(port), 60)
        niceness = os.getpriority(os.PRIO_PROCESS, page.pid)
        assert niceness > os.getpriority(os.PRIO_PROCESS, 0), "edits go before the page"
        yield f"http://127.0.0.1:{port}"
    finally:
        page.send_signal(signal.SIGINT)
        output, _ = page.communicate(timeout=30)
    assert "Traceback" not in output, output


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """Open the page in a tab. It may contact only its own server."""
    page = browser.new_page(viewport={"width": 1500, "height": 1100})
    page.set_default_timeout(60_000)
    elsewhere: list[str] = []
    local = (address, "data:", "blob:", "about:")
    page.on("request", lambda r: None if r.url.startswith(local) else elsewhere.append(r.url))
    try:
        page.goto(address)
        page.wait_for_selector("#editor .painter")
        yield page
    finally:
        page.close()
    assert elsewhere == []


def pick(page: Page, width: int, height: int) -> None:
    """Take the first picture, which has this size, and wait until painting works."""
    page.locator("#pictures .thumbnail-item").first.click()
    expect(page.locator("#editor .said")).to_contain_text(f"{width} × {height}")


def fill_opened(field: Locator, value: str) -> None:
    """Fill a field of a drawer that was opened just now: Gradio may draw it once more, with its
    first value.
    """
    for _ in range(50):
        field.fill(value)
        field.page.wait_for_timeout(200)
        if field.input_value() == value:
            return
    raise AssertionError(f"the field has {field.input_value()}, not {value}")


def paint(page: Page, stroke: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """Paint a stroke, or a click if it has one place. Returns its places in pixels of
    the picture.
    """
    canvas = page.locator("#editor .paint")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    size = canvas.evaluate("canvas => canvas.width") / box["width"]
    at = [(round(box["x"] + x / size), round(box["y"] + y / size)) for x, y in stroke]
    page.mouse.move(*at[0])
    page.mouse.down()
    for x, y in at[1:]:
        page.mouse.move(x, y)
    page.mouse.up()
    return [((x - box["x"]) * size, (y - box["y"]) * size) for x, y in at]


def sent_mask(request: Request) -> NDArray[np.bool_]:
    """The mask that the page sent with an edit."""
    document = json.loads(request.post_data_json["data"][0])
    bits = np.frombuffer(base64.b64decode(document["mask"]), np.uint8)
    return np.unpackbits(bits).reshape(document["height"], document["width"]).astype(bool)


def is_edit(request: Request) -> bool:
    return "queue/join" in request.url and '\\"mask\\"' in (request.post_data or "")
