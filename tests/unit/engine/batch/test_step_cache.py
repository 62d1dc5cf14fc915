"""The step cache of a pass: after steps that are tried again, without memory, and with a template;
and the path of the tokens that it leaves out.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maskserve_engine.batch.step_cache import RefreshSchedule, StepCache, StepCacheReader
from maskserve_engine.cache.entries import encode
from maskserve_engine.cache.host_cache import HostMemory
from maskserve_engine.families.mmdit.spans import ExtrapolatedLatents
from maskserve_engine.layers import keep_tokens
from maskserve_engine.layers.scatter_kv import KvSource

TOKENS, ACTIVE, HEADS, WIDTH = 5, 2, 2, 4


def keys(seed: int) -> Any:
    """[tokens, heads, width]"""
    return torch.randn(TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


def anchors(**options: Any) -> StepCache:
    return StepCache(RefreshSchedule(frozenset({0, 2}), "model", text=False, **options))


def take(step_cache: StepCache, step: int, sigma: float, seed: int) -> None:
    step_cache.begin_refresh(step, sigma, ACTIVE, TOKENS).keys_values(0, keys(seed), keys(seed + 1))


def read(step_cache: StepCache, sigma: float) -> Any:
    """The block's keys of the inactive tokens at a sigma."""
    source = step_cache.source(0, sigma)
    (first, *_), out = source.parts, torch.empty(TOKENS - ACTIVE, HEADS * WIDTH)
    first.into(out)
    for change in source.changes:
        along = torch.empty_like(out)
        change.parts[0].into(along)
        out = out + change.weight * along
    return out


def test_which_steps_of_a_schedule_compute_all_tokens() -> None:
    """Lookaheads one step after the first refresh step, and at the later ones but the last."""
    plan = anchors().schedule
    plan = replace(plan, refresh_steps=frozenset({0, 3, 6}))
    assert (plan.computed_at, plan.dense) == ({0, 1, 3}, {0})
    assert [plan.lookahead_at(step) for step in range(7)] == [None, 3, None, 6, None, None, None]
    assert (plan.shares(8), plan.shares(8, 3)) == ((3 / 8, 1 / 8), (1 / 5, 0.0))


def test_a_schedule_that_begins_later_ends_with_dense_steps() -> None:
    plan = replace(anchors().schedule, refresh_steps=frozenset({0, 3, 6})).begun_at(4, 8, 2)
    assert plan.refresh_steps == {4, 7, 10, 11}
    assert (plan.dense, plan.lookahead_steps) == ({4, 10, 11}, {5})
    assert [plan.next_refresh(step) for step in (4, 7)] == [7, None]
    assert plan.shares(12, 8) == (2 / 4, 2 / 4)


def test_a_step_that_is_tried_again_leaves_what_it_left_first() -> None:
    step_cache = anchors()
    take(step_cache, 0, 1.0, 1)
    step_cache.complete_refresh(1.0)
    step_cache.complete_refresh(1.0)
    assert step_cache.weight(0.25) == 0.0  # one anchor makes no line
    take(step_cache, 2, 0.5, 3)
    take(step_cache, 2, 0.5, 7)  # a batch that failed is tried row by row
    step_cache.complete_refresh(0.5)
    step_cache.complete_refresh(0.5)
    assert step_cache.weight(0.25) == pytest.approx(0.5)
    first, second = (keys(seed)[ACTIVE:].flatten(1) for seed in (1, 3))
    assert torch.allclose(read(step_cache, 0.25), second + 0.5 * (second - first))


def test_an_anchor_without_memory_is_none_and_a_later_one_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    step_cache = anchors()
    take(step_cache, 0, 1.0, 1)
    step_cache.complete_refresh(1.0)
    assert step_cache.whole()
    with monkeypatch.context() as patched:
        patched.setattr(keep_tokens, "encode", full)
        take(step_cache, 2, 0.5, 3)
    step_cache.complete_refresh(0.5)
    assert not step_cache.whole()
    assert step_cache.nbytes == 0
    take(step_cache, 3, 0.25, 5)
    step_cache.complete_refresh(0.25)
    assert step_cache.whole()
    assert step_cache.weight(0.1) == 0.0


def test_residual_corrections_are_counted_among_its_bytes() -> None:
    step_cache, tokens = anchors(corrects_residuals=True), TOKENS - ACTIVE
    step_cache.begin_with_template(0, 0, slice(0), tokens, 1.0).keys_values(0, keys(1), keys(2))
    of_both = 2 * tokens * HEADS * WIDTH * 4
    text = step_cache.nbytes - of_both
    assert text >= 0
    entry = KvSource(tuple(encode(keys(s)[ACTIVE:].flatten(1), "model") for s in (3, 4)), None, ())
    lifted = step_cache.correction.added_to(0, entry, 0.5)
    assert step_cache.nbytes == of_both + text  # what was lacked takes the place of what was found
    assert [change.weight for change in lifted.changes] == [0.5]


def test_tokens_left_out_go_on_by_the_velocity_that_anchors_foretell() -> None:
    """Beside the sum of what each step moves them by, through three anchors ahead."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(9, TOKENS, WIDTH, generator=draws)
    shares = torch.rand(9, 2, generator=draws).tolist()
    outside = ExtrapolatedLatents(x[0] - 0.2 * x[1], None, None, x[0])
    outside.record_refresh(-0.2 * x[1], -0.2)  # the first step, dense
    expected, velocities = x[0] - 0.2 * x[1], [x[1]]
    for step in range(2, 9):
        if step in (2, 4, 7):
            outside.record_lookahead(x[step])
            velocities.append(x[step])
        change, weight = -0.1 * shares[step][0], shares[step][1] - 1.0
        outside.move(change, weight)
        before, last = velocities[-2:]
        expected = expected + change * (last + weight * (last - before))
        assert torch.allclose(outside.latents_now, expected, atol=1e-6), step


def test_lookaheads_of_a_cache_that_is_begun_anew_are_forgotten_and_errors_are_kept() -> None:
    answer, ahead = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])
    before, anew = (anchors() for _ in range(2))
    before.errors.expect(3, ahead)
    before.errors.expect(6, ahead)
    before.errors.arrive(2, answer)
    for _ in range(2):  # a step that is tried again
        before.errors.arrive(3, answer)
    anew.take_place_of(before)
    anew.errors.arrive(6, answer)
    assert anew.errors.by_step() == pytest.approx({3: 0.2})
    anew.errors.expect(8, answer)
    anew.errors.arrive(8, torch.zeros(2))
    assert anew.errors.by_step() == pytest.approx({3: 0.2, 8: 0.0})


def test_a_cache_that_is_begun_anew_lies_in_host_memory_as_the_one_before() -> None:
    """A row begins its caches anew where a LoRA comes late; host memory stays one account."""
    store: Any = SimpleNamespace(rows=HostMemory(2**20), loader=None)
    row = SimpleNamespace(step_caches=(anchors(),))
    [before] = row.step_caches
    reader = StepCacheReader(row, 1, store, on_host=True)
    take(before, 0, 1.0, 3)
    before.complete_refresh(1.0)
    assert store.rows.booked == before.nbytes > 0
    row.step_caches = (anchors(),)
    assert reader.entry_at(1) is None  # it has refreshed nothing
    [anew] = row.step_caches
    assert store.rows.booked == 0
    take(anew, 1, 0.8, 5)
    assert store.rows.booked == anew.nbytes > 0
    reader.release()
    assert store.rows.booked == 0
