"""Sizes at which the model works, and resizing parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from maskserve_common.imaging.images import model_size, resize, resize_part
from tests.fakes.pictures import scene


@pytest.mark.parametrize(
    ("source", "native", "multiple", "expected"),
    [
        ((1024, 1024), 1024, 16, (1024, 1024)),
        ((2048, 2048), 1024, 16, (1024, 1024)),
        ((512, 512), 1024, 16, (512, 512)),  # smaller images stay as they are
        ((250, 250), 256, 16, (256, 256)),
        ((1, 1), 1024, 16, (16, 16)),
        ((1080, 1920), 1024, 16, (768, 1360)),
        ((1920, 1080), 1024, 16, (1360, 768)),
        ((8, 16384), 128, 8, (8, 2048)),
        ((16384, 8), 128, 8, (2048, 8)),
        ((3, 65535), 1024, 16, (16, 65536)),
        ((100, 100), 8, 16, (16, 16)),
    ],
)
def test_examples(
    source: tuple[int, int], native: int, multiple: int, expected: tuple[int, int]
) -> None:
    assert model_size(source, native, multiple) == expected


@given(
    st.tuples(st.integers(1, 70_000), st.integers(1, 70_000)),
    st.sampled_from([64, 128, 512, 768, 1000, 1024]),
    st.sampled_from([8, 16, 32]),
)
def test_area_multiples_and_aspect(source: tuple[int, int], native: int, multiple: int) -> None:
    height, width = model_size(source, native, multiple)
    assert height % multiple == width % multiple == 0
    assert height >= multiple
    assert width >= multiple
    assert height * width <= native**2
    if min(height, width) > multiple:
        # Rounding a side to a multiple changes it by less than one multiple.
        error = abs(math.log(height * source[1] / (width * source[0])))
        assert error <= -2 * math.log(1 - multiple / min(height, width)) + 1e-9
    assert height < source[0] + multiple
    assert width < source[1] + multiple


def test_transposing_the_source_transposes_the_size() -> None:
    rng = np.random.default_rng(1)
    for height, width in rng.integers(1, 3000, (200, 2)):
        assert model_size((height, width), 512, 16) == model_size((width, height), 512, 16)[::-1]


def test_resize_keeps_an_image_of_the_right_size_as_it_is() -> None:
    image = Image.fromarray(scene(20, 30))
    assert resize(image, (20, 30)) is image
    assert resize(image, (5, 7)).size == (7, 5)


@pytest.mark.parametrize("size", [(20, 30), (45, 61), (128, 64), (200, 201)])
def test_a_resized_part_is_that_part_of_the_whole(size: tuple[int, int]) -> None:
    smooth = Image.fromarray(scene(6, 6)).resize((64, 64), Image.Resampling.BICUBIC)
    box = (3, 2, size[1] - 4, size[0] // 2)
    whole = np.asarray(resize(smooth, size)).astype(int)[box[1] : box[3], box[0] : box[2]]
    part = np.asarray(resize_part(smooth, size, box)).astype(int)
    assert part.shape == whole.shape
    assert np.abs(part - whole).max() <= 2
    assert np.abs(part - whole).mean() < 0.3
