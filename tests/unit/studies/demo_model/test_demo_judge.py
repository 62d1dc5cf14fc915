"""The demo model's judge: right on drawn answers, not fooled by wrong or empty ones."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import (
    draw_object,
    fill,
    held_out_edits,
    make_mask,
    place,
)
from maskserve_studies.demo_model.judge import judge

EDITS = held_out_edits(48)


def _with(edit, colour, shape):
    behind = fill(edit.source, edit.mask)
    picture = np.where(edit.mask[..., None], behind, edit.source).astype(np.float32)
    return draw_object(picture, edit.mask, colour, shape).astype(np.uint8)


def test_drawn_answers_are_judged_right():
    verdicts = [judge(e.target, e.source, e.mask) for e in EDITS]
    pairs = zip(EDITS, verdicts, strict=True)
    wrong = [e.prompt for e, verdict in pairs if not verdict.matches(e.colour, e.shape)]
    assert wrong == []


def test_drawn_answers_are_judged_right_at_full_resolution():
    for edit in EDITS[::6]:
        size = (edit.mask.shape[1] * 5, edit.mask.shape[0] * 4)  # not even the same aspect
        large = [np.asarray(Image.fromarray(x).resize(size)) for x in (edit.target, edit.source)]
        mask = np.asarray(Image.fromarray(edit.mask).resize(size))
        assert judge(large[0], large[1], mask).colour == edit.colour


def test_soft_edges_do_not_change_the_verdict():
    for edit in EDITS:
        soft = Image.fromarray(edit.target).filter(ImageFilter.GaussianBlur(1))
        picture = np.where(edit.mask[..., None], np.asarray(soft), edit.source)
        assert judge(picture, edit.source, edit.mask).matches(edit.colour, edit.shape), edit.prompt


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_shape_is_told(shape):
    edit = next(e for e in EDITS if e.shape != shape)
    verdict = judge(_with(edit, edit.colour, shape), edit.source, edit.mask)
    assert (verdict.colour, verdict.shape) == (edit.colour, shape)
    assert not verdict.matches(edit.colour, edit.shape)


def test_a_wrong_colour_is_told():
    for edit in EDITS[:8]:
        centre, _ = place(edit.mask)
        behind = fill(edit.source, edit.mask)[int(centre[1]), int(centre[0])]
        wrong_colour = max(
            (c for c in COLOURS if c != edit.colour),
            key=lambda c: float(np.linalg.norm(behind - np.asarray(COLOURS[c]))),
        )
        verdict = judge(_with(edit, wrong_colour, edit.shape), edit.source, edit.mask)
        assert (verdict.colour, verdict.shape) == (wrong_colour, edit.shape)


def test_an_empty_region_is_nothing():
    for edit in EDITS:
        behind = fill(edit.source, edit.mask)
        picture = np.where(edit.mask[..., None], behind, edit.source).astype(np.uint8)
        assert not judge(picture, edit.source, edit.mask).matches(edit.colour, edit.shape)


def test_noise_is_not_a_shape():
    rng = np.random.default_rng(0)
    hits = 0
    for edit in EDITS:
        noise = rng.integers(0, 256, edit.source.shape, np.uint8)
        picture = np.where(edit.mask[..., None], noise, edit.source)
        hits += judge(picture, edit.source, edit.mask).matches(edit.colour, edit.shape)
    assert hits <= 2


def test_sizes_that_differ_are_refused():
    edit = EDITS[0]
    with pytest.raises(ValueError, match="differ"):
        judge(edit.target[:64], edit.source, edit.mask)


def test_held_out_edits_are_fixed_and_balanced():
    second_edits = held_out_edits(48)
    assert all(np.array_equal(a.source, b.source) for a, b in zip(EDITS, second_edits, strict=True))
    assert len({(e.colour, e.shape) for e in EDITS}) == len(COLOURS) * len(SHAPES)


def test_masks_cover_what_they_should():
    rng = np.random.default_rng(1)
    ratios = [make_mask(rng, (128, 128)).mean() for _ in range(200)]
    assert 0.03 < min(ratios) < 0.08
    assert 0.25 < max(ratios) < 0.45
