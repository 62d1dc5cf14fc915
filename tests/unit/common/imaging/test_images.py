"""Decoding and encoding: what works, what is refused, what is bit-exact."""

from __future__ import annotations

import base64
import io
import textwrap
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from maskserve_benchmarks.soak.pictures import png_file
from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.keys import TEMPLATE_ID, entries_id, template_id
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import (
    check_beginning,
    decode_image,
    decode_mask,
    encode_image,
    encode_png,
    to_base64,
)
from tests.fakes.corpus.encoding import (
    GREY,
    PALETTE,
    RGBA,
    chunks_of,
    header,
    png,
    png_of,
    webp_canvas,
    webp_of,
)
from tests.fakes.hostile import bad_images
from tests.fakes.pictures import OddImage, encode, odd_images, scene, sixteen_bit_png
from tests.support.cost import lines_run

LIMITS = LimitsConfig()
ODD = list(odd_images())


@pytest.mark.parametrize("odd", ODD, ids=[odd.name for odd in ODD])
def test_every_kind_of_source_decodes_to_its_8_bit_upright_pixels(odd: OddImage) -> None:
    decoded = decode_image(odd.encoded, "IMAGE", LIMITS)
    np.testing.assert_array_equal(decoded.pixels, odd.pixels)
    assert decoded.pixels.dtype == np.uint8
    assert decoded.encoded == odd.encoded
    assert decoded.size == odd.pixels.shape[:2]


@pytest.mark.parametrize("name", bad_images())
def test_bad_images_are_refused_by_field_name_without_warnings(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        with pytest.raises(InvalidRequest) as caught:
            decode_image(bad_images()[name], "MASK", LIMITS)
    assert caught.value.field == "MASK"
    assert str(caught.value).startswith("[INVALID_REQUEST] MASK: ")
    assert caught_warnings == []


def test_base64_text_and_data_uris_are_undone() -> None:
    picture = scene(9, 14)
    png = encode(picture)
    text = base64.b64encode(png)
    wrapped = "\r\n".join(textwrap.wrap(text.decode(), 60)).encode()
    for raw in (
        text,
        wrapped,
        b" \n" + text + b"\n",
        text.rstrip(b"="),
        base64.urlsafe_b64encode(png),
        b"data:image/png;base64," + text,
        b"DATA:image/png;charset=x;BASE64," + wrapped,
        b"data:;base64," + text,
    ):
        decoded = decode_image(raw, "IMAGE", LIMITS)
        np.testing.assert_array_equal(decoded.pixels, picture)
        assert decoded.encoded == png


@pytest.mark.parametrize(
    ("limits", "accepted"),
    [
        (LimitsConfig(max_side=63), "sides of up to 63 pixels"),
        (LimitsConfig(max_pixels=64 * 40 - 1), "up to 2559 pixels"),
        (LimitsConfig(max_image_bytes=1024), "up to 1024 encoded bytes"),
    ],
)
def test_limits_are_enforced(limits: LimitsConfig, accepted: str) -> None:
    png = encode(scene(40, 64))
    for raw in (png, base64.b64encode(png)):
        with pytest.raises(InvalidRequest, match=accepted):
            decode_image(raw, "IMAGE", limits)
    assert decode_image(png, "IMAGE", LimitsConfig(max_side=64, max_pixels=2560)).size == (40, 64)


def test_bombs_are_refused_before_their_pixels_take_memory() -> None:
    bombs = {name: data for name, data in bad_images().items() if name.startswith("bomb")}
    assert len(bombs) >= 4
    tracemalloc.start()
    for data in bombs.values():
        with pytest.raises(InvalidRequest, match="pixels"):
            decode_image(data, "IMAGE", LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: b"\xff\xd8" + b"\xff" * 20_000_000, "truncated or damaged JPEG"),
        (lambda: b"\xff\xd8" + b"\xff\xfe\0\2" * 5_000_000, "more than 65536 segments"),
        (
            lambda: webp_of(webp_canvas(9, 9), b"ABCD\0\0\0\0" * 2_500_000),
            "more than 65536 chunks",
        ),
        (lambda: b"ab " * 7_000_000, "is not an image"),
    ],
    ids=["fill bytes", "segments", "chunks", "blanks"],
)
def test_20_megabytes_of_nothing_cost_little_work_and_memory(
    make: Callable[[], bytes], problem: str
) -> None:
    data = make()

    def refused() -> None:
        with pytest.raises(InvalidRequest, match=problem):
            decode_image(data, "IMAGE", LIMITS)

    # A look at every segment takes ten lines for each of five million, one at every byte more.
    assert lines_run(refused) < 2_000_000
    tracemalloc.start()  # which takes far longer than what it watches
    with pytest.raises(InvalidRequest, match=problem):
        decode_image(data, "IMAGE", LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * len(data)


def test_a_second_header_is_refused() -> None:
    grey = scene(8, 9)[..., 0]
    ihdr, idat, iend = chunks_of(png(grey, GREY))
    keyed = (header(9, 8, 8, PALETTE), (b"tRNS", b"\0\1"))
    for chunks in ((*keyed, ihdr, idat, iend), (ihdr, idat, ihdr, iend)):
        with pytest.raises(InvalidRequest, match="is a damaged PNG"):
            decode_mask(png_of(*chunks), "MASK", LIMITS)


def test_an_alpha_channel_goes_before_a_stray_clear_colour() -> None:
    rgba = np.dstack([scene(8, 9), np.arange(72, dtype=np.uint8).reshape(8, 9)])
    stray = png(rgba, RGBA, before=((b"tRNS", b"\0\1" * 3),))
    alpha = decode_mask(stray, "MASK", LIMITS).alpha
    assert alpha is not None
    np.testing.assert_array_equal(alpha, rgba[..., 3])


def test_a_mask_of_another_size_is_refused_before_it_is_decoded() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    mask = encode(scene(30, 20), exif=turned)
    assert decode_mask(mask, "MASK", LIMITS, (20, 30)).luminance.shape == (20, 30)
    with pytest.raises(InvalidRequest, match=r"MASK: is 30x20 pixels; accepted: .* 20x30"):
        decode_mask(mask, "MASK", LIMITS, (30, 20))
    large = png_file(7000, 7000, 8, 2, bytes(100))  # within the limits, but cut short
    with pytest.raises(InvalidRequest, match="is 7000x7000 pixels"):
        decode_mask(large, "MASK", LIMITS, (20, 30))


def test_foreign_formats_are_named() -> None:
    with pytest.raises(InvalidRequest, match="IMAGE: is a BMP; accepted: PNG, JPEG, WebP, AVIF"):
        decode_image(bad_images()["BMP"], "IMAGE", LIMITS)


def test_alpha_is_kept_beside_unchanged_colours() -> None:
    rgba = np.dstack([scene(8, 9), np.arange(72, dtype=np.uint8).reshape(8, 9)])
    decoded = decode_image(encode(rgba), "IMAGE", LIMITS)
    np.testing.assert_array_equal(decoded.pixels, rgba[..., :3])
    assert decoded.alpha is not None
    np.testing.assert_array_equal(decoded.alpha, rgba[..., 3])
    assert decode_image(encode(rgba[..., :3]), "IMAGE", LIMITS).alpha is None


def test_pictures_that_differ_beside_their_pixels_have_names_and_share_entries() -> None:
    rgb, clear = scene(8, 9), np.arange(72, dtype=np.uint8).reshape(8, 9)
    other_alpha = clear.copy()
    other_alpha[0, 0] = 9
    opaque, *other_ids = (
        decode_image(item, "IMAGE", LIMITS).template_id
        for item in (
            encode(rgb),
            *(encode(np.dstack([rgb, alpha])) for alpha in (clear, other_alpha)),
            encode_png(rgb.astype(np.uint16) << 8),
            encode_png((rgb.astype(np.uint16) << 8) + 1),
        )
    )
    assert opaque == template_id(rgb)
    whole = np.dstack([rgb, np.full_like(clear, 255)])
    assert decode_image(encode(whole), "IMAGE", LIMITS).template_id == opaque
    assert len({opaque, *other_ids}) == 5
    assert {entries_id(item) for item in other_ids} == {opaque}
    assert all(TEMPLATE_ID.fullmatch(item) for item in other_ids)


def test_alpha_is_turned_with_its_image() -> None:
    rgba = np.dstack([scene(8, 9), np.arange(72, dtype=np.uint8).reshape(8, 9)])
    exif = Image.Exif()
    exif[0x0112] = 6
    decoded = decode_image(encode(rgba, exif=exif), "IMAGE", LIMITS)
    assert decoded.alpha is not None
    np.testing.assert_array_equal(decoded.alpha, np.rot90(rgba[..., 3], -1))


def test_palette_entries_carry_their_own_transparency() -> None:
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.fromarray(indices).convert("P")
    palette.putpalette([v for i in range(12) for v in (i * 20, 0, 255 - i)])
    decoded = decode_image(encode(palette, transparency=bytes([0, 9])), "IMAGE", LIMITS)
    assert decoded.alpha is not None
    expected = np.full((3, 4), 255)
    stored = np.asarray(palette)
    expected[stored == 0], expected[stored == 1] = 0, 9
    np.testing.assert_array_equal(decoded.alpha, expected)


def test_one_transparent_colour_is_found_at_every_depth() -> None:
    grey = np.array([[10, 20], [20, 30]], np.uint8)
    cases = {
        "grey": encode(grey, transparency=20),
        "rgb": encode(np.repeat(grey[..., None], 3, 2), transparency=(20, 20, 20)),
        "grey-16": sixteen_bit_png(grey.astype(np.uint16) * 256, ((b"tRNS", b"\x14\x00"),)),
        "rgb-16": sixteen_bit_png(
            np.repeat(grey[..., None], 3, 2).astype(np.uint16) * 256,
            ((b"tRNS", b"\x14\x00" * 3),),
        ),
    }
    for name, data in cases.items():
        alpha = decode_image(data, "MASK", LIMITS).alpha
        assert alpha is not None, name
        np.testing.assert_array_equal(alpha, [[255, 0], [0, 255]], err_msg=name)
    # A deep grey differs in its low byte only: another colour.
    near = sixteen_bit_png(np.array([[0x1401]], np.uint16), ((b"tRNS", b"\x14\x00"),))
    alpha = decode_image(near, "MASK", LIMITS).alpha
    assert alpha is not None
    assert alpha[0, 0] == 255


def test_masks_decode_to_luminance() -> None:
    picture = scene(20, 30)
    decoded = decode_mask(encode(picture), "MASK", LIMITS)
    expected = np.asarray(Image.fromarray(picture).convert("L"))
    np.testing.assert_array_equal(decoded.luminance, expected)
    grey = decode_mask(encode(expected), "MASK", LIMITS)
    np.testing.assert_array_equal(grey.luminance, expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (33, 1), (45, 61), (64, 64)])
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_lossless_formats_give_every_pixel_back(size: tuple[int, int], kind: str) -> None:
    picture = scene(*size)
    opened = Image.open(io.BytesIO(encode_image(picture, kind)))
    assert (opened.format, opened.mode) == (kind.upper(), "RGB")
    np.testing.assert_array_equal(np.asarray(opened), picture)


def test_grey_png_gives_every_pixel_back() -> None:
    grey = scene(31, 17)[..., 0]
    opened = Image.open(io.BytesIO(encode_image(grey, "png")))
    assert opened.mode == "L"
    np.testing.assert_array_equal(np.asarray(opened), grey)


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_a_lower_quality_is_a_smaller_file(kind: str) -> None:
    noisy = np.random.default_rng(3).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    sizes = [len(encode_image(noisy, kind, quality)) for quality in (5, 50, 100)]
    assert sizes == sorted(set(sizes))
    assert encode_image(noisy, kind, None) == encode_image(noisy, kind)


def test_jpeg_is_near_and_unknown_formats_are_a_bug() -> None:
    smooth = np.asarray(Image.fromarray(scene(4, 4)).resize((64, 64), Image.Resampling.BICUBIC))
    opened = Image.open(io.BytesIO(encode_image(smooth, "jpeg")))
    assert opened.format == "JPEG"
    assert np.abs(np.asarray(opened).astype(int) - smooth).mean() < 2
    with pytest.raises(ValueError, match="gif"):
        encode_image(smooth, "gif")


def test_base64_text_has_no_line_breaks() -> None:
    data = bytes(range(256)) * 10
    assert base64.b64decode(to_base64(data), validate=True) == data
    assert b"\n" not in to_base64(data)


def test_threads_share_the_codec_and_pillow_keeps_its_settings() -> None:
    settings_before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    jobs = ODD * 3

    def decode(odd: OddImage) -> bool:
        return np.array_equal(decode_image(odd.encoded, "IMAGE", LIMITS).pixels, odd.pixels)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(decode, jobs))
    assert settings_before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


@given(st.integers(0, len(ODD) - 1), st.data())
def test_damaged_files_are_refused_or_decoded_and_nothing_else(
    which: int, data: st.DataObject
) -> None:
    damaged = bytearray(ODD[which].encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 300) - 1))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with warnings.catch_warnings(record=True) as caught_warnings, suppress(InvalidRequest):
        warnings.simplefilter("always")
        # Any other exception fails the test.
        assert decode_image(bytes(damaged), "IMAGE", LIMITS).pixels.shape[2] == 3
    assert caught_warnings == []


@pytest.mark.parametrize(
    "text", ["A" * 5000, "x", "data:image/png;base64," + "A" * 5000, "\xe9" * 9]
)
def test_what_is_no_picture_is_refused_by_its_beginning(text: str):
    with pytest.raises(InvalidRequest, match=r"OP\.image"):
        check_beginning(text, "OP.image")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "start", ["", "data:image/any;base64,", "  \n", "data:image/any;a=b;base64,"]
)
@pytest.mark.parametrize("size", [1, 9, 400])
def test_a_picture_as_text_passes_by_its_beginning(form: str, start: str, size: int):
    file = io.BytesIO()
    noise = np.random.default_rng(size).integers(0, 256, (size, size, 3), np.uint8)
    Image.fromarray(noise).save(file, form)
    text = base64.b64encode(file.getvalue()).decode()
    for lines in (text, "\n".join(textwrap.wrap(text, 76)), text.replace("+", "-").rstrip("=")):
        check_beginning(start + lines, "OP.image")
