"""Which pictures share a call of the VAE."""

from __future__ import annotations

from itertools import pairwise

import pytest

from maskserve_common.config import StagesConfig
from maskserve_engine.stages.vae_batches import shares_calls, vae_batches
from tests.support.draws import fresh_rng

FULL = 1024 * 1024


def test_pictures_of_one_size_go_together_as_far_as_there_is_room() -> None:
    rng = fresh_rng()
    choices = [(256, 256), (512, 512), (512, 256), (256, 512), (1024, 1024), (2048, 1024)]
    for _ in range(200):
        sizes = {
            int(name): choices[rng.integers(len(choices))]
            for name in rng.permutation(100)[: rng.integers(1, 30)]
        }
        batch_of = vae_batches(sizes)
        assert list(batch_of) == list(sizes)
        for name, batch in batch_of.items():
            assert name in batch
            assert {sizes[member] for member in batch} == {sizes[name]}
            assert all(batch_of[member] == batch for member in batch)
            assert len(batch) == 1 or len(batch) * sizes[name][0] * sizes[name][1] <= FULL
        for size in set(sizes.values()):
            batches = list(dict.fromkeys(b for name, b in batch_of.items() if sizes[name] == size))
            most = max(1, FULL // (size[0] * size[1]))
            assert all(len(batch) == most for batch, _ in pairwise(batches)), "all but the last"


@pytest.mark.parametrize(
    ("configured", "device", "expected"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("on", "cpu", True),
        ("off", "cuda", False),
    ],
)
def test_where_they_do(configured: str, device: str, expected: bool) -> None:
    assert shares_calls(StagesConfig(vae_batches=configured), device) == expected
