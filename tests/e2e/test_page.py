"""`maskserve web` in a real browser: paint, submit, and the picture comes."""

from __future__ import annotations

import io
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import scene
from tests.support.eventually import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="page: there is no chromium"),
    pytest.mark.timeout(180),
]
SIDE = 256
FLAGS = ["--no-sandbox", "--use-gl=swiftshader", "--enable-webgl", "--ignore-gpu-blocklist"]
"""Chromium as root, in a container, without a GPU."""


@pytest.fixture(scope="module")
def address(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("pictures")
    Image.fromarray(scene(SIDE, SIDE)).save(folder / "scene.png")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    program = Path(sys.executable).with_name("maskserve")
    command = [program, "web", "--url", worker.grpc_url, "--port", str(port), "--images", folder]
    page = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        eventually("the page answers", lambda: answers(port), 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        page.send_signal(signal.SIGINT)
        told, _ = page.communicate(timeout=30)
    assert "Traceback" not in told


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    made = browser.new_page(viewport={"width": 1500, "height": 1100})
    made.set_default_timeout(60_000)
    elsewhere: list[str] = []
    local = (address, "data:", "blob:", "about:")
    made.on("request", lambda r: None if r.url.startswith(local) else elsewhere.append(r.url))
    made.goto(address)
    made.wait_for_selector("#run")
    yield made
    made.close()
    assert elsewhere == []


def pick(page: Page) -> None:
    """Take the first picture, and wait until it can be painted on."""
    page.locator("#pictures .thumbnail-item").first.click()
    page.wait_for_timeout(2500)


def paint(page: Page) -> None:
    """A stroke over the middle."""
    box = page.locator("#editor canvas").first.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x - 30, y)
    page.mouse.down()
    for step in range(12):
        page.mouse.move(x - 30 + 5 * step, y + 4 * (step % 3))
    page.mouse.up()
    page.wait_for_timeout(800)


def test_a_mask_is_painted_and_the_picture_comes(page: Page, tmp_path: Path) -> None:
    pick(page)
    paint(page)
    page.get_by_label("What is to be there").fill("a red star")
    page.keyboard.press("Enter")  # as good as the button
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    facts = page.locator("#facts")
    expect(facts).to_contain_text("steps")
    expect(facts).to_contain_text("denoise")
    expect(facts).to_contain_text("of the tokens were computed")
    with page.expect_download() as begun:
        page.locator("#download").click()
    edited = np.asarray(Image.open(io.BytesIO(Path(begun.value.path()).read_bytes())))
    source = scene(SIDE, SIDE)
    changed = (edited != source).any(axis=2)
    assert changed.any()
    assert not changed[:40].any()  # far from the stroke, every pixel is the source's
    assert not changed[-40:].any()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    shown = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) > 500


def test_the_result_can_be_gone_on_with_and_undone(page: Page) -> None:
    pick(page)
    paint(page)
    page.get_by_label("What is to be there").fill("a blue circle")
    page.locator("#run").click()
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    undo = page.locator("#undo")
    expect(undo).to_be_disabled()
    page.get_by_role("button", name="Go on with this picture").click()
    expect(undo).to_be_enabled()
    undo.click()
    expect(undo).to_be_disabled()


def test_errors_are_sentences(page: Page) -> None:
    status = page.locator("#status")
    page.locator("#run").click()
    expect(status).to_contain_text("there is none yet")
    pick(page)
    page.locator("#run").click()
    expect(status).to_contain_text("paint over what is to change")
    paint(page)
    page.get_by_role("button", name="More").click()
    page.get_by_label("LoRAs").fill("no-such")
    page.locator("#run").click()
    expect(status).to_contain_text("That did not work.")
    expect(status).not_to_contain_text("Traceback")
