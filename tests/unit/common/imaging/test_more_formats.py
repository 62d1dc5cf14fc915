"""AVIF, GIF, TIFF and HEIC: read as other pictures are, within the same bounds."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps, TiffImagePlugin

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging import images
from maskserve_common.imaging.containers import read_container
from maskserve_common.imaging.images import decode_image, decode_mask, read_size, to_base64
from tests.fakes.pictures import scene
from tests.support.draws import fresh_rng

LIMITS = LimitsConfig()
SIZE = (40, 56)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def rgb() -> Image.Image:
    return Image.fromarray(scene(*SIZE))


def rgba() -> Image.Image:
    image = rgb().convert("RGBA")
    image.putalpha(Image.fromarray(fresh_rng().integers(0, 256, SIZE, np.uint8)))
    return image


def tiffs() -> dict[str, tuple[bytes, Image.Image]]:
    """Name → file, and what Pillow reads of it."""
    files = {
        f"{mode} {compression}": saved(rgb().convert(mode), "TIFF", compression=compression)
        for mode in ("1", "L", "P", "RGB", "CMYK")
        for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
    }
    files["fax"] = saved(rgb().convert("1"), "TIFF", compression="group4")
    files["JPEG"] = saved(rgb(), "TIFF", compression="jpeg")
    files["RGBA"] = saved(rgba(), "TIFF", compression="tiff_lzw")
    files["LA"] = saved(rgba().convert("LA"), "TIFF")
    strips = {TiffImagePlugin.ROWSPERSTRIP: 7}
    files["strips"] = saved(rgb(), "TIFF", compression="tiff_lzw", tiffinfo=strips)
    return {name: (data, Image.open(io.BytesIO(data))) for name, data in files.items()}


@pytest.mark.parametrize("name", sorted(tiffs()))
def test_a_tiff_is_what_pillow_reads(name: str) -> None:
    encoded, image = tiffs()[name]
    decoded = decode_image(encoded, "IMAGE", LIMITS)
    np.testing.assert_array_equal(decoded.pixels, np.asarray(image.convert("RGB")))
    assert read_size(encoded, "IMAGE", LIMITS) == SIZE
    assert decode_image(to_base64(encoded), "IMAGE", LIMITS).template_id == decoded.template_id
    if image.mode in ("RGBA", "LA"):
        assert decoded.alpha is not None
        np.testing.assert_array_equal(decoded.alpha, np.asarray(image.getchannel("A")))
    else:
        assert decoded.alpha is None
    drawn = decode_mask(encoded, "MASK", LIMITS, SIZE)
    np.testing.assert_array_equal(drawn.luminance, np.asarray(image.convert("L")))


def test_of_16_bits_the_high_bytes_count() -> None:
    deep = fresh_rng().integers(0, 2**16, SIZE, np.uint16)
    big = Image.frombytes("I;16B", SIZE[::-1], deep.astype(">u2").tobytes())
    for image in (Image.fromarray(deep), big):
        decoded = decode_image(saved(image, "TIFF"), "IMAGE", LIMITS)
        np.testing.assert_array_equal(decoded.pixels[..., 0], deep >> 8)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_numbers_that_are_no_colours_are_refused_in_words(mode: str) -> None:
    encoded = saved(rgb().convert("L").convert(mode), "TIFF")
    with pytest.raises(InvalidRequest, match="IMAGE: is a TIFF of numbers that are no integers"):
        decode_image(encoded, "IMAGE", LIMITS)


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_they_stand_as_they_are_to_be_shown(kind: str, turned: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turned
    encoded = saved(rgb(), kind, exif=exif, **({"quality": 100} if kind == "AVIF" else {}))
    decoded = decode_image(encoded, "IMAGE", LIMITS)
    expected_image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    np.testing.assert_array_equal(decoded.pixels, np.asarray(expected_image.convert("RGB")))
    assert read_size(encoded, "IMAGE", LIMITS) == decoded.size
    assert read_container(encoded).orientation == turned


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
def test_their_colour_profile_is_that_of_the_answer(kind: str) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    decoded = decode_image(saved(rgb(), kind, icc_profile=profile), "IMAGE", LIMITS)
    assert decoded.colour.profile == profile


def test_an_avif_is_what_pillow_reads() -> None:
    for image in (rgb(), rgba(), rgb().convert("L")):
        encoded = saved(image, "AVIF")
        decoded, opened = decode_image(encoded, "IMAGE", LIMITS), Image.open(io.BytesIO(encoded))
        np.testing.assert_array_equal(decoded.pixels, np.asarray(opened.convert("RGB")))
        assert (decoded.alpha is not None) == (image.mode == "RGBA")
        assert read_size(encoded, "IMAGE", LIMITS) == SIZE
        assert decoded.warnings == ()


@pytest.mark.parametrize("interlace", [0, 1])
def test_a_gif_is_its_first_picture_and_says_so(interlace: int) -> None:
    first = rgb().quantize(200)
    single = saved(first, "GIF", interlace=interlace)
    later = [Image.fromarray(scene(*SIZE)[::-1]) for _ in range(3)]
    film = saved(first, "GIF", save_all=True, append_images=later, interlace=interlace)
    for encoded, warnings in (
        (single, ()),
        (film, ("IMAGE: is an animation; its first picture is used",)),
    ):
        decoded = decode_image(encoded, "IMAGE", LIMITS)
        np.testing.assert_array_equal(decoded.pixels, np.asarray(first.convert("RGB")))
        assert decoded.warnings == warnings
    assert len(read_container(film).payload) < len(film) / 2
    clear = saved(first, "GIF", transparency=3)
    decoded = decode_image(clear, "IMAGE", LIMITS)
    rgba_pixels = np.asarray(Image.open(io.BytesIO(clear)).convert("RGBA"))
    assert decoded.alpha is not None
    np.testing.assert_array_equal(decoded.alpha, rgba_pixels[..., 3])
    np.testing.assert_array_equal(decoded.pixels, rgba_pixels[..., :3])


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
def test_of_several_pictures_the_first_is_taken_and_the_answer_says_so(kind: str) -> None:
    more = [Image.fromarray(scene(*SIZE)[::-1]) for _ in range(20)]
    encoded = saved(rgb(), kind, save_all=True, append_images=more)
    [warning] = decode_image(encoded, "IMAGE", LIMITS).warnings
    assert "the first is used" in warning or "its first picture is used" in warning


def test_a_heic_is_read_where_its_decoder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    for turned in (1, 6):
        exif = Image.Exif()
        exif[0x0112] = turned
        encoded = saved(rgb(), "HEIF", quality=100, exif=exif.tobytes())
        decoded = decode_image(encoded, "IMAGE", LIMITS)
        expected_image = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
        np.testing.assert_array_equal(decoded.pixels, expected_image)
        assert read_size(encoded, "IMAGE", LIMITS) == decoded.size
    monkeypatch.delitem(images._DECODERS, "heic")
    with pytest.raises(InvalidRequest, match=r"is of HEIC, which this server reads with maskserve"):
        decode_image(encoded, "IMAGE", LIMITS)


# What is hostile.


def refusal(encoded: bytes, limits: LimitsConfig = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as refused:
        decode_image(encoded, "IMAGE", limits)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "GIF"])
def test_their_sizes_are_bounded_before_they_are_decoded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = saved(Image.new("RGB", (300, 200)), kind)
    for name in images._DECODERS:
        monkeypatch.setitem(images._DECODERS, name, None)
    assert "is 300x200 pixels" in refusal(encoded, LimitsConfig(max_side=256))
    assert "is 300x200 = 60000 pixels" in refusal(encoded, LimitsConfig(max_pixels=59_999))


@pytest.mark.parametrize("kind", ["TIFF", "AVIF", "GIF"])
def test_what_is_cut_or_changed_is_refused_or_read_and_nothing_else(kind: str) -> None:
    whole, draw = saved(rgb(), kind), fresh_rng()
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(int(draw.integers(1, 6))):
            damaged[draw.integers(0, min(len(whole), 400))] = draw.integers(0, 256)
        cut = bytes(damaged[: draw.integers(8, len(whole) + 1)])
        with suppress(InvalidRequest):
            assert decode_image(cut, "IMAGE", LIMITS).pixels.ndim == 3


def entry(tag: int, kind: int, count: int, value: int) -> bytes:
    return struct.pack("<HHII", tag, kind, count, value)


def tiff(*entries: bytes, behind: bytes = b"") -> bytes:
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return head + b"".join(sorted(entries)) + bytes(4) + behind


PLAIN = (
    entry(256, 3, 1, 8), entry(257, 3, 1, 8), entry(258, 3, 1, 8), entry(262, 3, 1, 1),
    entry(278, 3, 1, 8), entry(279, 4, 1, 64),
)  # fmt: skip


def test_a_tiff_s_tags_cannot_multiply_its_bytes() -> None:
    """Pillow copies what each tag points to, and follows pages and directories."""
    junk = [entry(40_000 + n, 7, 60_000, 8) for n in range(1000)]
    pixels = bytes(range(64))
    whole = tiff(
        *PLAIN, entry(273, 4, 1, 8 + 2 + 12 * 1007 + 4), *junk, behind=pixels + bytes(60_000)
    )
    container = read_container(whole)
    assert len(container.payload) < len(whole) + 200
    assert struct.unpack("<H", container.payload[-4 - 12 * 7 - 2 : -4 - 12 * 7]) == (7,)
    decoded = decode_image(whole, "IMAGE", LIMITS)
    np.testing.assert_array_equal(decoded.pixels[..., 0].ravel(), np.arange(64))
    assert "more than 1024 tags" in refusal(tiff(*PLAIN, *junk, *junk))
    pointed = [entry(tag, 4, 15_000, 8) for tag in (273, 279, 324, 325)]
    assert "is a damaged TIFF" in refusal(tiff(*PLAIN[:5], *pointed, behind=bytes(60_000)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((entry(322, 3, 1, 65_520), entry(323, 3, 1, 65_520)), "damaged"),
        ((entry(277, 4, 1, 60_000),), "damaged"),
        ((entry(259, 3, 1, 6),), "compression 6"),
        ((entry(259, 3, 1, 34_712),), "compression 34712"),
        ((entry(339, 3, 1, 3),), "numbers that are no integers"),
    ],
)
def test_a_tiff_of_large_tiles_or_strange_numbers_is_refused(
    more: tuple[bytes, ...], message: str
) -> None:
    assert message in refusal(tiff(*PLAIN, entry(273, 4, 1, 8), *more, behind=bytes(100)))


def test_a_gif_of_endless_blocks_is_refused_or_ends() -> None:
    gif = saved(rgb(), "GIF")
    comments = b"\x21\xfe" + b"\x01a" * 300_000 + b"\0"
    assert "of more than 262144 blocks" in refusal(gif[:781] + comments + gif[781:])
    at = gif.index(b"\x2c", 781)  # behind the table of colours
    large = gif[: at + 5] + struct.pack("<HH", 60_000, 60_000) + gif[at + 9 :]
    assert "larger than its canvas" in refusal(large)


def test_an_avif_that_is_coded_larger_than_it_says_is_refused() -> None:
    """A decoder takes memory for what is coded."""
    large, small = (saved(Image.new("RGB", size), "AVIF") for size in ((1600, 1200), (64, 48)))
    size = b"ispe\0\0\0\0" + struct.pack(">II", 1600, 1200)
    assert size in large
    damaged = large.replace(size, b"ispe\0\0\0\0" + struct.pack(">II", 64, 48))
    assert "damaged AVIF" in refusal(damaged)
    assert decode_image(small, "IMAGE", LIMITS).size == (48, 64)
