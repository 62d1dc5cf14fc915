"""The photo model's examples, words and judge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from maskserve_studies.photo_model import edits, scenes, words
from maskserve_studies.photo_model.judge import psnr, recognise, rim_step
from maskserve_studies.photo_model.sources import textures
from tests.support.examples import number

SIZE = (128, 128)


@pytest.mark.parametrize("kind", edits.KINDS)
def test_edits_change_only_the_region_and_are_the_same_again(kind: str) -> None:
    grounds = textures()
    first = edits.photo_edits(kind, 3, grounds, SIZE)
    second_edits = edits.photo_edits(kind, 2, grounds, SIZE)
    for edit in first:
        assert edit.source.shape == (*SIZE, 3)
        assert edit.mask.any()
        assert not edit.mask.all()
        np.testing.assert_array_equal(edit.source[~edit.mask], edit.target[~edit.mask])
    for first_edit, second_edit in zip(first, second_edits, strict=False):
        assert first_edit.prompt == second_edit.prompt
        np.testing.assert_array_equal(first_edit.target, second_edit.target)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind: unknown 'sky'; accepted: fill"):
        edits.photo_edits("sky", 1, {})


@pytest.mark.parametrize("kind", ["object", "shape", "ground", "more"])
def test_the_judge_knows_right_answers_and_no_word_in_an_empty_region(kind: str) -> None:
    grounds = textures()
    for edit in edits.photo_edits(kind, number(4, 1), grounds, (256, 256)):
        assert recognise(edit.target, edit.source, edit.mask, grounds) == edit.wish
        grey = np.where(edit.mask[..., None], np.uint8(128), edit.source)
        assert recognise(grey, edit.source, edit.mask, grounds) != edit.wish


def test_a_region_too_small_to_judge_is_refused() -> None:
    picture = np.zeros((512, 512, 3), np.uint8)
    mask = np.zeros((512, 512), np.bool_)
    mask[0, 0] = True
    with pytest.raises(ValueError, match="mask: no pixel of it is left"):
        recognise(picture, picture, mask, {})


def test_rim_and_likeness() -> None:
    picture = np.full((16, 16, 3), 100, np.uint8)
    mask = np.zeros((16, 16), np.bool_)
    mask[4:12, 4:12] = True
    assert rim_step(picture, np.zeros_like(mask)) == 0
    assert rim_step(picture, mask) == 0
    assert psnr(picture, picture, mask) == math.inf
    brighter = np.where(mask[..., None], np.uint8(110), picture)
    assert rim_step(brighter, mask) == 10
    assert psnr(brighter, picture, mask) == pytest.approx(10 * math.log10(255**2 / 100))


def test_every_wish_has_words_that_name_it() -> None:
    known_words = set(words.words())
    rng = np.random.default_rng(0)
    for wish in words.wishes():
        look, thing = wish.numbers
        assert words.Wish(words.THINGS[thing], words.LOOKS[look]) == wish
        for text in (words.first_phrase(wish), words.wording(rng, wish)):
            parts = "".join(ch if ch.isalpha() else " " for ch in text.lower()).split()
            assert known_words.issuperset(parts)
            assert len(parts) < 12
    assert words.first_phrase(words.Wish("apple")) == "an apple"
    assert words.first_phrase(words.Wish("star", "orange")) == "an orange star"
    assert words.first_phrase(words.Wish(words.NOTHING)) == ""


def test_prompts_are_numbered_and_the_empty_one_comes_first() -> None:
    drawn = words.draw_prompts(np.random.default_rng(0), 64)
    assert drawn[0] == ("", *words.Wish(words.NOTHING).numbers)
    drawn_things = {words.THINGS[thing] for _, _, thing in drawn}
    assert {words.NOTHING, words.MORE, words.GROUND} < drawn_things


def test_objects_have_pictures() -> None:
    assert {path.stem for path in scenes.OBJECT_FILES.glob("*.webp")} == set(words.OBJECTS)
    for name in words.OBJECTS:
        assert scenes.sprite(name).mode == "RGBA"
