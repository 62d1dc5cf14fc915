"""Windows: what they hold, what two edits share, and the pixels that diffusers would give."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maskserve_common.config import Config
from maskserve_common.contracts.settings import CropMode, EditSettings
from maskserve_common.imaging.view import Window, choose_view, lattice_span, window_round
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import encode, scene
from tests.support.draws import fresh_rng

sides = st.integers(1, 5000)


def spans(side: int) -> st.SearchStrategy[tuple[int, int]]:
    pairs = st.tuples(st.integers(0, side), st.integers(0, side))
    return pairs.map(lambda pair: (min(pair), max(pair))).filter(lambda span: span[0] < span[1])


@given(st.data(), sides, sides, st.sampled_from([64, 128, 512, 768, 1024]), st.floats(0, 300))
def test_a_window_holds_mask_and_padding_and_lies_in_the_picture(
    data: st.DataObject, height: int, width: int, native: int, padding: float
) -> None:
    rows, columns = data.draw(spans(height)), data.draw(spans(width))
    window = window_round(rows, columns, (height, width), native, "on", padding)
    longest = max(rows[1] - rows[0], columns[1] - columns[0])
    margin = int(np.ceil(padding * longest)) if padding < 1 else round(padding)
    assert 0 <= window.top <= max(0, rows[0] - margin)
    assert 0 <= window.left <= max(0, columns[0] - margin)
    assert min(height, rows[1] + margin) <= window.bottom <= height
    assert min(width, columns[1] + margin) <= window.right <= width
    assert window.height >= min(height, native)
    assert window.width >= min(width, native)
    # An eighth of a length is left over for the lattice's places, and lengths grow by a quarter.
    for length, side in ((window.height, height), (window.width, width)):
        assert length <= min(side, max(native, (longest + 2 * margin) * 1.5 + 16))


def lengths(side: int, native: int) -> list[int]:
    """Lengths of a side's lattice."""
    lattice = [min(native, side)]
    while lattice[-1] < side:
        lattice.append(min(side, math.ceil(lattice[-1] * 1.25)))
    return lattice


@given(st.data(), sides, st.sampled_from([64, 128, 500, 768, 1024]))
def test_a_span_is_the_shortest_of_its_sides_lattice(
    data: st.DataObject, side: int, native: int
) -> None:
    low, high = data.draw(spans(side))
    start, end = lattice_span((low, high), side, native)
    length = end - start
    assert start <= low
    assert high <= end <= side
    assert length in lengths(side, native)
    assert start % (length // 8 or 1) == 0 or end == side
    for shorter in lengths(side, native):
        if shorter < length:
            for at in (*range(0, side - shorter, shorter // 8 or 1), side - shorter):
                assert not (at <= low and high <= at + shorter)
    for coarse in (length // 8 * 4, length // 8 * 2):
        if coarse and start % coarse and end != side:
            for at in range(0, side - length, coarse):
                assert not (at <= low and high <= at + length)


@pytest.mark.parametrize("part", [0.05, 0.4, 0.9, 1.2, 1.5, 2.5])
def test_masks_at_all_places_of_a_side_have_few_spans(part: float) -> None:
    native, side = 256, 2000
    mask = round(part * native)
    places = {lattice_span((at, at + mask), side, native) for at in range(side - mask + 1)}
    # A mask up to half as long as the model's side is held at multiples of a half.
    most = 2 * side / native if part <= 0.5 else 16 * side / native
    assert len(places) <= most


def random_windows(count: int) -> list[Window]:
    """Windows of masks of a ninth of a picture, at random places; the picture is twice as long as
    the model's side.
    """
    rng, native = fresh_rng(), 128
    side, mask = 2 * native, 2 * native // 3
    places = rng.integers(0, side - mask + 1, (count, 2))
    windows = (
        window_round((y, y + mask), (x, x + mask), (side, side), native, "auto", 0.25)
        for y, x in places.tolist()
    )
    return list(windows)


def test_many_edits_of_a_picture_have_few_windows() -> None:
    assert len(set(random_windows(1000))) <= 64


@pytest.mark.parametrize(
    ("mode", "size", "mask", "windowed"),
    [
        ("auto", (3000, 4000), 900, True),
        ("auto", (3000, 4000), 2500, False),  # not under half of the picture
        ("auto", (1024, 1024), 100, False),  # not larger than the model's area
        ("auto", (1100, 1100), 100, False),  # native resolution is most of it
        ("on", (1024, 1100), 100, True),
        ("on", (900, 900), 100, False),
        ("off", (3000, 4000), 900, False),
    ],
)
def test_when_there_is_a_window(
    mode: CropMode, size: tuple[int, int], mask: int, *, windowed: bool
) -> None:
    selected = np.zeros(size, bool)
    selected[40 : 40 + mask, 30 : 30 + mask] = True
    view = choose_view(selected, EditSettings(crop_to_mask=mode), 1024, 16)
    assert view.is_part is windowed
    assert view.size[0] * view.size[1] <= 1024**2


def test_edits_near_one_another_share_their_window() -> None:
    """A brush of 200 pixels, moved over a photograph of 12 megapixels by up to 100 pixels."""
    rng = fresh_rng()
    shared = 0
    for _ in range(200):
        y, x = (int(n) for n in rng.integers(600, 2200, 2))
        dy, dx = (int(n) for n in rng.integers(-100, 101, 2))
        first, second = (
            window_round((a, a + 200), (b, b + 200), (3000, 4000), 1024, "auto", 0.25)
            for a, b in ((y, x), (y + dy, x + dx))
        )
        shared += first == second
    assert shared > 120, "windows of the grid before it were shared by 70"


@pytest.mark.parametrize("side", [160, 392])
def test_a_windows_pixels_are_those_of_diffusers(side: int) -> None:
    """Where its rule names the same region: a span of the lattice, and the model's aspect."""
    native, padding = 128, 16
    spec = replace(FILL_SPEC, native_resolution=native)
    source, mask = scene(700, 900), np.zeros((700, 900), np.uint8)
    rows, columns = (side // 4, side // 4 + side), (side // 2, side // 2 + side)
    inner = tuple(slice(low + padding, high - padding) for low, high in (rows, columns))
    mask[inner] = 255
    settings = EditSettings(crop_padding=float(padding), crop_to_mask="on")
    prepared_edit = prepare_edit(
        encode(source), encode(mask), accept_edit(settings, b"x", spec, Config()), spec, Config()
    )
    assert prepared_edit.request.window is not None
    top, left, height, width = prepared_edit.request.window
    assert (top, top + height, left, left + width) == (*rows, *columns)
    to = prepared_edit.request.model_size
    processor = VaeImageProcessor(vae_scale_factor=8, do_normalize=False)
    box = processor.get_crop_region(Image.fromarray(mask), to[1], to[0], pad=padding)
    assert box == (left, top, left + width, top + height)
    pixels = processor.preprocess(
        Image.fromarray(source), *to, crops_coords=box, resize_mode="fill"
    )
    np.testing.assert_array_equal(
        prepared_edit.pixels, np.round(pixels[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    )
