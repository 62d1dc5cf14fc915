"""Outside the mask an answer means what its source meant: transparency, depth, colours, EXIF."""

from __future__ import annotations

import io

import numpy as np
import png as pypng
import pytest
from PIL import Image, ImageCms

from tests.fakes.pictures import blob_mask, encode, scene, sixteen_bit_png
from tests.fakes.profiles import cmyk_profile, rgb_profile
from tests.support.calls import Grpc, edit_inputs, pixels
from tests.support.draws import fresh_rng

SIZE = (45, 61)
SCENE, MASK = scene(*SIZE), blob_mask(*SIZE)
OUTSIDE = MASK == 0
WIDE = rgb_profile(((0.68, 0.32), (0.265, 0.69), (0.15, 0.06)), 2.2)


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
def test_transparency_of_a_source_is_kept_outside_the_mask(grpc: Grpc, output_format: str) -> None:
    rng, mask = fresh_rng(), blob_mask(45, 61)
    alpha = rng.integers(0, 256, (45, 61), np.uint8)
    source = encode(np.dstack((scene(45, 61), alpha)))
    image, _ = grpc.edit(edit_inputs(source, mask, output_format=output_format))
    opened = Image.open(io.BytesIO(image))
    if output_format == "jpeg":
        assert opened.mode == "RGB"
        return
    assert np.array_equal(np.asarray(opened)[..., 3], np.where(mask == 0, alpha, 255))
    opaque, _ = grpc.edit(edit_inputs(source, mask, background="opaque"))
    assert Image.open(io.BytesIO(opaque)).mode == "RGB"
    assert np.array_equal(pixels(opaque), pixels(image))


def test_16_bits_of_a_source_are_kept_outside_the_mask(grpc: Grpc) -> None:
    samples = fresh_rng().integers(0, 2**16, (45, 61, 3), np.uint16)
    source, mask = sixteen_bit_png(samples), blob_mask(45, 61)
    image, _ = grpc.edit(edit_inputs(source, mask))
    _, _, rows, png_info = pypng.Reader(bytes=image).read()
    answer = np.vstack([np.asarray(row, np.uint16) for row in rows]).reshape(45, 61, 3)
    assert png_info["bitdepth"] == 16
    assert np.array_equal(answer[mask == 0], samples[mask == 0])
    assert (answer[mask > 0] % 257 == 0).all()
    coarse, _ = grpc.edit(edit_inputs(source, mask, output_format="webp"))
    assert np.array_equal(pixels(coarse), answer >> 8)


@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_a_wide_profile_is_kept_with_the_numbers_it_is_of(grpc: Grpc, output_format: str) -> None:
    source = encode(SCENE, icc_profile=WIDE)
    image, _ = grpc.edit(edit_inputs(source, MASK, output_format=output_format))
    with Image.open(io.BytesIO(image)) as opened:
        assert opened.info["icc_profile"] == WIDE
        edited = np.asarray(opened)
    assert np.array_equal(edited[OUTSIDE], SCENE[OUTSIDE])
    plain, _ = grpc.edit(edit_inputs(SCENE, MASK, output_format=output_format))
    assert not np.array_equal(edited, pixels(plain)), "the model saw other colours"


def test_cmyk_is_converted_by_its_profile(grpc: Grpc) -> None:
    source = encode(
        Image.fromarray(SCENE).convert("CMYK"), "JPEG", quality=95, icc_profile=cmyk_profile()
    )
    stored, inks = Image.open(io.BytesIO(source)), io.BytesIO(cmyk_profile())
    expected_image = ImageCms.profileToProfile(
        stored, inks, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert expected_image is not None
    image, _ = grpc.edit(edit_inputs(source, MASK))
    difference = np.abs(pixels(image).astype(int) - np.asarray(expected_image))[OUTSIDE]
    assert difference.max() <= 1
    naive = np.abs(np.asarray(stored.convert("RGB")).astype(int) - np.asarray(expected_image))[
        OUTSIDE
    ]
    assert naive.mean() > 4


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_exif_is_kept_and_the_picture_turned_once(grpc: Grpc, output_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a camera"
    lying = encode(np.rot90(SCENE), "PNG", exif=exif)
    image, _ = grpc.edit(edit_inputs(lying, MASK, output_format=output_format))
    with Image.open(io.BytesIO(image)) as opened:
        exif_tags, edited = opened.getexif(), np.asarray(opened)
    assert (exif_tags[0x0112], exif_tags[0x010F]) == (1, "a camera")
    assert edited.shape == SCENE.shape
    if output_format != "jpeg":
        assert np.array_equal(edited[OUTSIDE], SCENE[OUTSIDE])
