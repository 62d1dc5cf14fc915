"""Outside the mask the answer is the source, bit for bit."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import png as pypng
import pytest
from PIL import Image

from maskserve_common.config import Config
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit, source_and_weights
from maskserve_triton.preprocess import DECODED_PIXELS, PreparedEdit, prepare_edit
from tests.fakes.corpus.encoding import GREY, GREY_ALPHA, RGB, RGBA, png
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import OddImage, blob_mask, encode, odd_images, scene
from tests.support.draws import fresh_rng

SPEC = replace(FILL_SPEC, native_resolution=64)
SIZES = [(64, 64), (45, 61), (61, 45), (1, 1), (3, 200), (200, 3), (97, 131), (64, 65)]


Prepare = Callable[..., PreparedEdit]


@pytest.fixture(params=["pixels", "files"])
def prepare(request: pytest.FixtureRequest) -> Prepare:
    """How source and weights come from preprocess: small ones as pixels, large ones as files."""
    decoded = DECODED_PIXELS if request.param == "pixels" else 0

    def prepare(image: bytes, mask: np.ndarray | None, **settings: Any) -> PreparedEdit:
        accepted = accept_edit(EditSettings(**settings), b"x", SPEC, Config())
        drawn = b"" if mask is None else encode(mask)
        return prepare_edit(image, drawn, accepted, SPEC, Config(), decoded_pixels=decoded)

    return prepare


def finish(done: PreparedEdit, colour: tuple[int, int, int]) -> np.ndarray:
    """The answer's pixels if the model had painted all of its own in one colour."""
    painted = np.empty_like(done.pixels)
    painted[:] = colour
    answer = finish_edit(painted, done.context)
    opened = Image.open(io.BytesIO(answer))
    assert opened.mode == ("RGBA" if done.request.alpha else "RGB")
    return np.asarray(opened)[..., :3]


def check_outside(answer: np.ndarray, source: np.ndarray, mask: np.ndarray) -> None:
    outside = mask < 128
    np.testing.assert_array_equal(answer[outside], source[outside])
    assert (answer[~outside] == (250, 3, 120)).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_outside_is_bit_exact_at_any_size(
    prepare: Prepare, size: tuple[int, int], output_format: str
) -> None:
    source, mask = scene(*size), blob_mask(*size)
    prepared_edit = prepare(encode(source), mask, output_format=output_format)
    check_outside(finish(prepared_edit, (250, 3, 120)), source, mask)


@pytest.mark.parametrize("odd", odd_images(), ids=lambda odd: odd.name)
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_outside_is_the_decoded_upright_source(
    prepare: Prepare, odd: OddImage, output_format: str
) -> None:
    mask = blob_mask(*odd.pixels.shape[:2])
    prepared_edit = prepare(odd.encoded, mask, output_format=output_format)
    check_outside(finish(prepared_edit, (250, 3, 120)), odd.pixels, mask)


@pytest.mark.parametrize("at", [(0, 0), (44, 60), (0, 60), (20, 31)])
def test_a_mask_of_one_pixel_changes_one_pixel(prepare: Prepare, at: tuple[int, int]) -> None:
    source, mask = scene(45, 61), np.zeros((45, 61), np.uint8)
    mask[at] = 255
    answer = finish(prepare(encode(source), mask), (250, 3, 120))
    check_outside(answer, source, mask)


@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_holes_in_a_mask_stay_as_they_were(prepare: Prepare, output_format: str) -> None:
    mask = (fresh_rng().random((45, 61)) < 0.3).astype(np.uint8) * np.uint8(255)
    source = scene(45, 61)
    answer = finish(prepare(encode(source), mask, output_format=output_format), (250, 3, 120))
    check_outside(answer, source, mask)


def test_an_all_white_mask_keeps_nothing(prepare: Prepare) -> None:
    mask = np.full((45, 61), 255, np.uint8)
    answer = finish(prepare(encode(scene(45, 61)), mask), (250, 3, 120))
    assert (answer == (250, 3, 120)).all()


def test_what_a_model_left_transparent_shows_the_source(prepare: Prepare) -> None:
    source = np.full((64, 64, 3), 200, np.uint8)
    prepared_edit = prepare(encode(source), np.full((64, 64), 255, np.uint8))
    painted = np.zeros((*prepared_edit.pixels.shape[:2], 4), np.uint8)
    painted[:32, :, 3], painted[32:48, :, 3] = 255, 51
    answer = np.asarray(Image.open(io.BytesIO(finish_edit(painted, prepared_edit.context))))[
        ..., :3
    ]
    for rows, expected in ((slice(0, 32), 0), (slice(32, 48), 160), (slice(48, 64), 200)):
        assert (answer[rows] == expected).all()


def test_the_feather_mixes_by_its_weights(prepare: Prepare) -> None:
    source = np.full((40, 60, 3), 200, np.uint8)
    prepared_edit = prepare(encode(source), blob_mask(40, 60), mask_dilate=2, mask_feather=6)
    weights = np.asarray(
        source_and_weights(prepared_edit.context, prepared_edit.request)[1]
    ).astype(float)
    assert len(np.unique(weights)) > 5
    answer = finish(prepared_edit, (100, 0, 255))
    expected = 200 + (np.array([100, 0, 255]) - 200) * weights[..., None] / 255
    np.testing.assert_allclose(answer, expected, atol=1)
    np.testing.assert_array_equal(answer[weights == 0], 200)
    assert (answer[weights == 255] == (100, 0, 255)).all()


def test_inside_is_the_models_picture_brought_to_size(prepare: Prepare) -> None:
    source = scene(150, 90)
    prepared_edit = prepare(encode(source), np.full((150, 90), 255, np.uint8))
    assert prepared_edit.pixels.shape[:2] != (150, 90)
    small = Image.fromarray(scene(6, 5)).resize(
        prepared_edit.pixels.shape[1::-1], Image.Resampling.BICUBIC
    )
    answer = finish_edit(np.asarray(small), prepared_edit.context)
    expected = np.asarray(small.resize((90, 150), Image.Resampling.LANCZOS)).astype(int)
    assert np.abs(np.asarray(Image.open(io.BytesIO(answer))) - expected).max() <= 2


def test_base64_answers_hold_the_same_file(prepare: Prepare) -> None:
    source, mask = scene(20, 30), blob_mask(20, 30)
    raw = prepare(encode(source), mask)
    text = prepare(encode(source), mask, output_encoding="base64")
    plain = finish_edit(raw.pixels, raw.context)
    coded = finish_edit(text.pixels, text.context)
    assert base64.b64decode(coded, validate=True) == plain


def test_jpeg_answers_are_near(prepare: Prepare) -> None:
    smooth = np.asarray(Image.fromarray(scene(4, 4)).resize((60, 40), Image.Resampling.BICUBIC))
    prepared_edit = prepare(encode(smooth), blob_mask(40, 60), output_format="jpeg")
    answer = finish_edit(prepared_edit.pixels, prepared_edit.context)
    opened = Image.open(io.BytesIO(answer))
    assert opened.format == "JPEG"
    assert np.abs(np.asarray(opened).astype(int) - smooth).mean() < 3


TRANSPARENT = [
    odd for odd in odd_images() if "alpha" in odd.name or "rgba" in odd.name or "trans" in odd.name
]


def _alpha(odd: OddImage) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(odd.encoded)).convert("RGBA"))[..., 3]


@pytest.mark.parametrize("odd", TRANSPARENT, ids=lambda odd: odd.name)
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_what_is_transparent_stays_so_outside_and_is_opaque_inside(
    prepare: Prepare, odd: OddImage, output_format: str
) -> None:
    mask = blob_mask(*odd.pixels.shape[:2])
    prepared_edit = prepare(odd.encoded, mask, output_format=output_format)
    answer = np.asarray(
        Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context)))
    )
    np.testing.assert_array_equal(answer[mask == 0][:, 3], _alpha(odd)[mask == 0])
    assert (answer[mask == 255][:, 3] == 255).all()


def test_an_opaque_answer_can_be_asked_for_and_jpeg_has_no_other(prepare: Prepare) -> None:
    picture = np.dstack((scene(40, 60), blob_mask(40, 60)))
    for settings in ({"background": "opaque"}, {"output_format": "jpeg"}):
        prepared_edit = prepare(encode(picture), blob_mask(40, 60), **settings)
        assert (
            Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context))).mode
            == "RGB"
        )
    with pytest.raises(InvalidRequest, match=r"SETTINGS.background: is transparent, but JPEG"):
        prepare(encode(picture), blob_mask(40, 60), background="transparent", output_format="jpeg")


def test_the_feather_fades_transparency_too(prepare: Prepare) -> None:
    picture = np.dstack((np.full((40, 60, 3), 200, np.uint8), np.full((40, 60), 40, np.uint8)))
    prepared_edit = prepare(encode(picture), blob_mask(40, 60), mask_feather=6)
    weights = np.asarray(
        source_and_weights(prepared_edit.context, prepared_edit.request)[1]
    ).astype(float)
    answer = np.asarray(
        Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context)))
    )
    np.testing.assert_allclose(answer[..., 3], 40 + 215 * weights / 255, atol=1)


@pytest.mark.parametrize("margins", [(5, 0, 0, 0), (3, 7, 11, 13), (0, 0, 60, 40)])
@pytest.mark.parametrize("alpha", [False, True])
def test_a_grown_canvas_keeps_the_old_pixels_and_paints_the_new(
    prepare: Prepare, margins: tuple[int, int, int, int], alpha: bool
) -> None:
    left, top, right, bottom = margins
    source = scene(40, 60)
    picture = np.dstack((source, blob_mask(40, 60))) if alpha else source
    prepared_edit = prepare(encode(picture), None, expand=margins)
    assert prepared_edit.request.source_size == (40 + top + bottom, 60 + left + right)
    new = np.pad(np.zeros((40, 60), bool), ((top, bottom), (left, right)), constant_values=True)
    answer = finish(prepared_edit, (250, 3, 120))
    np.testing.assert_array_equal(answer[~new].reshape(40, 60, 3), source)
    assert (answer[new] == (250, 3, 120)).all()


def test_a_mask_is_of_the_source_and_goes_with_its_growth(prepare: Prepare) -> None:
    source, mask = scene(40, 60), blob_mask(40, 60)
    answer = finish(prepare(encode(source), mask, expand=(8, 0, 0, 0)), (250, 3, 120))
    check_outside(answer[:, 8:], source, mask)
    assert (answer[:, :8] == (250, 3, 120)).all()


@pytest.mark.parametrize("expand", [(0, 0, 0, 0), (0, 100, 60, 0)])
def test_a_window_is_pasted_where_it_was_cut_out(
    prepare: Prepare, expand: tuple[int, int, int, int]
) -> None:
    """The model's picture is its own input with a gradient over it: resizing cannot hide a shift
    of a pixel.
    """
    source, mask = scene(500, 700), np.zeros((500, 700), np.uint8)
    mask[180:215, 333:371] = 255
    prepared_edit = prepare(encode(source), mask, crop_to_mask="on", expand=expand)
    check_outside(finish(prepared_edit, (250, 3, 120))[expand[1] :, :700], source, mask)
    if any(expand):
        return
    assert prepared_edit.request.window is not None
    top, left, height, width = prepared_edit.request.window
    assert prepared_edit.request.model_size == (height, width) == (64, 64)
    np.testing.assert_array_equal(prepared_edit.pixels, source[top : top + 64, left : left + 64])
    painted = 255 - prepared_edit.pixels
    answer = np.asarray(Image.open(io.BytesIO(finish_edit(painted, prepared_edit.context))))
    np.testing.assert_array_equal(answer[mask > 0], (255 - source)[mask > 0])


FINE = {"grey": (GREY, 1), "grey and alpha": (GREY_ALPHA, 2), "RGB": (RGB, 3), "RGBA": (RGBA, 4)}


@pytest.mark.parametrize("kind", FINE)
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_source_of_16_bits_keeps_them_outside_the_mask(
    prepare: Prepare, kind: str, interlaced: bool, orientation: int
) -> None:
    colour, channels = FINE[kind]
    samples = fresh_rng().integers(0, 2**16, (40, 61, channels), np.uint16)
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif_chunks = ((b"eXIf", exif.tobytes()[6:]),)
    file = png(samples, colour, 16, interlaced=interlaced, before=exif_chunks)
    upright = samples if orientation == 1 else np.rot90(samples, -1)
    expected = upright if channels > 2 else upright[..., [0, 0, 0, 1][: channels + 2]]
    mask = blob_mask(*upright.shape[:2])
    prepared_edit = prepare(file, mask)
    answer = fine_samples(
        finish_edit(np.full_like(prepared_edit.pixels, 77), prepared_edit.context)
    )
    np.testing.assert_array_equal(answer[mask == 0], expected[mask == 0])
    assert (answer[mask == 255][:, :3] == 77 * 257).all()
    assert (answer[mask == 255][:, 3:] == 65535).all()


def test_16_bits_are_mixed_grow_and_are_left_out_where_nothing_holds_them(
    prepare: Prepare,
) -> None:
    samples = fresh_rng().integers(0, 2**16, (40, 60, 3), np.uint16)
    file, mask = png(samples, RGB, 16), blob_mask(40, 60)
    prepared_edit = prepare(file, mask, mask_feather=6)
    weights = (
        np.asarray(source_and_weights(prepared_edit.context, prepared_edit.request)[1])[..., None]
        / 255
    )
    answer = fine_samples(
        finish_edit(np.full_like(prepared_edit.pixels, 100), prepared_edit.context)
    )
    np.testing.assert_allclose(answer, samples + (25700.0 - samples) * weights, atol=1)
    prepared_edit = prepare(file, None, expand=(3, 0, 0, 5))
    grown = fine_samples(finish_edit(prepared_edit.pixels, prepared_edit.context))
    np.testing.assert_array_equal(grown[:40, 3:], samples)
    prepared_edit = prepare(file, mask, output_format="webp")
    check_outside(finish(prepared_edit, (250, 3, 120)), (samples >> 8).astype(np.uint8), mask)


def test_16_bit_sources_of_equal_high_bytes_are_two_templates(prepare: Prepare) -> None:
    samples = fresh_rng().integers(0, 2**16, (64, 64, 3), np.uint16)
    high = (samples >> 8).astype(np.uint8)
    files = [png(samples, RGB, 16), png(samples ^ 1, RGB, 16), encode(high)]
    requests = [prepare(file, blob_mask(64, 64)).request for file in files]
    assert len({request.template_id for request in requests}) == 3
    assert len({request.pixels_id for request in requests}) == 1, "the model sees the same"


def fine_samples(file: bytes) -> np.ndarray:
    """uint16 [H, W, channels] of a 16-bit PNG, as another reader has them."""
    width, height, rows, png_info = pypng.Reader(bytes=file).read()
    assert png_info["bitdepth"] == 16
    return np.vstack([np.asarray(row, np.uint16) for row in rows]).reshape(height, width, -1)
