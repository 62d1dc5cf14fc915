"""The PNG writer against Pillow's reader, which checks every checksum."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from maskserve_common.imaging import images
from maskserve_common.imaging.images import encode_png
from tests.support.draws import fresh_rng

sides = st.integers(1, 40)


@given(
    st.one_of(
        hnp.arrays(np.uint8, st.tuples(sides, sides)),
        hnp.arrays(np.uint8, st.tuples(sides, sides, st.just(3))),
    )
)
def test_any_reader_gets_the_same_pixels(pixels: np.ndarray) -> None:
    opened = Image.open(io.BytesIO(encode_png(pixels)))
    opened.verify()
    opened = Image.open(io.BytesIO(encode_png(pixels)))
    np.testing.assert_array_equal(np.asarray(opened), pixels)


def test_arrays_that_are_views_are_written_as_they_look() -> None:
    pixels = np.arange(7 * 5 * 3, dtype=np.uint8).reshape(7, 5, 3)
    for view in (pixels[::-1], pixels[:, ::-1], pixels[1:4, 2:4], pixels.transpose(1, 0, 2)):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(view)))), view)


def test_a_platform_without_isal_writes_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = fresh_rng().integers(0, 256, (30, 40, 3), dtype=np.uint8)
    by_isal = encode_png(pixels)
    monkeypatch.setattr(images, "_isal", None)
    for encoded in (by_isal, encode_png(pixels)):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encoded))), pixels)
