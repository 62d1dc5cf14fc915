"""The held-out edit classes: fixed, judged right when answered right, and not to be guessed."""

import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.prompts import SAME, every_phrase
from maskserve_benchmarks.demo_model.scenes import fill
from maskserve_studies.demo_model.edit_classes import CLASSES, edit_classes, edits_of
from maskserve_studies.demo_model.hard_edits import MASKS
from maskserve_studies.demo_model.judge import judge
from maskserve_studies.demo_model.relations import (
    FAR,
    RELATIONS,
    draw_wish,
    make_relational_scene,
)
from maskserve_studies.demo_model.structures import STRUCTURES

SIZE = (128, 128)


@pytest.mark.parametrize("name", CLASSES)
def test_edits_are_fixed_and_do_not_depend_on_how_many_are_asked(name):
    three, two_edits = edits_of(name, 3), edits_of(name, 2)
    for a, b in zip(three, two_edits, strict=False):
        assert np.array_equal(a.source, b.source)
        assert np.array_equal(a.mask, b.mask)
        assert a.prompt == b.prompt


def test_every_class_has_its_edits():
    classes = edit_classes(2)
    assert tuple(classes) == CLASSES
    assert {len(edits) for edits in classes.values()} == {2}
    with pytest.raises(ValueError, match="accepted: named, same"):
        edits_of("nothing", 1)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_right_answer_to_a_relation_is_judged_right(relation):
    for edit in edits_of(relation, 24):
        verdict = judge(edit.target, edit.source, edit.mask)
        assert verdict.matches(edit.colour, edit.shape), edit.prompt
        assert not judge(edit.source, edit.source, edit.mask).matches(edit.colour, edit.shape)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_prompt_alone_does_not_tell_the_answer(relation):
    """Edits with the same prompt have different answers, so an editor blind to the rest guesses."""
    edits = edits_of(relation, 48)
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for edit in edits:
        by_prompt.setdefault(edit.prompt, []).append((edit.colour, edit.shape))
    best = sum(max(map(answers.count, answers)) for answers in by_prompt.values())
    assert best / len(edits) < 0.55  # of the best guess per prompt, with the answers known


@pytest.mark.parametrize("size", [SIZE, (104, 152), (256, 256)])
def test_the_other_object_stands_far_from_the_mask(size):
    rng = np.random.default_rng(4)
    scale = np.sqrt(size[0] * size[1]) / 128
    for _ in range(20):
        drawn = make_relational_scene(rng, size)
        rgb = np.asarray(COLOURS[drawn.colour])
        ys, xs = np.nonzero((np.abs(drawn.scene.source.astype(int) - rgb) <= 1).all(axis=2))
        near = np.hypot(xs - drawn.centre[0], ys - drawn.centre[1]) <= drawn.radius
        assert near.sum() > 40 * scale**2
        gaps = distance_transform_edt(drawn.scene.mask == 0)[ys[near], xs[near]]
        assert gaps.min() >= FAR * scale - 2


def test_a_wish_is_answered_by_the_other_object():
    rng = np.random.default_rng(5)
    drawn = make_relational_scene(rng, SIZE)
    same_wish = draw_wish(rng, drawn, "same")
    assert (same_wish.prompt_words, same_wish.colour, same_wish.shape) == (
        (SAME, SAME),
        drawn.colour,
        drawn.shape,
    )
    star = draw_wish(rng, drawn, "same_colour")
    assert star.colour == drawn.colour
    assert star.shape != drawn.shape
    blue = draw_wish(rng, drawn, "same_shape")
    assert blue.shape == drawn.shape
    assert blue.colour != drawn.colour
    with pytest.raises(ValueError, match="relation"):
        draw_wish(rng, drawn, "other")


def test_every_wording_asks_for_one_thing():
    wishes_by_text: dict[str, set[tuple[str, str]]] = {}
    for text, colour, shape in every_phrase():
        wishes_by_text.setdefault(text, set()).add((colour, shape))
    assert {len(wishes) for wishes in wishes_by_text.values()} == {1}
    assert len(set().union(*wishes_by_text.values())) == (len(COLOURS) + 1) * (len(SHAPES) + 1)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_smooth_fill_does_not_continue_a_structure(structure):
    errors = []
    for edit in edits_of(structure, 24):
        difference = fill(edit.source, edit.mask)[edit.mask] - edit.target[edit.mask]
        errors.append(float(np.sqrt((difference**2).mean())))
        assert (edit.prompt, edit.colour, edit.shape) == ("", None, None)
    assert np.median(errors) > 8


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("lines", 0.005, 0.15), ("pieces", 0.02, 0.15), ("strip", 0.05, 0.3), ("dot", 0.008, 0.014),
     ("most", 0.87, 0.93)],
)  # fmt: skip
def test_hard_masks_are_what_they_are_called(kind, low, high):
    edits = edits_of(kind, 24)
    assert all(low < edit.mask.mean() < high for edit in edits)
    assert {edit.prompt == "" for edit in edits} == {True, False}
    if kind == "strip":
        assert all(
            any(side.all() for side in (m[0], m[-1], m[:, 0], m[:, -1]))
            for m in (edit.mask for edit in edits)
        )
    assert kind in MASKS
