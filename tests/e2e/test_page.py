"""`maskserve web` in a real browser: paint, submit, and the picture comes."""

from __future__ import annotations

import io
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, expect

from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import encode, scene
from tests.support.calls import LONG
from tests.support.page import (
    chromium,
    fill_opened,
    is_edit,
    needs_browser,
    opened,
    paint,
    pick,
    sent_mask,
    served,
)

pytestmark = needs_browser
SIDE = 256
STROKE = [(100 + 5 * step, 128 + 4 * (step % 3)) for step in range(12)]
"""Where the mouse goes, in pixels of the picture."""


@pytest.fixture(scope="module")
def address(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pictures = tmp_path_factory.mktemp("pictures")
    Image.fromarray(scene(SIDE, SIDE)).save(pictures / "scene.png")
    with served(worker.grpc_url, pictures) as url:
        yield url


@pytest.fixture(scope="module")
def address_of_klein(
    klein_worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The page of a model that has edits of all kinds."""
    pictures = tmp_path_factory.mktemp("pictures")
    Image.fromarray(scene(SIDE, SIDE)).save(pictures / "scene.png")
    with served(klein_worker.grpc_url, pictures) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as chromium_browser:
        yield chromium_browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with opened(browser, address) as opened_page:
        yield opened_page


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


def test_the_painted_mask_is_exact(page: Page) -> None:
    pick(page, SIDE, SIDE)
    points = paint(page, STROKE)
    radius = float(page.locator("#editor .size").input_value()) / 2
    with page.expect_request(is_edit) as request_info:
        page.locator("#run").click()
    expected = stroked(points, radius)
    assert 0 < expected.sum() < SIDE * SIDE / 4
    assert np.array_equal(sent_mask(request_info.value), expected)
    painted_alpha = page.evaluate(
        """() => { const c = document.querySelector("#editor .paint");
        const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return Array.from(data.filter((_, i) => i % 4 == 3), (a) => a > 0 ? 1 : 0); }"""
    )
    assert np.array_equal(np.array(painted_alpha, bool).reshape(SIDE, SIDE), expected)
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_strokes_are_erased_and_taken_back_and_made_by_keys(page: Page) -> None:
    pick(page, SIDE, SIDE)
    first = stroked(paint(page, STROKE), float(page.locator("#editor .size").input_value()) / 2)
    page.locator("#editor .erase").check()
    paint(page, STROKE)
    page.locator("#run").click()
    expect(page.locator("#status")).to_contain_text("paint over what is to change")
    page.locator("#editor .undo").click()
    with page.expect_request(is_edit) as request_info:
        page.locator("#run").click()
    assert np.array_equal(sent_mask(request_info.value), first)
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    page.locator("#editor .erase").uncheck()
    page.locator("#editor .paint").focus()
    for key in ("Delete", " ", "ArrowRight", "ArrowDown", " "):
        page.keyboard.press(key)
    with page.expect_request(is_edit) as request_info:
        page.locator("#run").click()
    size = float(page.locator("#editor .size").input_value())
    middle, step = SIDE / 2, size // 2
    way = [(middle, middle), (middle + step, middle), (middle + step, middle + step)]
    assert np.array_equal(sent_mask(request_info.value), stroked(way, size / 2))
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_a_picture_of_ones_own_is_taken_and_another_file_is_not(page: Page) -> None:
    chosen = page.locator("#editor .file")
    chosen.set_input_files([{"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}])
    expect(page.locator("#editor .said")).to_contain_text("is not an image")
    picture = scene(64, 96)
    file = {"name": "b.png", "mimeType": "image/png", "buffer": encode(Image.fromarray(picture))}
    chosen.set_input_files([file])
    expect(page.locator("#editor .said")).to_contain_text("96 × 64")


def test_a_mask_is_painted_and_the_picture_comes(page: Page, tmp_path: Path) -> None:
    pick(page, SIDE, SIDE)
    paint(page, STROKE)
    expect(page.locator("#done")).not_to_be_visible()
    expect(page.locator("#stop")).not_to_be_visible()
    expect(page.locator("#chips")).to_have_count(0)  # words are of models that know few
    page.get_by_role("button", name="More").click()
    prompt, steps = page.get_by_label("What to paint there"), page.get_by_label("Steps")
    prompt.fill("a red star")
    fill_opened(steps, str(LONG["num_inference_steps"]))  # Stop has to be seen
    prompt.press("Enter")  # as good as the button
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    expect(page.locator("#stop")).not_to_be_visible()
    expect(page.locator("#run")).to_be_visible()
    line = page.get_by_label("from before to after")
    comparison = page.locator(".compare")
    divider_position = float((comparison.get_attribute("style") or "").strip("-at: %;"))
    assert 0 < divider_position < 100 * STROKE[0][0] / SIDE, "the line begins left of the edit"
    line.focus()
    page.keyboard.press("Home")
    expect(comparison).to_have_attribute("style", re.compile(r"^--at: ?0%;$"))
    details = page.locator("#edit-details")
    expect(details).to_contain_text("steps")
    expect(details).to_contain_text("denoise")
    expect(details).to_contain_text("of the work of a whole picture")
    with page.expect_download() as begun:
        page.locator("#download").click()
    edited = np.asarray(Image.open(io.BytesIO(Path(begun.value.path()).read_bytes())))
    source = scene(SIDE, SIDE)
    changed = (edited != source).any(axis=2)
    assert changed.any()
    assert not changed[:40].any()  # far from the stroke, every pixel is the source's
    assert not changed[-40:].any()
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    comparison = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    assert len(np.unique(comparison.reshape(-1, 3), axis=0)) > 500


def test_the_button_works_as_soon_as_it_is_back(page: Page) -> None:
    pick(page, SIDE, SIDE)
    paint(page, STROKE)
    page.evaluate(
        """() => {
        let hidden = false;
        const click_when_back = () => {
            const run = document.querySelector("#run");
            const visible = run !== null && run.checkVisibility({ visibilityProperty: true });
            if (visible && hidden) return run.click();
            hidden ||= !visible;
            requestAnimationFrame(click_when_back);
        };
        click_when_back();
        }"""
    )
    with page.expect_request(is_edit):
        page.locator("#run").click()
    with page.expect_request(is_edit):
        pass
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)


def test_the_result_can_be_gone_on_with_and_undone(page: Page) -> None:
    pick(page, SIDE, SIDE)
    paint(page, STROKE)
    page.get_by_label("What to paint there").fill("a blue circle")
    page.locator("#run").click()
    expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
    undo = page.locator("#undo")
    expect(undo).to_be_disabled()
    page.get_by_role("button", name="Go on with this picture").click()
    expect(undo).to_be_enabled()
    undo.click()
    expect(undo).to_be_disabled()
    # A picture that grows is edited where it is new, and earlier results can be chosen again.
    expect(page.locator("#history")).not_to_be_visible()
    handle = page.locator("#editor .handle[data-side='2']")
    handle.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#editor .said")).to_contain_text(f"extended to {SIDE + 64} × {SIDE}")
    page.locator("#run").click()
    expect(page.locator("#result .made")).to_be_visible(timeout=90_000)
    results = page.locator("#history .thumbnail-item")
    expect(results).to_have_count(2)
    for index, width in ((0, SIDE + 64), (1, SIDE)):
        results.nth(index).click()
        expect(page.locator("#editor .said")).to_contain_text(f"{width} × {SIDE} pixels")


def test_a_picture_is_made_and_edited_without_painting(
    browser: Browser, address_of_klein: str, tmp_path: Path
) -> None:
    with opened(browser, address_of_klein) as page:
        editor, result, brush = (
            page.locator(name) for name in ("#editor .stack", "#result", "#editor .brush")
        )
        expect(editor).to_be_visible()  # the tab Edit is open
        expect(brush).to_be_visible()
        expect(page.locator("#size")).not_to_be_visible()
        page.get_by_role("radio", name="Create").locator("..").click()
        expect(editor).not_to_be_visible()
        expect(page.locator("#pictures")).not_to_be_visible()
        expect(page.locator("#size")).to_be_visible()
        page.get_by_label("What to show").fill("a red star")
        page.get_by_role("button", name="Create").click()
        expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
        expect(result.locator("img")).to_have_count(1)
        first_url = result.locator("img").get_attribute("src")
        page.get_by_role("button", name="Go on with this picture").click()
        expect(editor).to_be_visible()
        expect(page.locator("#editor .said")).to_contain_text("pixels")
        page.get_by_role("radio", name="Instruct").locator("..").click()
        expect(brush).not_to_be_visible()
        expect(page.locator("#strength")).not_to_be_visible()  # it sees its source at every step
        page.get_by_label("What to change").fill("make it blue")
        page.locator("#run").click()
        expect(result.locator(".compare img")).to_have_count(2, timeout=90_000)
        assert result.locator("img").first.get_attribute("src") == first_url
        assert result.locator("img").last.get_attribute("src") != first_url
        page.get_by_role("radio", name="Edit").locator("..").click()
        expect(brush).to_be_visible()
        page.screenshot(path=tmp_path / "page.png", full_page=True)


def test_an_instruction_sees_further_pictures(
    browser: Browser, address_of_klein: str, tmp_path: Path
) -> None:
    files = []
    for seed in (1, 2):
        files.append(tmp_path / f"{seed}.png")
        Image.fromarray(scene(64, 64, seed)).save(files[-1])
    with opened(browser, address_of_klein) as page:
        references, result = page.locator("#references"), page.locator("#result")
        expect(references).not_to_be_visible()  # the tab Edit is open
        pick(page, SIDE, SIDE)
        page.get_by_role("radio", name="Instruct").locator("..").click()
        expect(references).to_be_visible()
        page.get_by_label("What to change").fill("a red star")
        page.get_by_role("button", name="More").click()
        page.get_by_label("New seed for each edit").uncheck()
        urls: list[str | None] = [None]

        def edit() -> None:
            page.locator("#run").click()
            last = result.locator(".compare img").last
            if urls[-1] is not None:
                expect(last).not_to_have_attribute("src", urls[-1], timeout=90_000)
            expect(page.locator("#status")).to_contain_text("done", timeout=90_000)
            urls.append(last.get_attribute("src"))

        edit()
        references.locator(".file").set_input_files(files)
        expect(references.locator("img")).to_have_count(2)
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        edit()
        references.get_by_role("button", name="Remove further picture 1").click()
        expect(references.locator("img")).to_have_count(1)
        edit()
        assert len(set(urls)) == len(urls)  # a picture's URL has the digest of its file
        page.get_by_role("radio", name="Create").locator("..").click()
        expect(references).not_to_be_visible()


def test_a_page_that_ends_leaves_no_stack_trace_of_open_tabs(
    browser: Browser, worker: WorkerProcess, tmp_path: Path
) -> None:
    """`served` looks for it. A tab listens to its page for as long as it is open."""
    Image.fromarray(scene(SIDE, SIDE)).save(tmp_path / "scene.png")
    with ExitStack() as tabs, served(worker.grpc_url, tmp_path) as url:
        tabs.enter_context(opened(browser, url))


def test_a_model_of_one_kind_has_no_tabs(page: Page) -> None:
    expect(page.locator("#kinds")).not_to_be_visible()


def test_without_a_router_that_segments_there_is_nothing_to_click(page: Page) -> None:
    pick(page, SIDE, SIDE)
    expect(page.locator("#editor .clicks")).not_to_be_visible()


def test_it_is_used_at_the_width_of_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    pick(page, SIDE, SIDE)
    paint(page, STROKE[:2])
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 420


@pytest.mark.parametrize("width", [390, 640, 700, 800, 1100, 1500])
def test_blocks_begin_in_one_line_and_no_button_wraps_alone(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    pick(page, SIDE, SIDE)

    def box(selector: str) -> FloatRect:
        bounds = page.locator(selector).first.bounding_box()
        assert bounds is not None
        return bounds

    left = box("#editor .stack")["x"]
    for block in (".ask", ".caption", ".head h1"):
        assert abs(box(block)["x"] - left) <= 1, block
    assert box("#editor .clear")["y"] == box("#editor .undo")["y"]


def test_captions_are_dark_enough_to_read(page: Page) -> None:
    """Opacities of nested elements multiply: the captions had .56, a contrast of 3.6."""
    shares = page.locator(".caption, .head p, #editor .said").evaluate_all(
        """elements => elements.map((element) => {
        let share = 1;
        for (let e = element; e; e = e.parentElement) share *= getComputedStyle(e).opacity;
        return share; })"""
    )
    assert len(shares) >= 3
    assert min(shares) >= 0.7


def test_all_that_the_page_names_is_there(browser: Browser, address: str) -> None:
    page = browser.new_page()
    missing: list[str] = []
    page.on("response", lambda r: missing.append(r.url) if r.status >= 400 else None)
    page.goto(address)
    page.wait_for_selector("#editor .painter")
    page.close()
    for path in ("manifest.json", "favicon.ico", "pwa_icon"):
        with urllib.request.urlopen(f"{address}/{path}", timeout=10) as answer:
            assert answer.status == 200
    assert missing == []


def test_scripts_of_other_origins_are_refused(address: str) -> None:
    for origin, status in ((address, 200), ("https://evil.example.com", 403)):
        request = urllib.request.Request(address, headers={"Origin": origin})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                status_code, headers = answer.status, answer.headers
        except urllib.error.HTTPError as error:
            status_code, headers = error.code, error.headers
        assert status_code == status
        assert not any(name.lower().startswith("access-control") for name in headers)


def test_errors_are_sentences(page: Page) -> None:
    status = page.locator("#status")
    page.locator("#run").click()
    expect(status).to_contain_text("There is no picture yet: choose, paste or drop one")
    pick(page, SIDE, SIDE)
    page.locator("#run").click()
    expect(status).to_have_text("Nothing is masked yet: paint over what is to change.")
    paint(page, STROKE)
    page.get_by_role("button", name="More").click()
    page.get_by_label("LoRAs").fill("no-such")
    page.locator("#run").click()
    expect(status).to_contain_text("That did not work.")
    expect(status).not_to_contain_text("Traceback")
