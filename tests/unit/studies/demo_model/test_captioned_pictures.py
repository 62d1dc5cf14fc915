"""Captions say what their pictures show, and the judge tells other pictures from them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_studies.demo_model.captioned_pictures import (
    draw_captioned_picture,
    held_out_pictures,
    is_held_out,
)
from maskserve_studies.demo_model.reference_edits import SIDES
from tests.support.draws import fresh_rng

PICTURES = 24


@pytest.mark.parametrize("held_out", [False, True])
def test_a_drawn_picture_follows_its_caption_and_no_other_of_other_objects(held_out: bool) -> None:
    drawn = list(held_out_pictures(PICTURES, held_out=held_out))
    assert all(one.shown_in(one.picture) for one in drawn)
    for one, other in pairwise(drawn):
        assert one.shown_in(other.picture) == (one.caption == other.caption)
    bare = [one.scene.drawn(()) for one in drawn]
    assert not any(one.shown_in(picture) for one, picture in zip(drawn, bare, strict=True))


def test_a_caption_names_every_object_and_its_side() -> None:
    rng = fresh_rng()
    for _ in range(PICTURES):
        one = draw_captioned_picture(rng, (104, 152))
        phrases = one.caption.split(" and ")
        for phrase, thing in zip(phrases, one.scene.things, strict=True):
            assert phrase.startswith(f"a {thing.colour} {thing.shape}")
            (x, y), words = thing.centre, phrase.split()
            right, down = x - 152 / 2, y - 104 / 2
            away = {"left": -right, "right": right, "top": -down, "bottom": down}
            [side] = [word for word in words if word in SIDES] or [None]
            if side is None:
                assert max(away.values()) <= 5
            else:
                assert away[side] > 20


def test_training_does_not_show_some_objects_and_the_judge_has_pictures_of_them() -> None:
    rng = fresh_rng()
    pairs = {(colour, shape) for colour in COLOURS for shape in SHAPES}
    unseen = {pair for pair in pairs if is_held_out(*pair)}
    assert len(unseen) == 6
    for held_out in (False, True):
        for _ in range(PICTURES):
            things = draw_captioned_picture(rng, (128, 128), held_out=held_out).scene.things
            assert all(is_held_out(thing.colour, thing.shape) == held_out for thing in things)
