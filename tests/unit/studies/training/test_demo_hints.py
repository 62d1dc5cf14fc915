"""Hints teach the transformer from inside, and only about what is there."""

import pytest
import torch

from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.hints import Hints, _mean, front_of
from maskserve_studies.training.text import WIDTH
from maskserve_studies.training.transformer import HintedBatch, build_transformer, loss_of

CHANNELS, FACTOR, TOKENS, TEXT = 2, 4, 6, 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build_transformer(CHANNELS, FACTOR, heads=1, layers=1, single_layers=2)
    model.set_attn_processor(MatmulAttention())
    return model


def _batch(answer_object: int, token_object: int) -> HintedBatch:
    mask = torch.zeros(2, TOKENS, 4 * FACTOR**2)
    mask[:, :2] = 1
    ids = torch.zeros(TOKENS, 3)
    ids[:, 2] = torch.arange(TOKENS)
    numbers = torch.full((2, TOKENS, 2), -1)
    numbers[:, -1] = token_object
    return HintedBatch(
        clean=torch.randn(2, TOKENS, 4 * CHANNELS),
        condition=torch.cat([torch.randn(2, TOKENS, 4 * CHANNELS), mask], dim=2),
        prompt=torch.randn(2, TEXT, WIDTH),
        pooled=torch.randn(2, WIDTH),
        ids=ids,
        answer_object=torch.full((2, 2), answer_object),
        token_objects=numbers,
    )


def _hint(model, hints: Hints, batch: HintedBatch) -> torch.Tensor:
    active = batch.condition[..., -4 * FACTOR**2 :].amax(dim=2)
    loss_of(model, batch, active, torch.Generator().manual_seed(0))
    return hints.loss(batch, active)


def test_nothing_is_told_where_nothing_stands(model):
    assert _hint(model, Hints(model), _batch(answer_object=-1, token_object=-1)).item() == 0


@pytest.mark.parametrize(
    ("answer_object", "token_object", "heads"), [(-1, 3, 2), (3, -1, 4), (3, 3, 6)]
)
def test_each_head_begins_near_a_guess_and_reaches_the_blocks(
    model, answer_object, token_object, heads
):
    hint = _hint(model, Hints(model), _batch(answer_object, token_object))
    guess = torch.tensor([8.0, 6.0]).log().sum().item()
    assert hint.item() == pytest.approx(heads * guess, rel=0.5)
    hint.backward()
    assert model.transformer_blocks[0].attn.to_q.weight.grad.abs().sum() > 0


def test_what_is_told_is_learnt(model):
    hints, batch = Hints(model), _batch(answer_object=4, token_object=2)
    optimiser = torch.optim.Adam([*model.parameters(), *hints.parameters()], lr=1e-2)
    first = _hint(model, hints, batch).item()
    for _ in range(15):
        optimiser.zero_grad()
        last = _hint(model, hints, batch)
        last.backward()
        optimiser.step()
    assert last.item() < first / 3


def test_an_object_is_told_by_the_mean_of_its_tokens():
    tokens, covered = torch.randn(2, TOKENS, 8), torch.zeros(2, TOKENS)
    covered[:, 1:3] = 1
    normed = torch.nn.functional.layer_norm(tokens, (8,))
    assert torch.allclose(_mean(tokens, covered), normed[:, 1:3].mean(1), atol=1e-6)
    assert not _mean(tokens, torch.zeros(2, TOKENS)).any()


def test_it_is_said_how_many_shapes_are_told_right(model):
    hints = Hints(model)
    _hint(model, hints, _batch(answer_object=-1, token_object=3))
    assert set(hints.shapes_right) == {"token last_double", "token first_single"}
    assert all(share in (0.0, 0.5, 1.0) for share in hints.shapes_right.values())


def test_the_front_alone_tells_only_what_is_seen(model):
    hints, batch = Hints(model), _batch(answer_object=3, token_object=3)
    _hint(front_of(model), hints, batch).backward()
    assert model.transformer_blocks[0].attn.to_q.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in hints.text.parameters())
    assert len(model.single_transformer_blocks) == 2
