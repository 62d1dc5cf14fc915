"""The page's canvas by itself in a browser, with a photograph of 12 megapixels."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Page, sync_playwright

import maskserve_page
from tests.fakes.pictures import encode

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FOLDER = Path(maskserve_page.__file__).parent
WIDTH, HEIGHT = 4000, 3000
LOAD = """async ([code, mask, width, height]) => {
  const element = document.body, props = { value: "" }, asked = [];
  const server = { find: async (given) => (asked.push(given), { mask }) };
  let changed;
  new Function("element", "props", "server", "watch", code)(
    element, props, server, (name, told) => (changed = told));
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").fillRect(0, 0, width, height);
  const url = URL.createObjectURL(await canvas.convertToBlob({ type: "image/jpeg" }));
  props.value = JSON.stringify({ name: "photo", url });
  changed();
  Object.assign(window, { props, asked });
}"""


def canvas_mask(page: Page) -> NDArray[np.bool_]:
    """The mask that the canvas sends to the page."""
    value: dict[str, Any] = json.loads(page.evaluate("props.value"))
    assert (value["name"], value["width"], value["height"]) == ("photo", WIDTH, HEIGHT)
    bits = np.frombuffer(base64.b64decode(value["mask"]), np.uint8)
    return np.unpackbits(bits).reshape(HEIGHT, WIDTH).astype(bool)


@pytest.mark.skipif(CHROMIUM is None, reason="page: there is no chromium")
@pytest.mark.timeout(300)
def test_a_click_masks_a_thing_of_a_large_photograph_and_is_taken_back() -> None:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    thing = (x - 2500) ** 2 + (y - 1200) ** 2 < 700**2
    mask = base64.b64encode(encode(thing.astype(np.uint8) * 255)).decode()
    html = (FOLDER / "painter.html").read_text().replace("{least}", "0").replace("{clicks}", "")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(120_000)
        page.set_content(f"<style>{(FOLDER / 'page.css').read_text()}</style>{html}")
        code = "".join((FOLDER / name).read_text() for name in ("files.js", "painter.js"))
        page.evaluate(LOAD, [code, mask, WIDTH, HEIGHT])
        page.wait_for_function("props.value.includes('mask')")
        assert not canvas_mask(page).any()
        page.locator(".click").check()
        canvas = page.locator(".paint")
        box = canvas.bounding_box()
        assert box is not None
        place = {"x": box["width"] / 2, "y": box["height"] / 2}
        canvas.click(position=place)
        page.wait_for_function("document.querySelector('.said').textContent.includes('pixels')")
        np.testing.assert_array_equal(canvas_mask(page), thing)
        [click] = page.evaluate("asked")
        assert click["name"] == "photo"
        assert abs(click["x"] - WIDTH / 2) < 20
        assert abs(click["y"] - HEIGHT / 2) < 20
        page.locator(".clear").click()
        assert not canvas_mask(page).any()
        for painted in (thing, np.zeros_like(thing)):
            page.locator(".undo").click()
            np.testing.assert_array_equal(canvas_mask(page), painted)
        page.locator(".invert").click()
        assert canvas_mask(page).all()
        page.locator(".undo").click()
        page.locator(".what").fill("a thing")
        page.locator(".seek").click()
        page.wait_for_function("document.querySelector('.said').textContent.includes('pixels')")
        np.testing.assert_array_equal(canvas_mask(page), thing)
        assert page.evaluate("asked.at(-1)") == {"name": "photo", "text": "a thing"}
        check_extension(page, thing)
        browser.close()


def check_extension(page: Page, mask: NDArray[np.bool_]) -> None:
    """The picture grows by its handles, and the mask stays where it is on the picture."""

    def margins() -> list[int]:
        value: list[int] = json.loads(page.evaluate("props.value"))["expand"]
        return value

    assert margins() == [0, 0, 0, 0]
    canvas = page.locator(".paint")
    before = canvas.bounding_box()
    box = page.locator(".handle[data-side='2']").bounding_box()
    assert before is not None
    assert box is not None
    page.mouse.move(box["x"] + 2, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + 2 + before["width"] / 4, box["y"] + 9)
    page.mouse.up()
    assert abs(margins()[2] - WIDTH / 4) <= 8
    page.locator(".handle[data-side='1']").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    right = margins()[2]
    assert margins() == [0, 32, right, 0]
    after = canvas.bounding_box()
    assert after is not None
    # The whole is as wide as the picture was, and the canvas has its part.
    assert abs(after["width"] / before["width"] - WIDTH / (WIDTH + right)) < 0.01
    np.testing.assert_array_equal(canvas_mask(page), mask)
    page.locator(".larger").click()
    zoomed = canvas.bounding_box()
    assert zoomed is not None
    assert abs(zoomed["width"] / after["width"] - 1.5) < 0.05
