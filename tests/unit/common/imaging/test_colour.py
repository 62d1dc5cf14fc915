"""The colours of a picture stay what they were, however its file describes them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from maskserve_common.config import Config, LimitsConfig
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import Decoded, decode_image, decode_mask
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import PreparedEdit, prepare_edit
from tests.fakes.corpus.encoding import GREY, RGB, chunks_of, png, png_of
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.profiles import cmyk_profile, grey_profile, one_way_profile, rgb_profile

SIZE = (40, 56)
SCENE = scene(*SIZE)
MASK = encode(blob_mask(*SIZE))
OUTSIDE = blob_mask(*SIZE) < 128
LIMITS = LimitsConfig()
P3 = ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06))
WIDE = rgb_profile(P3, 2.2)
P3_CHRM = struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)


def with_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    return png(SCENE, RGB, before=chunks)


def cicp(primaries: int, curve: int, matrix: int = 0, full: int = 1) -> tuple[bytes, bytes]:
    return b"cICP", bytes([primaries, curve, matrix, full])


def prepared(image: bytes, **settings: Any) -> PreparedEdit:
    accepted = accept_edit(EditSettings(**settings), b"x", FILL_SPEC, Config())
    return prepare_edit(image, MASK, accepted, FILL_SPEC, Config())


def answer(image: bytes, **settings: Any) -> Image.Image:
    """The answer of a model that gives back what it sees."""
    prepared_edit = prepared(image, **settings)
    return Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context)))


def to_srgb(image: Image.Image, profile: bytes) -> np.ndarray:
    source_profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    srgb_image = ImageCms.profileToProfile(
        image, source_profile, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert srgb_image is not None
    return np.asarray(srgb_image).astype(int)


def srgb_pixels(image: Image.Image) -> np.ndarray:
    """A picture as a viewer that knows ICC profiles shows it."""
    profile = image.info.get("icc_profile")
    return to_srgb(image, profile) if profile else np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
@pytest.mark.parametrize(
    "save",
    [
        partial(encode, kind="PNG"),
        partial(encode, kind="JPEG", quality=95, subsampling=0),
        partial(encode, kind="WEBP", lossless=True),
    ],
    ids=["png", "jpeg", "webp"],
)
def test_a_wide_picture_looks_as_it_did(save: Callable[..., bytes], output_format: str) -> None:
    file = save(SCENE, icc_profile=WIDE)
    stored = Image.open(io.BytesIO(file)).convert("RGB")
    source_pixels = to_srgb(stored, WIDE)
    edited_image = answer(file, output_format=output_format)
    assert edited_image.info["icc_profile"] == WIDE
    if output_format != "jpeg":
        np.testing.assert_array_equal(
            np.asarray(edited_image)[OUTSIDE], np.asarray(stored)[OUTSIDE]
        )
        np.testing.assert_array_equal(srgb_pixels(edited_image)[OUTSIDE], source_pixels[OUTSIDE])
    assert np.abs(srgb_pixels(edited_image) - source_pixels).mean() < 8  # noise is hard on JPEG
    naive = np.abs(np.asarray(stored).astype(int) - source_pixels)
    assert naive.mean() > 9, "the profile changes nothing, and this test says nothing"


def test_models_are_given_srgb_and_what_they_paint_is_brought_back() -> None:
    file = encode(SCENE, icc_profile=WIDE)
    prepared_edit = prepared(file)
    np.testing.assert_array_equal(prepared_edit.pixels, to_srgb(Image.fromarray(SCENE), WIDE))
    painted = np.full_like(prepared_edit.pixels, (230, 60, 40))
    edited_image = Image.open(io.BytesIO(finish_edit(painted, prepared_edit.context)))
    assert np.abs(srgb_pixels(edited_image)[~OUTSIDE] - (230, 60, 40)).max() <= 2
    np.testing.assert_array_equal(np.asarray(edited_image)[OUTSIDE], SCENE[OUTSIDE])


def test_a_profile_of_srgb_costs_no_number() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    prepared_edit = prepared(encode(SCENE, icc_profile=srgb))
    np.testing.assert_array_equal(prepared_edit.pixels, SCENE)
    edited_image = Image.open(io.BytesIO(finish_edit(prepared_edit.pixels, prepared_edit.context)))
    np.testing.assert_array_equal(np.asarray(edited_image), SCENE)
    assert edited_image.info["icc_profile"] == srgb


CHUNKS = {
    "gamma": ((b"gAMA", struct.pack(">I", 100_000)),),
    "primaries": ((b"cHRM", P3_CHRM),),
    "both": ((b"gAMA", struct.pack(">I", 45_455)), (b"cHRM", P3_CHRM)),
    "sRGB": ((b"sRGB", b"\0"), (b"gAMA", struct.pack(">I", 45_455))),
    "cICP": (cicp(12, 13),),
    "cICP of HDR": (cicp(9, 16), (b"cLLI", bytes(8))),
    "cICP before all": (cicp(12, 13), (b"sRGB", b"\0"), (b"gAMA", struct.pack(">I", 100_000))),
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_a_png_keeps_the_chunks_that_say_what_its_numbers_mean(
    chunks: tuple[tuple[bytes, bytes], ...],
) -> None:
    prepared_edit = prepared(with_chunks(*chunks))
    edited_file = finish_edit(prepared_edit.pixels, prepared_edit.context)
    ignored_kinds = (b"IHDR", b"iTXt", b"IDAT", b"IEND")  # iTXt says that a model painted in it
    colour_chunks = [chunk for chunk in chunks_of(edited_file) if chunk[0] not in ignored_kinds]
    assert sorted(colour_chunks) == sorted(chunks)
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(edited_file)))[OUTSIDE], SCENE[OUTSIDE]
    )


D65_P3_SRGB = rgb_profile(P3, None)


@pytest.mark.parametrize(
    ("chunks", "profile"),
    [
        (CHUNKS["gamma"], rgb_profile(None, 1.0)),
        (CHUNKS["primaries"], D65_P3_SRGB),
        (CHUNKS["both"], rgb_profile(P3, 2.2)),
        (CHUNKS["cICP"], D65_P3_SRGB),
        (CHUNKS["cICP before all"], D65_P3_SRGB),
        ((cicp(1, 8),), rgb_profile(None, 1.0)),
    ],
)
@pytest.mark.parametrize("output_format", ["webp", "jpeg"])
def test_other_formats_say_it_by_a_profile(
    chunks: tuple[tuple[bytes, bytes], ...], profile: bytes, output_format: str
) -> None:
    edited_image = answer(with_chunks(*chunks), output_format=output_format)
    numbers = np.asarray(edited_image)
    if output_format == "webp":
        np.testing.assert_array_equal(numbers[OUTSIDE], SCENE[OUTSIDE])
    expected_pixels = to_srgb(Image.fromarray(numbers), profile)
    assert np.abs(srgb_pixels(edited_image) - expected_pixels).max() <= 2
    assert np.abs(numbers - expected_pixels).mean() > 4


@pytest.mark.parametrize("curve", [16, 18])
def test_hdr_stays_png(curve: int) -> None:
    file = with_chunks(cicp(9, curve))
    np.testing.assert_array_equal(prepared(file).pixels, SCENE)
    for output_format in ("jpeg", "webp"):
        with pytest.raises(InvalidRequest, match=r"SETTINGS.output_format: .*HDR.*accepted: png"):
            prepared(file, output_format=output_format)
    # A profile beside it is what files of other kinds can say.
    hdr_png = with_chunks(cicp(9, curve), (b"iCCP", b"x\0\0" + zlib.compress(WIDE)))
    assert answer(hdr_png, output_format="webp").info["icc_profile"] == WIDE


def test_pictures_of_other_colours_are_other_templates() -> None:
    files = {
        "none": encode(SCENE),
        "sRGB": with_chunks((b"sRGB", b"\0")),
        "wide": encode(SCENE, icc_profile=WIDE),
        "wide webp": encode(SCENE, "WEBP", lossless=True, icc_profile=WIDE),
        "other": encode(SCENE, icc_profile=rgb_profile(P3, 1.8)),
        **{name: with_chunks(*chunks) for name, chunks in CHUNKS.items() if name != "sRGB"},
    }
    names = {name: prepared(file).request.template_id for name, file in files.items()}
    assert names["none"] == names["sRGB"]
    assert names["wide"] == names["wide webp"]
    assert names["primaries"] == names["cICP"] == names["cICP before all"]
    assert len(set(names.values())) == len(files) - 4
    pixels = {name: prepared(file).request.pixels_id for name, file in files.items()}
    assert pixels["none"] != pixels["wide"], "activations are of what the model sees"


def test_grey_and_cmyk_are_converted_by_their_own_profile() -> None:
    grey = np.asarray(Image.fromarray(SCENE).convert("L"))
    dark = grey_profile(1.0)
    file = encode(Image.fromarray(grey), icc_profile=dark)
    edited_image = answer(file)
    assert "icc_profile" not in edited_image.info
    expected_pixels = to_srgb(Image.fromarray(grey), dark)
    assert np.abs(np.asarray(edited_image).astype(int) - expected_pixels)[OUTSIDE].max() <= 1
    assert np.abs(expected_pixels[..., 0] - grey).mean() > 20

    inks = cmyk_profile()
    cmyk = Image.fromarray(SCENE).convert("CMYK")
    file = encode(cmyk, "JPEG", quality=95, icc_profile=inks)
    stored = Image.open(io.BytesIO(file))
    expected_pixels = to_srgb(stored, inks)
    edited_image = answer(file)
    assert "icc_profile" not in edited_image.info
    assert np.abs(np.asarray(edited_image).astype(int) - expected_pixels)[OUTSIDE].max() <= 1
    assert np.abs(np.asarray(stored.convert("RGB")).astype(int) - expected_pixels).mean() > 4


def test_alpha_stays_beside_grey_that_is_converted() -> None:
    grey = Image.fromarray(SCENE).convert("LA")
    clear = blob_mask(*SIZE)
    grey.putalpha(Image.fromarray(clear))
    decoded = decode_image(encode(grey, icc_profile=grey_profile(1.0)), "IMAGE", LIMITS)
    np.testing.assert_array_equal(decoded.alpha, clear)
    deep = png(np.asarray(grey.getchannel("L")).astype(np.uint16) * 257, GREY, 16)
    tagged = png_of(
        (chunks := chunks_of(deep))[0],
        (b"iCCP", b"x\0\0" + zlib.compress(grey_profile(1.0))),
        *chunks[1:],
    )
    np.testing.assert_array_equal(decode_image(tagged, "IMAGE", LIMITS).pixels, decoded.pixels)


def test_a_profile_that_leads_one_way_is_converted_by() -> None:
    profile = one_way_profile()
    edited_image = answer(encode(SCENE, icc_profile=profile))
    assert "icc_profile" not in edited_image.info
    expected_pixels = to_srgb(Image.fromarray(SCENE), profile)
    assert np.abs(np.asarray(edited_image).astype(int) - expected_pixels)[OUTSIDE].max() <= 1
    assert np.abs(expected_pixels - SCENE).mean() > 4


@pytest.mark.parametrize(
    "profile",
    [
        b"junk",
        WIDE[:300],
        bytes(500),
        grey_profile(1.0),
        cmyk_profile(),
        WIDE.replace(b"XYZ ", b"ABC "),
    ],
    ids=["junk", "cut", "zeros", "grey", "cmyk", "space"],
)
def test_a_profile_that_cannot_be_used_is_left_out_and_told(profile: bytes) -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        decoded = decode_image(encode(SCENE, kind, icc_profile=profile), "IMAGE", LIMITS)
        assert decoded.colour.profile == b""
        assert decoded.warnings == ("IMAGE: its colour profile cannot be used, and is left out",)
    prepared_edit = prepared(encode(SCENE, icc_profile=profile))
    np.testing.assert_array_equal(prepared_edit.pixels, SCENE)
    assert prepared_edit.request.warnings == decoded.warnings


@pytest.mark.parametrize(
    "chunk",
    [
        (b"gAMA", bytes(4)),
        (b"gAMA", b"\0\0"),
        (b"gAMA", b"\xff" * 4),
        (b"cHRM", bytes(32)),
        (b"cHRM", b"\xff" * 32),
        (b"cHRM", struct.pack(">8I", *(30000,) * 8)),
        (b"cHRM", b"x"),
        (b"cICP", b"xy"),
        (b"cICP", b"\xff" * 4),
        (b"sRGB", b""),
        (b"iCCP", b""),
        (b"iCCP", b"x" * 200),
        (b"iCCP", b"x\0\0nothing deflated"),
        (b"iCCP", b"x\0\0" + zlib.compress(bytes(20_000_000))),
        (b"iCCP", b"x\0\1" + zlib.compress(WIDE)),
    ],
)
def test_nonsense_about_colours_harms_nothing(chunk: tuple[bytes, bytes]) -> None:
    prepared_edit = prepared(with_chunks(chunk))
    np.testing.assert_array_equal(prepared_edit.pixels, SCENE)
    edited_file = finish_edit(prepared_edit.pixels, prepared_edit.context)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(edited_file))), SCENE)


def test_a_mask_has_no_colours() -> None:
    grey = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    plain = decode_mask(encode(grey), "MASK", LIMITS)
    tagged = decode_mask(
        encode(Image.fromarray(grey), icc_profile=grey_profile(1.0)), "MASK", LIMITS
    )
    np.testing.assert_array_equal(tagged.luminance, plain.luminance)


def test_control_pictures_are_seen_in_srgb_too() -> None:
    decoded: Decoded = decode_image(encode(SCENE, icc_profile=WIDE), "CONTROL[0]", LIMITS)
    srgb_pixels = np.asarray(decoded.colour.to_display(Image.fromarray(decoded.pixels)))
    np.testing.assert_array_equal(srgb_pixels, to_srgb(Image.fromarray(SCENE), WIDE))


def test_random_profiles_end_as_they_began() -> None:
    rng = np.random.default_rng(11)
    for gamma, kind in product((1.0, 1.8, 2.4), ("PNG", "WEBP")):
        rgb = [tuple(rng.uniform(-0.03, 0.03, 2) + base) for base in P3]
        profile = rgb_profile(rgb, gamma)
        picture = rng.integers(0, 256, (*SIZE, 3), np.uint8)
        edited_image = answer(encode(picture, kind, lossless=True, icc_profile=profile))
        np.testing.assert_array_equal(np.asarray(edited_image)[OUTSIDE], picture[OUTSIDE])
        assert edited_image.info["icc_profile"] == profile
