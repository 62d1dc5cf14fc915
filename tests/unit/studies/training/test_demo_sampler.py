"""Training batches of the demo model hold what their prompts ask about, at places of their own."""

import numpy as np
import pytest
import torch

from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH
from maskserve_studies.training.data import PROMPT_COLOURS, PROMPT_SHAPES, Part
from maskserve_studies.training.sampler import Sampler

SIDE, WIDTH, PIXELS = 16, 4, 8
SCENES = 30
MASK = (3, 7, 2, 6)  # rows, columns of tokens
OTHER = (11, 15, 10, 14)
MARK_MASKED, MARK_OTHER = 5.0, 9.0


def _part(kind: str) -> Part:
    """Scenes whose masked tokens and object's tokens are marked in the answers."""
    wishes = {"plain": 3, "relations": 3, "structures": 0}[kind]
    grid = (SIDE, SIDE)
    answers = np.zeros((SCENES, wishes + 1, *grid, WIDTH), np.float16)
    answers[:, :, MASK[0] : MASK[1], MASK[2] : MASK[3]] = MARK_MASKED
    answers[:, :, OTHER[0] : OTHER[1], OTHER[2] : OTHER[3]] = MARK_OTHER
    mask = np.zeros((SCENES, *grid, PIXELS // 8), np.uint8)
    mask[:, MASK[0] : MASK[1], MASK[2] : MASK[3]] = 255
    wish = np.zeros((SCENES, wishes, 4), np.uint8)
    wish[..., 2] = len(PROMPT_COLOURS) - 1 if kind == "relations" else 0
    other_object = np.zeros((SCENES, 6), np.uint8)
    if kind == "relations":
        other_object[:] = (*OTHER, 3, 2)
    masked = np.zeros((SCENES, *grid, WIDTH), np.float16)
    box = np.broadcast_to(np.asarray(MASK, np.uint8), (SCENES, 4))
    return Part(kind, answers, masked, mask, wish, box, other_object)


@pytest.fixture
def sampler():
    prompts = {
        (colour, shape): (
            torch.full((2, MAX_SEQUENCE_LENGTH, 3), float(colour)), torch.full((2, 3), float(shape))
        )
        for colour in range(-1, len(PROMPT_COLOURS))
        for shape in range(-1, len(PROMPT_SHAPES))
    }  # fmt: skip
    return Sampler([_part(k) for k in ("plain", "relations", "structures")], prompts, 0)


@pytest.mark.parametrize("window", [6, 8, 11, None])
@pytest.mark.parametrize("kind", ["plain", "relations", "structures"])
def test_every_window_holds_the_whole_mask_and_the_object(sampler, kind, window):
    for _ in range(10):
        batch = sampler.draw(1000, kind, window)
        tokens = batch.clean.shape[1] + MAX_SEQUENCE_LENGTH
        assert len(batch.clean) == max(1, 1000 // tokens)
        assert batch.ids.shape == (batch.clean.shape[1], 3)
        assert len(torch.unique(batch.ids, dim=0)) == len(batch.ids)
        for sample in range(len(batch.clean)):
            marks = batch.clean[sample, :, 0]
            assert (marks == MARK_MASKED).sum() >= 16  # more where the windows overlap
            known_mask = batch.token_objects[sample, :, 0] >= 0
            assert known_mask.sum() >= 16 if kind == "relations" else not known_mask.any()
            assert bool((marks[known_mask] == MARK_OTHER).all())
            assert bool((batch.token_objects[sample][known_mask] == torch.tensor([3, 2])).all())


def test_masked_pixels_stand_in_the_condition(sampler):
    batch = sampler.draw(20_000, "plain", 8)
    pixels = batch.condition[..., WIDTH:]
    shown_mask = batch.answer_object[:, 0] >= 0
    assert shown_mask.float().mean() > 0.7
    assert bool((pixels[shown_mask].sum((1, 2)) == 16 * PIXELS).all())
    # Without a mask the picture itself is given and asked for, as when a template is primed.
    primed = pixels.sum((1, 2)) == 0
    assert bool(primed.any())
    assert torch.equal(batch.clean[primed], batch.condition[primed][..., :WIDTH])
    assert bool((batch.prompt[primed] == -1).all())


def test_relations_are_mostly_asked_as_such_and_structures_never(sampler):
    same_colour = len(PROMPT_COLOURS) - 1
    colours = sampler.draw(40_000, "relations", 6).prompt[:, 0, 0]
    assert 0.6 < (colours == same_colour).float().mean() < 0.95
    assert bool((colours == 0).any())  # by name
    assert bool((sampler.draw(4_000, "structures", 6).prompt == -1).all())


def test_object_windows_hold_the_object_alone(sampler):
    batch = sampler.draw_objects(1000)
    assert batch.clean.shape[1] == 25
    known_mask = batch.token_objects[..., 0] >= 0
    assert bool((known_mask.sum(1) == 16).all())
    assert bool((batch.clean[known_mask][:, 0] == MARK_OTHER).all())


def test_two_windows_are_found_beside_one_another_wherever_the_first_is(sampler):
    """A large one in the middle leaves no room for another."""
    for _ in range(200):
        ids = sampler.draw(1, "relations", 11).ids
        assert len(torch.unique(ids, dim=0)) == len(ids) == 11 * 11 + 6 * 6
