"""Masks against slow, literal definitions."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings, MaskMode
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import DecodedMask
from maskserve_common.imaging.masks import (
    active_tokens,
    active_tokens_per_level,
    component_boxes,
    edit_mask,
    edit_region,
    paste_weights,
    select,
    selected_pixels,
)
from tests.fakes.pictures import encode
from tests.support.draws import fresh_rng
from tests.support.examples import examples

small = st.integers(1, 24)
bools = hnp.arrays(np.bool_, st.tuples(small, small))


def _white(mask: np.ndarray) -> DecodedMask:
    return DecodedMask((mask * 255).astype(np.uint8), None)


@dataclass
class Masks:
    """Masks and warnings of one edit whose model sees the whole picture."""

    paste: np.ndarray
    edit: np.ndarray
    warnings: tuple[str, ...]


def _masks(
    mask: DecodedMask,
    source_size: tuple[int, int],
    size: tuple[int, int],
    mode: MaskMode = "auto",
    dilate: int = 0,
    feather: int = 0,
) -> Masks:
    layers = [mask.luminance] if mask.alpha is None else [mask.luminance, mask.alpha]
    encoded = encode(np.dstack(layers) if len(layers) > 1 else layers[0])
    selection = select(encoded, EditSettings(mask_mode=mode), LimitsConfig(), source_size)
    paste = paste_weights(selection.pixels, dilate, feather)
    assert paste is not None
    return Masks(paste, edit_mask(paste, size), selection.warnings)


# The rule: which pixels are meant


def test_white_from_128_edits() -> None:
    mask = DecodedMask(np.array([[0, 127, 128, 255]], np.uint8), None)
    for mode in ("white", "auto"):
        np.testing.assert_array_equal(selected_pixels(mask, mode), [[False, False, True, True]])


def test_alpha_0_edits_whatever_the_colour() -> None:
    mask = DecodedMask(np.array([[255, 255, 0, 0]], np.uint8), np.array([[0, 1, 0, 255]], np.uint8))
    for mode in ("alpha", "auto"):
        np.testing.assert_array_equal(selected_pixels(mask, mode), [[True, False, True, False]])
    np.testing.assert_array_equal(selected_pixels(mask, "white"), [[True, True, False, False]])


def test_auto_reads_an_opaque_alpha_channel_as_no_alpha() -> None:
    mask = DecodedMask(np.array([[255, 0]], np.uint8), np.array([[255, 255]], np.uint8))
    np.testing.assert_array_equal(selected_pixels(mask, "auto"), [[True, False]])
    np.testing.assert_array_equal(selected_pixels(mask, "alpha"), [[False, False]])


def test_alpha_of_a_mask_without_alpha_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        selected_pixels(_white(np.ones((2, 2))), "alpha")
    assert caught.value.field == "SETTINGS.mask_mode"


@pytest.mark.parametrize(
    ("mask", "mode", "words"),
    [
        (_white(np.zeros((4, 6))), "auto", "selects nothing.*white pixels"),
        (DecodedMask(np.full((4, 6), 255, np.uint8), np.full((4, 6), 9, np.uint8)), "auto", "alph"),
        (_white(np.ones((6, 4))), "auto", "is 4x6 pixels; accepted: the image's size, 6x4"),
    ],
)
def test_masks_that_cannot_work_are_refused(mask: DecodedMask, mode: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        _masks(mask, (4, 6), (16, 16), mode)
    assert caught.value.field == "MASK"


# Paste weights


def _literal_grow(selection: np.ndarray, by: int) -> np.ndarray:
    height, width = selection.shape
    grown = np.zeros_like(selection)
    for y, x in np.argwhere(selection):
        grown[max(0, y - by) : y + by + 1, max(0, x - by) : x + by + 1] = True
    assert grown.shape == (height, width)
    return grown


@given(bools, st.integers(0, 30))
def test_dilation_is_a_square_of_that_many_pixels(selection: np.ndarray, by: int) -> None:
    weights = paste_weights(selection, dilate=by)
    if weights is None:
        assert not selection.any()
        return
    np.testing.assert_array_equal(weights, _literal_grow(selection, by) * 255)


@given(bools, st.integers(0, 6), st.integers(1, 12))
def test_feather_fades_outward_and_never_inward(
    selection: np.ndarray, by: int, feather: int
) -> None:
    weights = paste_weights(selection, by, feather)
    if weights is None:
        assert not selection.any()
        return
    core, reach = _literal_grow(selection, by), _literal_grow(selection, by + feather)
    assert (weights[core] == 255).all()
    assert (weights[~reach] == 0).all()


@given(st.tuples(st.integers(0, 20), st.integers(0, 30)), st.integers(0, 3), st.integers(1, 12))
def test_around_one_pixel_the_weight_is_the_product_of_two_ramps(
    at: tuple[int, int], by: int, feather: int
) -> None:
    selection = np.zeros((21, 31), bool)
    selection[at] = True
    weights = paste_weights(selection, by, feather)
    assert weights is not None
    y, x = np.mgrid[:21, :31]
    away = [np.maximum(0, np.abs(axis - spot) - by) for axis, spot in zip((y, x), at, strict=True)]
    ramps = [np.maximum(0, 1 - distance / (feather + 1)) for distance in away]
    np.testing.assert_allclose(weights, 255 * ramps[0] * ramps[1], atol=0.51)


@pytest.mark.parametrize("feather", [1, 2, 3, 8, 15])
def test_a_straight_edge_fades_linearly_on_both_sides(feather: int) -> None:
    selection = np.zeros((80, 80), bool)
    selection[:, 38:43] = True
    weights = paste_weights(selection, 0, feather)
    assert weights is not None
    ramp = [round(255 * (feather + 1 - d) / (feather + 1)) for d in range(1, feather + 1)]
    row = weights[40].astype(int)
    assert np.abs(row[43 : 43 + feather] - ramp).max() <= 1
    np.testing.assert_array_equal(row, row[::-1][[(i - 1) % 80 for i in range(80)]])
    np.testing.assert_array_equal(row[38:43], 255)
    assert (row[43 + feather :] == 0).all()
    # The image's border is no edge of the mask.
    np.testing.assert_array_equal(weights, np.tile(weights[40], (80, 1)))


def test_nothing_selected_has_no_weights() -> None:
    assert paste_weights(np.zeros((5, 5), bool), 3, 3) is None


def test_a_wide_border_around_a_thin_image_takes_little_memory() -> None:
    tracemalloc.start()
    weights = paste_weights(np.ones((1, 16_384), np.bool_), 512, 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert weights is not None
    assert (weights == 255).all()
    assert peak < 200 * 2**20  # 1025 rows of 17,408 pixels are worked on


def test_one_pixel_at_each_corner_and_an_all_white_mask() -> None:
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        selection = np.zeros((13, 21), bool)
        selection[corner] = True
        masks = _masks(_white(selection), (13, 21), (16, 32))
        assert masks.paste.sum() == 255
        assert len(active_tokens(masks.edit, 16)) in (1, 2)
    whole = _masks(_white(np.ones((13, 21))), (13, 21), (16, 32), "auto", 4, 4)
    assert (whole.paste == 255).all()
    assert (whole.edit == 255).all()


# The model's mask


def _literal_edit(paste: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Overlap of pixel areas, by exact fractions."""
    out = np.zeros(size, np.uint8)
    spans = []
    for target, source in zip(size, paste.shape, strict=True):
        step = Fraction(source, target)
        spans.append(
            [
                [i for i in range(source) if i < (j + 1) * step and i + 1 > j * step]
                for j in range(target)
            ]
        )
    for j, rows in enumerate(spans[0]):
        for k, columns in enumerate(spans[1]):
            out[j, k] = 255 if paste[np.ix_(rows, columns)].any() else 0
    return out


@examples(60)
@given(
    hnp.arrays(np.uint8, st.tuples(small, small), elements=st.sampled_from([0, 0, 0, 1, 255])),
    st.tuples(small, small),
)
def test_a_model_pixel_is_edited_if_anything_under_it_is(
    paste: np.ndarray, size: tuple[int, int]
) -> None:
    np.testing.assert_array_equal(edit_mask(paste, size), _literal_edit(paste, size))


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 399), st.integers(0, 399))
def test_a_mask_of_one_pixel_never_vanishes(height: int, width: int, y: int, x: int) -> None:
    selection = np.zeros((height, width), bool)
    selection[y % height, x % width] = True
    masks = _masks(_white(selection), (height, width), (32, 48))
    assert masks.edit.any()
    assert len(active_tokens(masks.edit, 16)) >= 1


@example(noise=np.zeros((56, 63), bool), thin=1, size=(8, 8), dilate=0, feather=1)
@example(noise=np.zeros((57, 57), bool), thin=1, size=(8, 8), dilate=0, feather=1)
@examples(200)
@given(
    noise=hnp.arrays(
        np.bool_, st.tuples(st.integers(8, 90), st.integers(8, 90)), elements=st.booleans()
    ),
    thin=st.integers(1, 60),
    size=st.sampled_from([(8, 8), (16, 24), (48, 8)]),
    dilate=st.integers(0, 9),
    feather=st.integers(0, 12),
)
def test_a_region_holds_the_edit_mask_and_little_more(
    noise: np.ndarray, thin: int, size: tuple[int, int], dilate: int, feather: int
) -> None:
    selection = noise & (np.arange(noise.size).reshape(noise.shape) % thin == 0)
    selection[selection.shape[0] // 2, selection.shape[1] // 3] = True
    mask = _white(selection)
    exact = _masks(mask, selection.shape, size, "auto", dilate, feather).edit
    region = edit_region(selection, size, dilate, feather)
    assert (region >= exact).all()
    wide = _masks(mask, selection.shape, size, "auto", dilate + feather).edit
    assert (region <= ndimage.maximum_filter(wide, 5)).all()  # two model pixels to each side
    if min(a // b for a, b in zip(selection.shape, size, strict=True)) <= 1:
        np.testing.assert_array_equal(region, wide)


# Tokens


@given(
    hnp.arrays(
        np.uint8,
        st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([16, 64])),
        elements=st.sampled_from([0] * 60 + [255]),
    ),
    st.sampled_from([2, 8, 16]),
)
def test_tokens_are_counted_row_by_row_by_any_overlap(edit: np.ndarray, side: int) -> None:
    across = edit.shape[1] // side
    expected = sorted({(y // side) * across + x // side for y, x in np.argwhere(edit)})
    ids = active_tokens(edit, side)
    assert ids.tolist() == expected
    assert ids.dtype == np.int64


@given(
    hnp.arrays(
        np.uint8, st.sampled_from([(32, 48), (8, 64)]), elements=st.sampled_from([0] * 60 + [1])
    ),
    st.integers(0, 9),
)
def test_a_ring_adds_every_token_so_near_a_masked_one(edit: np.ndarray, ring: int) -> None:
    down, across = edit.shape[0] // 8, edit.shape[1] // 8
    masked = {(y // 8, x // 8) for y, x in np.argwhere(edit)}
    expected = [
        row * across + column
        for row in range(down)
        for column in range(across)
        if any(max(abs(row - y), abs(column - x)) <= ring for y, x in masked)
    ]
    assert active_tokens(edit, 8, ring).tolist() == expected
    assert active_tokens_per_level(edit, 8, (0,), ring)[0].tolist() == expected


def test_token_sizes_that_do_not_fit_are_a_bug() -> None:
    with pytest.raises(ValueError, match="multiple"):
        active_tokens(np.zeros((20, 16), np.uint8), 16)


@given(
    hnp.arrays(
        np.uint8, st.sampled_from([(40, 56), (8, 8), (72, 24)]), elements=st.sampled_from([0, 0, 9])
    )
)
def test_levels_halve_the_grid_and_round_up(edit: np.ndarray) -> None:
    tokens_per_level = active_tokens_per_level(edit, 8, (0, 1, 2))
    np.testing.assert_array_equal(tokens_per_level[0], active_tokens(edit, 8))
    width = edit.shape[1] // 8
    for level in (1, 2):
        coarse = -(-width // 2**level)
        expected = {(y // 8 >> level) * coarse + (x // 8 >> level) for y, x in np.argwhere(edit)}
        assert tokens_per_level[level].tolist() == sorted(expected)


def test_only_the_levels_asked_for_are_returned() -> None:
    assert list(active_tokens_per_level(np.ones((32, 32), np.uint8), 8, (2,))) == [2]


# What is pasted was repainted


@given(
    bools.filter(lambda mask: bool(mask.any())),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from([(16, 16), (32, 16), (8, 24)]),
)
def test_every_weight_lies_inside_active_tokens(
    selection: np.ndarray, dilate: int, feather: int, size: tuple[int, int]
) -> None:
    masks = _masks(_white(selection), selection.shape, size, "auto", dilate, feather)
    active = set(active_tokens(masks.edit, 8).tolist())
    height, width = selection.shape
    for y, x in np.argwhere(masks.paste):
        for row in {y * size[0] // height, ((y + 1) * size[0] - 1) // height}:
            for column in {x * size[1] // width, ((x + 1) * size[1] - 1) // width}:
                assert masks.edit[row, column] == 255
                assert row // 8 * (size[1] // 8) + column // 8 in active


@pytest.mark.parametrize("side", [1, 4, 8, 16])
def test_component_boxes_are_scipys(side: int) -> None:
    rng = fresh_rng()
    for _ in range(20):
        mask = np.zeros((int(rng.integers(8, 90)), int(rng.integers(8, 90))), np.uint8)
        for _ in range(int(rng.integers(1, 9))):
            top, left = (int(rng.integers(n)) for n in mask.shape)
            mask[top : top + int(rng.integers(1, 12)), left : left + int(rng.integers(1, 12))] = 9
        cells = np.zeros([-(-n // side) for n in mask.shape], bool)
        for y, x in np.argwhere(mask):
            cells[y // side, x // side] = True
        parts, count = ndimage.label(cells, np.ones((3, 3)))
        boxes = []
        for rows, columns in ndimage.find_objects(parts, count):
            top, left = rows.start * side, columns.start * side
            ys, xs = np.nonzero(mask[top : rows.stop * side, left : columns.stop * side])
            boxes.append((top + ys.min(), left + xs.min(), top + ys.max() + 1, left + xs.max() + 1))
        assert component_boxes(mask, side) == tuple(sorted(boxes))


def test_many_components_have_one_box() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[2::8, 3::8] = 255
    assert component_boxes(mask, 2) == ((2, 3, 59, 60),)
    assert component_boxes(np.zeros((8, 8), np.uint8), 2) == ()


def test_a_mask_that_leaves_next_to_nothing_is_told_of() -> None:
    painted = np.zeros((20, 20), np.uint8)
    painted[8:11, 8:11] = 255  # strokes on a transparent layer
    white = np.full((20, 20), 255, np.uint8)
    layer = _masks(DecodedMask(white, painted), (20, 20), (16, 16))
    assert layer.warnings == (
        "MASK: 98% of the picture is edited, because the mask is transparent (alpha 0) there; to "
        "edit the painted part instead, set SETTINGS.mask_mode to white",
    )
    inverse = _masks(DecodedMask(255 - painted, None), (20, 20), (16, 16))
    assert "white (luminance 128 or more)" in inverse.warnings[0]
    for mask in (DecodedMask(painted, None), DecodedMask(white, 255 - painted)):
        assert _masks(mask, (20, 20), (16, 16)).warnings == ()
    almost = np.full((20, 20), 255, np.uint8)
    almost[:2] = 0
    assert _masks(DecodedMask(almost, None), (20, 20), (16, 16)).warnings == ()
    with pytest.raises(InvalidRequest, match=r"or SETTINGS\.mask_mode white: it is opaque"):
        _masks(DecodedMask(painted, white), (20, 20), (16, 16), "alpha")
