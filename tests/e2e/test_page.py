"""`maskserve web` in a real browser: paint, submit, and the picture comes."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from maskserve_client import Masks
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="page: there is no chromium"),
    pytest.mark.timeout(180),
]
SIDE = 256
FLAGS = ["--no-sandbox"]
"""Chromium as root, in a container, without a GPU."""
STROKE = [(100 + 5 * step, 128 + 4 * (step % 3)) for step in range(12)]
"""Where the mouse goes, in pixels of the picture."""
FIRST_PAINT_MS = 2000
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def address(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(worker.grpc_url, tmp_path_factory.mktemp("pictures")) as url:
        yield url


@contextmanager
def served(server: str, folder: Path, *more: str) -> Iterator[str]:
    """The page of a worker or router, with one picture."""
    Image.fromarray(scene(SIDE, SIDE)).save(folder / "scene.png")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    program = Path(sys.executable).with_name("maskserve")
    command = [program, "web", "--url", server, "--port", str(port), "--images", folder, *more]
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
    with opened(browser, address) as made:
        yield made


@contextmanager
def opened(browser: Browser, address: str) -> Iterator[Page]:
    """The page in a tab, which asks nobody but its server."""
    made = browser.new_page(viewport={"width": 1500, "height": 1100})
    made.set_default_timeout(60_000)
    elsewhere: list[str] = []
    local = (address, "data:", "blob:", "about:")
    made.on("request", lambda r: None if r.url.startswith(local) else elsewhere.append(r.url))
    made.goto(address)
    made.wait_for_selector("#editor .painter")
    yield made
    made.close()
    assert elsewhere == []


def pick(page: Page) -> None:
    """Take the first picture, and wait until it can be painted on."""
    page.locator("#pictures .thumbnail-item").first.click()
    expect(page.locator("#editor .said")).to_contain_text(f"{SIDE} × {SIDE}")


def paint(page: Page, stroke: list[tuple[int, int]] = STROKE) -> list[tuple[float, float]]:
    """A stroke over the middle; where it went, in pixels of the picture."""
    canvas = page.locator("#editor .paint")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    at = [(round(box["x"] + x * box["width"] / SIDE), round(box["y"] + y * box["height"] / SIDE))
          for x, y in stroke]  # fmt: skip
    page.mouse.move(*at[0])
    page.mouse.down()
    for x, y in at[1:]:
        page.mouse.move(x, y)
    page.mouse.up()
    return [
        ((x - box["x"]) * SIDE / box["width"], (y - box["y"]) * SIDE / box["height"]) for x, y in at
    ]


def stroked(points: list[tuple[float, float]], radius: float) -> NDArray[np.bool_]:
    """The pixels whose centres are within `radius` of the line through the points."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    near = np.zeros((SIDE, SIDE), bool)
    for (ax, ay), (bx, by) in zip([points[0], *points], points, strict=False):
        dx, dy = bx - ax, by - ay
        length = dx * dx + dy * dy
        t = np.clip(((x - ax) * dx + (y - ay) * dy) / length, 0, 1) if length else 0.0
        near |= (x - ax - t * dx) ** 2 + (y - ay - t * dy) ** 2 <= radius**2
    return near


def sent_mask(request: Request) -> NDArray[np.bool_]:
    """The mask that the page gave with an edit."""
    told = json.loads(request.post_data_json["data"][0])
    assert (told["width"], told["height"]) == (SIDE, SIDE)
    bits = np.frombuffer(base64.b64decode(told["mask"]), np.uint8)
    return np.unpackbits(bits).reshape(SIDE, SIDE).astype(bool)


def is_edit(request: Request) -> bool:
    return "queue/join" in request.url and '\\"mask\\"' in (request.post_data or "")


def test_the_page_is_seen_within_two_seconds(page: Page) -> None:
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted < FIRST_PAINT_MS


def test_the_painted_mask_is_exact(page: Page) -> None:
    pick(page)
    points = paint(page)
    radius = float(page.locator("#editor .size").input_value()) / 2
    with page.expect_request(is_edit) as sent:
        page.locator("#run").click()
    expected = stroked(points, radius)
    assert 0 < expected.sum() < SIDE * SIDE / 4
    assert np.array_equal(sent_mask(sent.value), expected)
    shown = page.evaluate(
        """() => { const c = document.querySelector("#editor .paint");
        const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return Array.from(data.filter((_, i) => i % 4 == 3), (a) => a > 0 ? 1 : 0); }"""
    )
    assert np.array_equal(np.array(shown, bool).reshape(SIDE, SIDE), expected)
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_strokes_are_erased_and_taken_back_and_made_by_keys(page: Page) -> None:
    pick(page)
    first = stroked(paint(page), float(page.locator("#editor .size").input_value()) / 2)
    page.locator("#editor .erase").check()
    paint(page)
    page.locator("#run").click()
    expect(page.locator("#status")).to_contain_text("paint over what is to change")
    page.locator("#editor .undo").click()
    with page.expect_request(is_edit) as sent:
        page.locator("#run").click()
    assert np.array_equal(sent_mask(sent.value), first)
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    page.locator("#editor .erase").uncheck()
    page.locator("#editor .paint").focus()
    for key in ("Delete", " ", "ArrowRight", "ArrowDown", " "):
        page.keyboard.press(key)
    with page.expect_request(is_edit) as sent:
        page.locator("#run").click()
    size = float(page.locator("#editor .size").input_value())
    middle, step = SIDE / 2, size // 2
    way = [(middle, middle), (middle + step, middle), (middle + step, middle + step)]
    assert np.array_equal(sent_mask(sent.value), stroked(way, size / 2))
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_a_picture_of_ones_own_is_taken_and_another_file_is_not(page: Page) -> None:
    chosen = page.locator("#editor .file")
    chosen.set_input_files([{"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}])
    expect(page.locator("#editor .said")).to_contain_text("is not an image")
    own = scene(64, 96)
    file = {"name": "b.png", "mimeType": "image/png", "buffer": encode(Image.fromarray(own))}
    chosen.set_input_files([file])
    expect(page.locator("#editor .said")).to_contain_text("96 × 64")


def test_a_mask_is_painted_and_the_picture_comes(page: Page, tmp_path: Path) -> None:
    pick(page)
    paint(page)
    expect(page.locator("#done")).not_to_be_visible()
    expect(page.locator("#stop")).not_to_be_visible()
    expect(page.locator("#chips")).to_have_count(0)  # words are of models that know few
    page.get_by_label("What is to be there").fill("a red star")
    page.keyboard.press("Enter")  # as good as the button
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    expect(page.locator("#stop")).not_to_be_visible()
    expect(page.locator("#run")).to_be_visible()
    line = page.get_by_label("from before to after")
    shown = page.locator(".compare")
    left = float((shown.get_attribute("style") or "").strip("-at: %;"))
    assert 0 < left < 100 * STROKE[0][0] / SIDE, "the line begins left of the edit"
    line.focus()
    page.keyboard.press("Home")
    assert (shown.get_attribute("style") or "").replace(" ", "") == "--at:0%;"
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


def test_without_a_router_that_segments_there_is_nothing_to_click(page: Page) -> None:
    pick(page)
    expect(page.locator("#editor .clicks")).not_to_be_visible()


def test_a_click_masks_what_lies_there_and_it_is_edited(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    from tests.fakes.tiny_nodes import build_segment

    build_segment(tmp_path / "segment")
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(
        f'[model]\ndevice = "cpu"\ntorch_threads = 1\n[nodes]\nsegment = "{tmp_path / "segment"}"\n'
    )
    base = free_base_port(2)
    options = ServeOptions(
        model=str(model),
        base_port=base,
        router=True,
        router_port=base + 10,
        nodes=nodes,
        log_dir=tmp_path / "logs",
        say=lambda _: None,
    )
    (tmp_path / "pictures").mkdir()
    with Supervisor(options) as site:
        assert site.router is not None
        url = f"http://127.0.0.1:{site.router.ports.http}"
        where = (tmp_path / "pictures", "--router", url)
        with served(site.router.grpc_url, *where) as address, opened(browser, address) as page:
            pick(page)
            page.locator("#editor .click").check()
            with page.expect_response(lambda answer: "component_server" in answer.url):
                [place] = paint(page, [(100, 140)])
            expect(page.locator("#editor .said")).to_contain_text(f"{SIDE} × {SIDE}")
            page.get_by_label("What is to be there").fill("a red star")
            with page.expect_request(is_edit) as sent:
                page.locator("#run").click()
            click = [math.floor(place[0]), math.floor(place[1]), 1]
            found = Masks(url).find(scene(SIDE, SIDE), points=[click]).mask
            white = np.asarray(Image.open(io.BytesIO(found)).convert("L")) > 127
            assert np.array_equal(sent_mask(sent.value), white)
            expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_it_is_used_at_the_width_of_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    pick(page)
    paint(page, STROKE[:2])
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 420


def test_scripts_of_other_origins_are_refused(address: str) -> None:
    for origin, status in ((address, 200), ("https://evil.example.com", 403)):
        request = urllib.request.Request(address, headers={"Origin": origin})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found, headers = answer.status, answer.headers
        except urllib.error.HTTPError as error:
            found, headers = error.code, error.headers
        assert found == status
        assert not any(name.lower().startswith("access-control") for name in headers)


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
