"""Windows: what they hold, what two edits share, and the pixels that diffusers would give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maskserve_common.config import Config
from maskserve_common.contracts.settings import CropMode, EditSettings
from maskserve_common.imaging.view import choose_view, window_round
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.facts import FILL_FACTS
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
    # The grid makes it longer by less than two of its cells, of which a window has eight or more.
    for length, side in ((window.height, height), (window.width, width)):
        assert length <= min(side, max(native, (longest + 2 * margin) * 1.5 + 2))


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
    assert shared > 10, "without a grid none of them would be shared"


@pytest.mark.parametrize("side", [150, 400])
def test_a_windows_pixels_are_those_of_diffusers(side: int) -> None:
    """Where its rule names the same region: a mask on the grid, and the model's aspect."""
    native, cell = 128, 32 if side == 400 else 16
    facts = replace(FILL_FACTS, native_resolution=native)
    source, mask = scene(700, 900), np.zeros((700, 900), np.uint8)
    length = side // cell * cell
    mask[5 * cell : 5 * cell + length, 4 * cell : 4 * cell + length] = 255
    settings = EditSettings(crop_padding=float(cell), crop_to_mask="on")
    prepared_edit = prepare_edit(
        encode(source), encode(mask), accept_edit(settings, b"x", facts, Config()), facts, Config()
    )
    assert prepared_edit.request.window is not None
    top, left, height, width = prepared_edit.request.window
    to = prepared_edit.request.model_size
    processor = VaeImageProcessor(vae_scale_factor=8, do_normalize=False)
    box = processor.get_crop_region(Image.fromarray(mask), to[1], to[0], pad=cell)
    assert box == (left, top, left + width, top + height)
    pixels = processor.preprocess(
        Image.fromarray(source), *to, crops_coords=box, resize_mode="fill"
    )
    np.testing.assert_array_equal(
        prepared_edit.pixels, np.round(pixels[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    )
