"""Batches of the demo edit model's training: edits with their source, pictures without one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from maskserve_studies.training.edit import (
    BEHIND_WEIGHT,
    MAX_LENGTH,
    OUTSIDE_WEIGHT,
    TOKENS_PER_BATCH,
    Batch,
    Hints,
    Sampler,
    build_transformer,
    weighted_mean,
)
from tests.support.draws import fresh_seed

GRID = (13, 19)
SIZE = (8 * GRID[0], 8 * GRID[1])


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    kernel = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8)
    states = torch.zeros(MAX_LENGTH, 192)
    statistics = SimpleNamespace(running_mean=torch.zeros(32), running_var=torch.ones(32))
    vae = SimpleNamespace(bn=statistics, config=SimpleNamespace(batch_norm_eps=1e-4))
    return Sampler(kernel, vae, lambda prompts: [states] * len(prompts))


def draw(sampler: Sampler, job: str) -> Batch:
    rng = np.random.default_rng(fresh_seed())
    return sampler.pictures(rng, SIZE) if job == "pictures" else sampler.edits(rng, SIZE, 4)


@pytest.mark.parametrize("job", ["edits", "pictures"])
def test_a_batch_has_a_grid_of_tokens_for_each_sample(sampler: Sampler, job: str) -> None:
    batch = draw(sampler, job)
    count, tokens, _ = batch.clean.shape
    assert tokens == GRID[0] * GRID[1]
    images = 1 if job == "pictures" else 2
    assert count == TOKENS_PER_BATCH // (images * tokens + MAX_LENGTH)
    assert (batch.reference is None) == (job == "pictures")
    assert len(torch.unique(batch.ids, dim=0)) == tokens
    # Labels of a new object lie only on the tokens that count most.
    assert bool((batch.edited_tokens[batch.new_objects[..., 0] >= 0] == 1).all())
    nearest = batch.offsets[..., :2].norm(dim=2)
    assert bool((nearest[batch.edited_tokens > 0] <= 4).all()), "tokens of 8 pixels, radius 19"


def test_a_picture_begins_at_the_first_position_and_names_its_objects(sampler: Sampler) -> None:
    batch = draw(sampler, "pictures")
    assert batch.ids.min(dim=0).values.tolist() == [0, 0, 0, 0]
    assert batch.ids.max(dim=0).values.tolist() == [0, GRID[0] - 1, GRID[1] - 1, 0]
    assert bool(((batch.new_objects[..., 0] >= 0) == (batch.edited_tokens > 0)).all())


@pytest.mark.parametrize("job", ["edits", "pictures"])
def test_hints_read_the_answer_of_both_jobs(sampler: Sampler, job: str) -> None:
    batch = draw(sampler, job)
    model = build_transformer()
    hints = Hints(model)
    hidden, ids = [batch.clean], [batch.ids]
    if batch.reference is not None:
        hidden, ids = [*hidden, batch.reference], [*ids, batch.ids]
    model(
        hidden_states=torch.cat(hidden, dim=1),
        timestep=torch.rand(len(batch.clean)),
        encoder_hidden_states=batch.prompt,
        txt_ids=torch.zeros(MAX_LENGTH, 4),
        img_ids=torch.cat(ids),
    )
    hints.loss(batch).backward()
    learnt = {name for name, part in hints.named_parameters() if part.grad is not None}
    assert any("new_object_heads" in name for name in learnt)
    assert any("token_heads" in name for name in learnt) == (job == "edits")


def test_the_background_of_a_picture_counts_more_than_what_an_edit_leaves(sampler: Sampler) -> None:
    for job, outside in (("edits", OUTSIDE_WEIGHT), ("pictures", BEHIND_WEIGHT)):
        batch = draw(sampler, job)
        error = 1 - batch.edited_tokens
        inside = batch.edited_tokens.sum()
        expected = outside * error.sum() / (outside * error.sum() + inside)
        torch.testing.assert_close(weighted_mean(error, batch), expected)
