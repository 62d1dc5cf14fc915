"""Cached rows with ControlNets, whose nets compute active tokens between refreshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import (
    Replay,
    WithoutLookahead,
    plan_of_kinds,
    refreshed_every,
)
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.forward import State
from maskserve_engine.batch.step_cache import NetStepCaches, RefreshSchedule, StepCacheReader
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.control import (
    FluxControlNet,
    FluxNetInput,
    FluxNets,
    NetTokens,
    controlled,
)
from maskserve_engine.families.mmdit.rows import FlowRow, all_tokens
from maskserve_engine.layers import keep_tokens
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import encode_case, random_case, tolerance
from tests.support.cached_rows import KINDS, NOISE_SEED, Primed, assert_equal, cached, result, run
from tests.support.draws import fresh_rng
from tests.support.host_rows import check_lost_net_caches, check_net_caches

pytestmark = pytest.mark.spread("folder")


@pytest.fixture(scope="module")
def nets(adapter: FluxAdapter) -> dict[str, Any]:
    nets = {"plain": random_net(21, 1, 1), "union": random_net(22, 1, 2, num_mode=3)}
    return {name: adapter.control_net(net) for name, net in nets.items()}


def controlled_job(
    encoder: Encoder, name: str, *names: str, masked: bool = False, **settings: Any
) -> EditJob:
    """A random edit; `seen`: its mask is, by some latents."""
    rng = fresh_rng()
    case = random_case(rng, num_inference_steps=5, strength=1.0, **settings)
    if masked:
        mask = case.mask.copy()
        mask[8:24, 8:24] = 255
        case = replace(case, mask=mask)
    job = encode_case(encoder, case, name)
    controls = []
    for net in names:
        picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
        moments = encoder.encode(picture, case.mask, "").moments
        mode = 1 if net == "union" else None
        controls.append(ControlInput(net, picture, scale=0.8, moments=moments, mode=mode))
    return replace(job, controls=tuple(controls))


def with_nets(replay: Replay, row: Any, job: EditJob, nets: dict[str, Any], refresh: int) -> Any:
    replay.adapter.control(row, job, nets)
    assert isinstance(row.residuals, RowControl)
    row.residuals.schedule = refreshed_every(refresh, row.steps)
    return row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refresh", [1, 3])
def test_with_all_tokens_active_cached_equals_dense(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], kind: str, refresh: int
) -> None:
    job = controlled_job(encoder, "e", "plain", "union")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = with_nets(
        replay, cached(replay, job, Primed(replay.adapter, encoder, job)), job, nets, refresh
    )
    dense = with_nets(replay, replay.adapter.dense_row(job), job, nets, 1)
    assert_equal(result(replay, row, kind), result(replay, dense))


@pytest.mark.parametrize("net", ["plain", "union"])
def test_active_tokens_alone_are_told_what_all_of_them_are_at_the_same_step(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], net: str
) -> None:
    """The kept keys and values of a step serve that step exactly."""
    job = controlled_job(encoder, "e", net)
    row = cast(FlowRow, cached(replay, job, Primed(replay.adapter, encoder, job)))
    with_nets(replay, row, job, nets, 100)
    run_until(replay, row, 2)
    control = cast(RowControl[FluxNetInput], row.residuals)
    control.residuals.clear()
    replay.step([row], ("kv",) * replay.adapter.blocks)  # its entry is here, and it was refreshed
    times = [step.timestep for step in row.walk(0)]
    net_tokens = NetTokens(all_tokens(row), row.computed, row.active)
    now = controlled(control, net_tokens, times, row.step)
    assert now.sparse
    with torch.inference_mode():
        control.residuals.clear()
        FluxNets().run([now])
        whole = {place: added.clone() for place, added in control.passes[0].added.items()}
        FluxNets().run([now._replace(step=now.step + 1)])
    assert [residual.step for residual in control.residuals.values()] == [now.step]
    for place, added in control.passes[0].added.items():
        expected = whole[place][: len(added)].numpy()
        assert np.abs(added.numpy() - expected).max() <= tolerance(expected)


def run_until(replay: Replay, row: FlowRow, step: int) -> None:
    while row.step < step:
        replay.step([row], ("kv",) * replay.adapter.blocks)


def watched_net(net: FluxControlNet) -> tuple[FluxControlNet, list[list[int]]]:
    """Return the net, and a list to which each run of it adds its rows' numbers of tokens."""
    computed: list[list[int]] = []

    class Watched(FluxControlNet):
        def samples(self, packed: Any, at: Any, scales: Any) -> Any:
            computed.append([len(row.tokens) for row in packed.rows])
            return super().samples(packed, at, scales)

    return Watched(*(getattr(net, field.name) for field in fields(net))), computed


def test_nets_compute_all_tokens_at_one_step_in_so_many(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    plain = nets["plain"]
    watched, computed = watched_net(plain)
    job = controlled_job(encoder, "e", "plain")
    row = cached(replay, job, Primed(replay.adapter, encoder, job))
    row = with_nets(replay, row, job, {"plain": watched}, 3)
    tokens = replay.adapter.tokens(job)
    run(replay, [row], "kv")
    assert computed == [[tokens.total if step % 3 == 0 else tokens.active] for step in range(5)]


def look_ahead(*anchors: int) -> RefreshSchedule:
    return RefreshSchedule(frozenset(anchors), "model", text=False)


def test_a_refresh_step_is_computed_ahead_at_the_one_before(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    """Beside the computed tokens of the step; the base has no such pass. What is kept is what the
    net computes of all tokens as they are expected at that refresh step.
    """
    plain = nets["plain"]
    watched, computed = watched_net(plain)
    job = controlled_job(encoder, "e", "plain")
    row = cached(replay, job, Primed(replay.adapter, encoder, job))
    row = with_nets(replay, row, job, {"plain": watched}, 3)
    row.residuals.schedule = look_ahead(0, 3)
    tokens, times = replay.adapter.tokens(job), [step.timestep for step in row.walk(0)]
    run_until(replay, row, 1)
    foreseen = NetTokens(all_tokens(row, 3), tokens.total, row.active)
    oracle = replace(row.residuals, residuals={})
    with torch.inference_mode():
        FluxNets().run([controlled(oracle, foreseen, times, 3)])
    computed.pop()
    run_until(replay, row, 2)
    [step_cache], [expected] = (control.residuals[0].tokens for control in (row.residuals, oracle))
    for block in range(len(plain.outs)):
        sources = [cache.source(block, times[3]) for cache in (step_cache, expected)]
        for mine, other in zip(*[source.parts for source in sources], strict=True):
            assert_equal(mine.data.numpy(), other.data.numpy())
    run(replay, [row], "kv")
    active, total = tokens.active, tokens.total
    assert computed == [[total], [active, total], [active], [active], [active]]


def test_step_caches_of_nets_lie_in_either_memory(
    replay: Replay,
    encoder: Encoder,
    nets: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = controlled_job(encoder, "e", "plain", "union")
    primed = Primed(replay.adapter, encoder, job)

    def row_with(caches: NetStepCaches | None) -> Any:
        row: Any = cached(replay, job, primed)
        replay.adapter.control(row, job, nets, caches)
        row.residuals.schedule = look_ahead(0, 3)
        return row

    def run_steps(caches: NetStepCaches) -> Callable[[], bool]:
        row = row_with(caches)

        def step() -> bool:
            replay.step([row], ("kv",) * replay.adapter.blocks)
            return bool(row.step < row.steps)

        return step

    call = int(fresh_rng().integers(1, 12))
    check_net_caches(lambda caches: result(replay, row_with(caches), "kv"), monkeypatch, call)
    check_lost_net_caches(run_steps)


def test_a_net_that_has_not_begun_is_not_asked_ahead(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    """Its refresh steps are those of the steps in which it acts."""
    job = controlled_job(encoder, "e", "plain")
    job = replace(job, controls=(replace(job.controls[0], start=0.3),))
    row = cast(FlowRow, cached(replay, job, Primed(replay.adapter, encoder, job)))
    replay.adapter.control(row, job, nets)
    assert isinstance(row.residuals, RowControl)
    assert row.residuals.schedule.dense == {2}
    run_until(replay, row, 4)
    [step_cache] = row.residuals.residuals[0].tokens
    assert step_cache.last_sigma == row.walk(0)[max(row.residuals.schedule.refresh_steps)].timestep
    assert row.residuals.residuals[0].step == 2


def test_a_mixed_batch_is_as_each_row_alone(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    texts: tuple[tuple[str, ...], ...] = ((), ("plain",), ("union", "plain"), ("plain",), ())
    jobs = [controlled_job(encoder, str(i), *names) for i, names in enumerate(texts)]
    primed = [Primed(replay.adapter, encoder, job) for job in jobs]

    def rows() -> list[Any]:
        batch = []
        for number, (job, template) in enumerate(zip(jobs, primed, strict=True)):
            row = replay.adapter.dense_row(job) if number == 3 else cached(replay, job, template)
            batch.append(with_nets(replay, row, job, nets, 2) if job.controls else row)
        return batch

    results = [result(replay, row, "kv") for row in rows()]
    together = rows()
    run(replay, together[:2], "kv")  # the others join when these have left
    replay.step(together[2:4], ("kv",) * replay.adapter.blocks)
    run(replay, together[2:], "kv")
    for row, expected in zip(together, results, strict=True):
        assert_equal(row.result().array(), expected)


def test_entries_and_rows_without_control_are_as_ever(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    """A template that is primed by an edit with control has the entries of one without."""
    job = controlled_job(encoder, "e", "plain")
    entries = Primed(replay.adapter, encoder, job).entries
    plain = Primed(replay.adapter, encoder, replace(job, controls=())).entries
    for entry, other in zip(entries, plain, strict=True):
        for a, b in zip(entry.blocks, other.blocks, strict=True):
            for x, y in zip(a.part("kv"), b.part("kv"), strict=True):
                assert torch.equal(x.data, y.data)


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_step_that_failed_and_is_tried_again_does_the_same(
    replay: Replay,
    encoder: Encoder,
    nets: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    refreshed: bool,
) -> None:
    """A batch whose step fails is tried again row by row; what its nets kept half is not read."""
    job = controlled_job(encoder, "e", "plain", "union")
    primed = Primed(replay.adapter, encoder, job)
    row, other = (with_nets(replay, cached(replay, job, primed), job, nets, 2) for _ in range(2))
    step = 2 if refreshed else 1
    run_until(replay, row, step)
    plain, calls = State.run, 0

    def failing(self: State, begin: int, end: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # behind the net's first block
            raise MemoryError
        plain(self, begin, end)

    with monkeypatch.context() as patch:
        patch.setattr(State, "run", failing)
        with pytest.raises(MemoryError):
            replay.step([row], ("kv",) * replay.adapter.blocks)
    assert row.step == step
    assert_equal(result(replay, row, "kv"), result(replay, other, "kv"))


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_control_that_never_acts_is_as_none_bit_for_bit(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], refresh: int
) -> None:
    job = controlled_job(encoder, "e", "plain", masked=True)
    primed = Primed(replay.adapter, encoder, job)
    plain = replace(job, controls=())
    expected = result(replay, cached(replay, plain, primed), "kv")
    for change in ({"scale": 0.0}, {"start": 0.9}, {"end": 0.1}):
        idle = replace(job, controls=(replace(job.controls[0], **change),))
        row = cached(replay, idle, primed)
        replay.adapter.control(row, idle, nets)
        assert np.array_equal(result(replay, row, "kv"), expected), change
    late = replace(job, controls=(replace(job.controls[0], start=0.5),))
    row = with_nets(replay, cached(replay, late, primed), late, nets, refresh)
    without = cast(FlowRow, cached(replay, late, primed))
    for step in range(4):
        assert torch.equal(row.latents, without.latents) == (step <= 3), step
        for one in (row, without):
            replay.step([one], ("kv",) * replay.adapter.blocks)
    assert not torch.equal(row.latents, without.latents)


def test_a_template_primed_beside_a_row_with_control_has_its_own_entries(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    job = controlled_job(encoder, "e", "plain")
    primed, adapter = Primed(replay.adapter, encoder, job), replay.adapter
    row = with_nets(replay, cached(replay, job, primed), job, nets, 2)
    priming: Any = adapter.priming_row(
        job, primed.row.anchors, encoder.encode_prompt(""), NOISE_SEED, primed.row.kinds, "model"
    )
    plan = plan_of_kinds(("kv",) * replay.adapter.blocks)
    for entry in primed.entries:
        adapter.step([row, priming], plan, [replay.next_read(row), None])
        for block, neighbour in zip(entry.blocks, priming.take_entry().blocks, strict=True):
            for coded, other in zip(block.part("kv"), neighbour.part("kv"), strict=True):
                assert (coded.data - other.data).abs().max() <= tolerance(coded.data.numpy())


def anchored(replay: Replay, job: EditJob, nets: dict[str, Any], plan: RefreshSchedule) -> FlowRow:
    row = replay.adapter.refreshing_row(job, plan)
    replay.adapter.control(row, job, nets)
    return cast(FlowRow, row)


def step_anchored(adapter: Any, rows: Sequence[FlowRow], anchors: frozenset[int]) -> None:
    readers = [StepCacheReader(row, adapter.blocks) for row in rows]
    reads = [
        None if row.step in anchors else reader.entry_at(row.step)
        for row, reader in zip(rows, readers, strict=True)
    ]
    adapter.step(rows, plan_of_kinds(("kv",) * adapter.blocks) if any(reads) else None, reads)


def run_refreshing(adapter: Any, rows: Sequence[FlowRow], anchors: frozenset[int]) -> None:
    while rows[0].step < rows[0].steps:
        step_anchored(adapter, rows, anchors)


@pytest.mark.parametrize("text", [True, False])
def test_with_own_anchors_at_each_step_it_is_dense(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], text: bool
) -> None:
    job = controlled_job(encoder, "e", "plain", "union")
    plan = WithoutLookahead(frozenset(range(5)), "model", text)
    row = anchored(replay, job, nets, plan)
    run_refreshing(replay.adapter, [row], plan.refresh_steps)
    dense = replay.adapter.dense_row(job)
    replay.adapter.control(dense, job, nets)
    expected = result(replay, dense)
    active = replay.adapter.prepare(job).prepared.tokens.active
    at = np.zeros(expected.shape[1] // 2 * (expected.shape[2] // 2), bool)
    at[active] = True
    computed = at.reshape(expected.shape[1] // 2, -1).repeat(2, 0).repeat(2, 1)
    assert_equal(row.result().array()[:, computed], expected[:, computed])


@pytest.mark.parametrize("text", [True, False])
def test_nets_are_refreshed_at_their_rows_anchors(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], text: bool
) -> None:
    """Whenever these come; between them nets leave out what the base leaves out."""
    computed = []

    class Watched(FluxControlNet):
        def samples(self, packed: Any, at: Any, scales: Any) -> Any:
            computed.append([(len(row.text) > 0, len(row.tokens)) for row in packed.rows])
            return super().samples(packed, at, scales)

    plain = nets["plain"]
    watched = Watched(*(getattr(plain, field.name) for field in fields(plain)))
    job = controlled_job(encoder, "e", "plain")
    row = anchored(
        replay, job, {"plain": watched}, WithoutLookahead(frozenset({0, 2}), "int8", text)
    )
    run_refreshing(replay.adapter, [row], frozenset({0, 3}))  # the second one has been put off
    tokens = replay.adapter.tokens(job)
    all_tokens, between = [(True, tokens.total)], [(not text, tokens.active)]
    assert computed == [all_tokens, between, between, all_tokens, between]


def test_a_net_without_memory_for_an_anchor_computes_all_tokens_until_there_is_some(
    replay: Replay, encoder: Encoder, nets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, encode = list[int](), keep_tokens.encode

    class Scarce(FluxControlNet):
        def samples(self, packed: Any, at: Any, scales: Any) -> Any:
            computed.append(len(packed.tokens))

            def without_room(x: Any, format: str) -> Any:
                if len(computed) in (1, 2):
                    raise torch.OutOfMemoryError("no memory for anchors")
                return encode(x, format)

            with monkeypatch.context() as patched:
                patched.setattr(keep_tokens, "encode", without_room)
                yield from super().samples(packed, at, scales)

    plain = nets["plain"]
    scarce = Scarce(*(getattr(plain, field.name) for field in fields(plain)))
    job, plan = controlled_job(encoder, "e", "plain"), RefreshSchedule(frozenset({0}), "int8", True)
    row = anchored(replay, job, {"plain": scarce}, plan)
    run_refreshing(replay.adapter, [row], plan.refresh_steps)
    tokens = replay.adapter.tokens(job)
    assert computed == [*[tokens.total] * 3, *[tokens.active] * 2]


def test_anchored_rows_with_nets_together_are_as_each_alone(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    plan = RefreshSchedule(frozenset({0, 2}), "model", True)
    texts: tuple[tuple[str, ...], ...] = ((), ("plain",), ("union", "plain"))
    jobs = [controlled_job(encoder, str(i), *names) for i, names in enumerate(texts)]
    alone, together = ([anchored(replay, job, nets, plan) for job in jobs] for _ in range(2))
    for row in alone:
        run_refreshing(replay.adapter, [row], plan.dense)
    run_refreshing(replay.adapter, together, plan.dense)
    for row, other in zip(together, alone, strict=True):
        assert_equal(row.result().array(), other.result().array())


def test_a_later_control_sees_all_tokens_at_its_first_step(
    replay: Replay, encoder: Encoder, nets: dict[str, Any]
) -> None:
    job = controlled_job(encoder, "e", "plain")
    job = replace(job, controls=(replace(job.controls[0], start=0.3),))
    row = anchored(replay, job, nets, WithoutLookahead(frozenset({0, 3}), "model", True))
    run_refreshing(replay.adapter, [row], frozenset({0, 3}))
    assert isinstance(row.residuals, RowControl)
    assert row.residuals.residuals[0].step == 3
    assert np.isfinite(row.result().array()).all()
