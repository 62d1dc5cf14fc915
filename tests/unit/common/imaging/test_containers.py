"""A picture ends where its format says: what stands behind counts in no bound."""

from __future__ import annotations

import base64
import io
import random
import struct
import warnings
import zlib
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from maskserve_common.config import LimitsConfig
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging import containers
from maskserve_common.imaging.images import NO_LIMITS, decode_image
from tests.fakes.corpus.encoding import RGB, chunks_of, png, png_of, segment, webp_chunk, webp_of
from tests.fakes.pictures import encode, scene

SCENE = scene(40, 56)
random.seed(3)
VIDEO = random.randbytes(2_000_000)  # FF DA comes once in 65,536 bytes, FF D9 likewise


@pytest.mark.parametrize(
    "file",
    [
        encode(SCENE, "JPEG"),
        encode(SCENE, "JPEG", progressive=True),
        encode(SCENE, "JPEG", restart_marker_blocks=2),
        encode(SCENE),
        encode(SCENE, "WEBP", lossless=True),
    ],
    ids=["jpeg", "progressive", "restarts", "png", "webp"],
)
def test_what_stands_behind_a_picture_is_not_its_own(file: bytes) -> None:
    plain = decode_image(file, "IMAGE", NO_LIMITS)
    limits = LimitsConfig(max_image_bytes=max(1024, len(file)))
    with patch.object(containers, "_MAX_JPEG_SCANS", 12):  # as many as libjpeg's progression has
        decoded_image = decode_image(file + VIDEO, "IMAGE", NO_LIMITS)
    np.testing.assert_array_equal(decoded_image.pixels, plain.pixels)
    assert decoded_image.encoded == file, "a template is kept without what stands behind it"
    behind = file + VIDEO[: 2 * len(file)]
    for raw in (behind, base64.b64encode(behind)):
        assert decode_image(raw, "IMAGE", limits).encoded == file
    with pytest.raises(InvalidRequest, match=f"is {len(file) * 6} bytes; accepted: up to"):
        decode_image(file + VIDEO[: 5 * len(file)], "IMAGE", limits)


def test_scans_are_counted_to_the_pictures_end() -> None:
    file = encode(SCENE, "JPEG", progressive=True)
    at = file.index(b"\xff\xda")
    body, end = file[at:-2], file[-2:]
    comment = segment(0xFE, b"\xff\xd9" * 50)  # looks like an end and is none
    with pytest.raises(InvalidRequest, match="more than 64 scans"):
        decode_image(file[:at] + body + comment + body * 9 + end, "IMAGE", NO_LIMITS)
    plain = decode_image(file, "IMAGE", NO_LIMITS).pixels
    within = decode_image(file[:at] + comment + body + comment + end, "IMAGE", NO_LIMITS)
    np.testing.assert_array_equal(within.pixels, plain)


def test_an_animation_is_not_counted_as_its_first_frame() -> None:
    ihdr, *pixels, iend = chunks_of(png(SCENE, RGB, pieces=7))
    frames = [(b"fdAT", b"\0\0\0\1")] * 70_000
    file = png_of(ihdr, *pixels, *frames, iend)
    decoded_image = decode_image(file, "IMAGE", NO_LIMITS)
    np.testing.assert_array_equal(decoded_image.pixels, SCENE)
    np.testing.assert_array_equal(
        decode_image(decoded_image.encoded, "IMAGE", NO_LIMITS).pixels, SCENE
    )
    many = [(b"IDAT", b"")] * 70_000
    for leading_chunks, behind in ((frames, []), ([], many)):
        with pytest.raises(InvalidRequest, match="more than 65536 chunks"):
            decode_image(png_of(ihdr, *leading_chunks, *pixels, *behind, iend), "IMAGE", NO_LIMITS)


def test_chunks_behind_a_webp_are_none_of_it() -> None:
    file = encode(SCENE, "WEBP", lossless=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    stray = webp_chunk(b"EXIF", turned.tobytes()) + webp_chunk(b"ABCD", b"") * 70_000
    np.testing.assert_array_equal(decode_image(file + stray, "IMAGE", NO_LIMITS).pixels, SCENE)
    extended = encode(SCENE, "WEBP", lossless=True, exif=Image.Exif().tobytes() + b"x")
    inside = webp_of(extended[12:] + webp_chunk(b"ABCD", b"") * 70_000)
    with pytest.raises(InvalidRequest, match="more than 65536 chunks"):
        decode_image(inside, "IMAGE", NO_LIMITS)


_FORMS = {1: "B", 2: "B", 3: "H", 4: "I", 5: "II", 6: "b", 7: "B", 8: "h", 9: "i", 10: "ii"}
_FORMS |= {11: "f", 12: "d", 13: "I", 16: "Q"}


@pytest.mark.parametrize("kind", _FORMS)
def test_an_orientation_of_any_type_turns_as_pillow_turns_it(kind: int) -> None:
    for order, value, count, twice in product("<>", (0, 1, 3, 6, 8, 9), (0, 1, 2), (False, True)):
        parts = (value, 1) if len(_FORMS[kind]) == 2 else (value,)
        data = struct.pack(order + _FORMS[kind], *parts) * count
        entry = struct.pack(order + "HHI", 0x0112, kind, count)
        first = struct.pack(order + "HHIHH", 0x0112, 3, 1, 5, 0) if twice else b""
        place = 8 + 2 + len(first) + 12 + 4
        entry += data.ljust(4, b"\0") if len(data) <= 4 else struct.pack(order + "I", place)
        head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1 + twice)
        exif = b"Exif\0\0" + head + first + entry + bytes(4) + (data if len(data) > 4 else b"")
        file = encode(SCENE, "JPEG", exif=exif)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        decoded_image = decode_image(file, "IMAGE", NO_LIMITS)
        np.testing.assert_array_equal(
            decoded_image.pixels, np.asarray(opened), err_msg=str((order, value))
        )


_XMP = (
    '<x:xmpmeta><rdf tiff:Orientation="{}"/>',
    "<tiff:Orientation>{}</tiff:Orientation>",
    "<x/>{}",
)


def _with_orientation(form: str, exif: bytes, xmp: bytes) -> bytes:
    """The scene in a file whose EXIF and XMP these are."""
    if form in ("JPEG", "WEBP"):
        return encode(SCENE, form, lossless=True, exif=exif, xmp=xmp)
    more = PngInfo()
    if form == "old PNG":
        words = f"\nexif\n{len(exif)}\n{exif.hex()}\n"
        more.add_text("Raw profile type exif", words, zip=True)
    more.add_itxt("XML:com.adobe.xmp", xmp.decode(), "en", "x", zip=form == "old PNG")
    return encode(SCENE, "PNG", pnginfo=more, **({"exif": exif} if form == "PNG" else {}))


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "PNG", "old PNG"])
def test_xmp_turns_where_exif_does_not_say_as_pillow_has_it(form: str) -> None:
    for exif_orientation, text, number in product((None, 0, 1, 6), _XMP, (0, 1, 3, 8, 9)):
        exif = Image.Exif()
        if exif_orientation is not None:
            exif[0x0112] = exif_orientation
        file = _with_orientation(form, exif.tobytes(), text.format(number).encode())
        opened = Image.open(io.BytesIO(file))
        turned = ImageOps.exif_transpose(opened)
        decoded_image = decode_image(file, "IMAGE", NO_LIMITS)
        np.testing.assert_array_equal(
            decoded_image.pixels, np.asarray(turned), str((exif_orientation, text, number))
        )


def test_a_text_of_a_png_is_inflated_to_a_bound() -> None:
    ihdr, *pixels, iend = chunks_of(png(SCENE, RGB))
    orientation_text = b'tiff:Orientation="6"'
    for packed, turned in (
        (zlib.compress(orientation_text), True),
        (zlib.compress(orientation_text + bytes(2**21)), False),
        (orientation_text, False),
    ):
        text = (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + packed)
        decoded_image = decode_image(png_of(ihdr, text, *pixels, iend), "IMAGE", NO_LIMITS)
        assert (decoded_image.pixels.shape == SCENE.shape) is not turned


@pytest.mark.parametrize("keyword", ["XML:com.adobe.xmp", "Raw profile type exif", "iCCP"])
def test_of_many_chunks_that_are_deflated_one_is_inflated(keyword: str) -> None:
    """Each of up to 65,536 was, to 1 MiB of a kilobyte: minutes for one picture."""
    ihdr, *pixels, iend = chunks_of(png(SCENE, RGB))
    bomb = zlib.compress(bytes(5 * 2**20), 9)
    name = b"iCCP" if keyword == "iCCP" else b"zTXt"
    chunk = (name, keyword.encode() + b"\0\0" + bomb)
    with patch.object(containers, "_inflated", wraps=containers._inflated) as inflated:
        container = containers.read_container(png_of(ihdr, *[chunk] * 500, *pixels, iend))
    assert (container.orientation, container.words) == (1, {})
    assert inflated.call_count == 1
