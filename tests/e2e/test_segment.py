"""Masks that nobody paints, by every door; a click edits a photograph at its own sharpness."""

from __future__ import annotations

import base64
import io
import json
import math
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import expect

from maskserve_benchmarks.demo_model.palette import COLOURS, coverage
from maskserve_benchmarks.demo_model.scenes import PHOTOS
from maskserve_client import Client, InvalidRequest, Masks
from maskserve_client.cli import main as command_line
from maskserve_studies.demo_model.judge import judge
from maskserve_studies.demo_model.named_scenes import iou
from tests.fakes.pictures import encode
from tests.support.calls import Grpc, edit_inputs, pixels
from tests.support.clone import Clone
from tests.support.draws import fresh_rng
from tests.support.page import (
    chromium,
    is_edit,
    needs_browser,
    opened,
    paint,
    pick,
    sent_mask,
    served,
)

NATIVE = 128
"""Side of the square that the demo model sees."""


def photograph(width: int, height: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """[H, W, 3] with the grain of its size and a blue circle on it, and where that is."""
    grain = fresh_rng().normal(0, 4, (height, width, 1)).astype(np.float32)
    with Image.open(PHOTOS / "coffee.jpg") as photo:
        sized = photo.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    centre = (0.275 * width, 0.3 * height)
    covers = coverage("circle", centre, 0.14 * height, (height, width))
    blue = np.asarray(COLOURS["blue"], np.float32)
    composite = np.asarray(sized) * (1 - covers[..., None]) + blue * covers[..., None] + grain
    return composite.clip(0, 255).astype(np.uint8), covers > 0.5


@pytest.mark.timeout(300)
@needs_browser
def test_a_click_and_a_prompt_edit_a_large_photograph_at_its_own_sharpness(
    demo: Clone, tmp_path: Path
) -> None:
    (width, height), url = (2400, 1800), f"http://127.0.0.1:{demo.router}"
    grpc_url, place = f"127.0.0.1:{demo.router + 1}", tmp_path / "photo.jpg"
    photo, covers = photograph(width, height)
    Image.fromarray(photo).save(place, quality=90)
    source = pixels(place.read_bytes())
    with (
        served(grpc_url, tmp_path, "--router", url) as address,
        chromium() as browser,
        opened(browser, address) as page,
    ):
        pick(page, width, height)
        page.locator("#editor .click").check()
        with page.expect_response(lambda answer: "component_server" in answer.url):
            [click] = paint(page, [(660, 540)])
        expect(page.locator("#editor .said")).to_contain_text(f"{width} × {height}")
        page.get_by_label("What to paint there").fill("a red star")
        with page.expect_request(is_edit) as request_info:
            page.locator("#run").click()
        expect(page.locator("#status")).to_contain_text("done", timeout=120_000)
        details = page.locator("#edit-details")
        expect(details).to_contain_text("pixels around the mask")
        with page.expect_download() as begun:
            page.locator("#download").click()
        details_text, edited = details.inner_text(), pixels(Path(begun.value.path()).read_bytes())
        mask = sent_mask(request_info.value)
    point = [math.floor(click[0]), math.floor(click[1]), 1]
    mask_result = Masks(url).find(place, points=[point])
    assert mask_result.score is not None
    assert mask_result.score > 0.5
    assert np.array_equal(pixels(mask_result.mask)[..., 0] > 127, mask)
    assert iou(mask, covers) > 0.8
    assert edited.shape == source.shape
    assert np.array_equal(edited[~mask], source[~mask])
    assert judge(edited, source, mask).colour == "red"
    # The same by another door, which has META.
    with Client(grpc_url) as client:
        meta = client.edit(
            place, encode(mask.astype(np.uint8) * 255), "a red star", num_inference_steps=2
        ).meta
    left, top, right, bottom = meta["window"]["box"]
    assert f"saw {right - left} × {bottom - top} pixels around the mask" in details_text
    rows, columns = np.nonzero(mask)
    assert left <= columns.min() <= columns.max() < right
    assert top <= rows.min() <= rows.max() < bottom
    assert 2 * (right - left) * (bottom - top) < width * height
    window_scale = NATIVE / math.sqrt((right - left) * (bottom - top))
    assert meta["window"]["scale"] == pytest.approx(window_scale, rel=0.15)
    assert window_scale > 2 * NATIVE / math.sqrt(width * height), "without a window it is coarser"


def test_all_doors_find_the_same_mask_and_edit_by_it(demo: Clone, tmp_path: Path) -> None:
    url, grpc_url = f"http://127.0.0.1:{demo.router}", f"127.0.0.1:{demo.router + 1}"
    photo, covers = photograph(300, 200)
    picture = encode(photo)
    clicked = {"points": [[82, 60, 1], [3, 3, 0]], "box": [40, 20, 140, 100]}
    form = {name: json.dumps(value) for name, value in clicked.items()}
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as client:
        files = {"image": ("a.png", picture)}
        [mask_item] = client.post("/masks", data=form, files=files).json()["data"]
        mask = base64.b64decode(mask_item["b64_json"])
        white = pixels(mask)[..., 0] > 127
        assert iou(white, covers) > 0.7
        outside = client.post("/masks", data={"points": "[[300, 3, 1]]"}, files=files)
        assert outside.status_code == 400
        assert "points[0]: is 300, 3" in outside.json()["error"]["message"]
        named = client.post("/masks", data={"text": "a blue circle"}, files=files).json()
        assert (
            iou(pixels(base64.b64decode(named["data"][0]["b64_json"]))[..., 0] > 127, covers) > 0.5
        )
        form_fields = {
            "prompt": "a red star",
            "seed": "5",
            "num_inference_steps": "2",
            "cache": "off",
        }
        by_openai = client.post(
            "/images/edits", data={**form_fields, "mask_from": json.dumps(clicked)}, files=files
        ).json()["data"][0]["b64_json"]
        none = client.post(
            "/images/edits", data={**form_fields, "mask_from": '{"text": "a boat"}'}, files=files
        )
        assert none.status_code == 400
        assert none.json()["error"]["param"] == "mask_from"
        assert "'a boat' is not found in the picture" in none.json()["error"]["message"]
    place, out = tmp_path / "a.png", tmp_path / "m.png"
    place.write_bytes(picture)
    words = ["mask", "--url", url, "--image", str(place), "--out", str(out)]
    words += ["--box", "40,20,140,100", "--click", "82,60", "--click", "3,3,0"]
    assert command_line(words) == 0
    assert out.read_bytes() == mask
    settings = {"seed": 5, "num_inference_steps": 2, "cache": "off"}
    with closing(Grpc(grpc_url)) as kserve, Client(grpc_url) as client:
        painted, _ = kserve.edit(edit_inputs(picture, mask, **settings, mask_mode="white"))
        by_kserve, _ = kserve.edit(edit_inputs(picture, b"", **settings, mask_from=clicked))
        by_python = client.edit(picture, None, "a red star", mask_from=clicked, **settings).encoded
        for edited in (by_kserve, by_python, base64.b64decode(by_openai)):
            assert np.array_equal(pixels(edited), pixels(painted))
        with pytest.raises(InvalidRequest, match=r"mask_from: name: 'a boat' is not found"):
            client.edit(picture, None, "a red star", mask_from={"text": "a boat"}, **settings)
    with Image.open(io.BytesIO(mask)) as opened_mask:
        assert opened_mask.size == (300, 200)
