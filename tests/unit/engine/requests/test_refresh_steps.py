"""Edits of templates that nobody has primed, run by an engine with refresh steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_config

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_common.config import CacheConfig
from maskserve_common.routing.view import Edit, WorkerView
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.cache import host_cache
from maskserve_engine.cache.host_cache import HostMemory
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.layers import keep_tokens
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.execution_plan import EditWork, ExecutionPlan
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.requests.state import RequestState
from tests.fakes.jobs import config_of
from tests.support.draws import fresh_seed
from tests.support.engines import accept, edit, job, make_engine, priced_by_flops
from tests.support.eventually import eventually
from tests.support.sink import Sink

pytestmark = pytest.mark.spread("folder")


@pytest.fixture(scope="module", params=["fill", "inpaint"])
def folder(request: pytest.FixtureRequest, tiny_fill: Path, tiny_inpaint: Path) -> Path:
    return tiny_fill if request.param == "fill" else tiny_inpaint


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_encoder(config_of(folder))


@pytest.fixture
def engine(folder: Path, encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(folder, encoder, own_anchors=0.35)
    yield engine
    engine.close(5.0)


def idle(engine: Engine) -> None:
    """Nothing is held for anybody."""
    eventually("the edit has left", lambda: not engine.manager.edits)
    engine.cache.check_integrity()


def computed_at(engine: Engine, edit_job: EditJob) -> list[int]:
    """The edit's refresh steps."""
    refresh_schedule = RefreshSchedules(engine.config, engine.adapter).of(edit_job)
    assert refresh_schedule is not None
    assert refresh_schedule.second_order == engine.adapter.spec.semantics.blends
    return sorted(refresh_schedule.computed_at)


def test_a_first_edit_computes_all_tokens_at_its_anchors_alone(
    engine: Engine, encoder: Encoder
) -> None:
    first = job(encoder, 1, "first", num_inference_steps=20)
    meta = edit(engine, first).meta
    assert meta["cache"] == "own"
    assert meta["anchors"] == computed_at(engine, first)
    assert (meta["dense_steps"], meta["text_steps"]) == (3, 3)
    active, total = meta["active_tokens"], meta["total_tokens"]
    assert meta["computed_tokens"] == 3 * total + 19 * active
    assert meta["own_bytes"] > 0
    idle(engine)


@pytest.mark.parametrize("cache", ["own", "require"])
def test_meta_and_metrics_say_how_far_lookaheads_were_off(
    engine: Engine, encoder: Encoder, cache: str
) -> None:
    edit_job = job(encoder, 3, "edit", num_inference_steps=20, cache=cache)
    meta = edit(engine, edit_job).meta
    errors = meta["refresh_errors"]
    assert len(errors) == meta["text_steps"] - 1
    if cache == "own":
        schedule = RefreshSchedules(engine.config, engine.adapter).of(edit_job)
        assert schedule is not None
        assert set(errors) == {str(step) for step in schedule.refresh_steps - schedule.dense}
    assert all(0 < error < 1 for error in errors.values())
    assert meta["refresh_error"] == pytest.approx(np.mean(list(errors.values())), abs=1e-5)
    [observed] = [v for name, v, _ in engine.observations.take() if name == "refresh_error"]
    assert observed == pytest.approx(meta["refresh_error"], abs=1e-5)
    dense = edit(engine, job(encoder, 3, "dense", num_inference_steps=20, cache="off")).meta
    assert not {"refresh_error", "refresh_errors"} & set(dense)


def test_an_edit_with_a_control_net_has_the_same_anchors(engine: Engine, encoder: Encoder) -> None:
    plain = job(encoder, 1, "first", num_inference_steps=20)
    controlled = replace(plain, controls=(ControlInput("net", plain.edit_mask),))
    assert computed_at(engine, controlled) == computed_at(engine, plain)


def test_edits_of_base_models_read_no_template_that_do_not_insist(
    engine: Engine, encoder: Encoder
) -> None:
    edit(engine, job(encoder, 12, "primes", num_inference_steps=12, cache="require"))
    meta = edit(engine, job(encoder, 12, "next", num_inference_steps=12)).meta
    assert meta["cache"] == ("own" if engine.adapter.spec.semantics.blends else "hit")
    idle(engine)


def test_off_is_dense_and_own_asks_for_it(engine: Engine, encoder: Encoder) -> None:
    first = job(encoder, 2, "a", num_inference_steps=10, cache="off")
    dense = edit(engine, first)
    assert (dense.meta["cache"], dense.meta.get("anchors")) == ("off", None)
    for number in range(3):  # its template would be primed by now
        final = edit(engine, job(encoder, 2, f"own-{number}", num_inference_steps=10, cache="own"))
        assert final.meta["cache"] == "own"
    assert np.abs(final.latents - dense.latents).max() > 0


def test_without_room_it_runs_dense_and_says_so(engine: Engine, encoder: Encoder) -> None:
    engine.cache.store.memory.budget_bytes = 1
    meta = edit(engine, job(encoder, 3, "dense", num_inference_steps=10)).meta
    assert (meta["cache"], meta["dense_for"]) == ("miss", "memory")
    idle(engine)


def test_without_memory_in_mid_edit_it_goes_on_dense_until_there_is_some(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = engine.executor
    encode, short = keep_tokens.encode, job(encoder, 11, "scarce", num_inference_steps=20)
    *begin, last = computed_at(engine, short)

    def scarce(x: Any, format: str) -> Any:
        [record] = executor.rows.values()
        if record.row.step in (last, last + 1):
            raise torch.OutOfMemoryError("no memory for anchors")
        return encode(x, format)

    monkeypatch.setattr(keep_tokens, "encode", scarce)
    meta = edit(engine, short).meta
    # A refresh step with lookahead, two that are retried, and the next one with lookahead.
    assert (meta["cache"], meta["anchors"]) == ("own", [*begin, *range(last, last + 4)])
    assert (meta["dense_for"], meta["cache_bytes"]) == ("memory", {})
    idle(engine)


def host_rows(engine: Engine) -> HostMemory:
    """Give rows host memory, as on a GPU."""
    rows = engine.cache.store.rows
    rows.budget_bytes = 2**30
    return rows


def own_job(encoder: Encoder, number: int, name: str, steps: int, **settings: Any) -> EditJob:
    """An edit that primes no template."""
    return job(encoder, number, name, cache="own", num_inference_steps=steps, **settings)


def leave_room_on_host(engine: Engine, own_bytes: int, patch: pytest.MonkeyPatch) -> None:
    """Leave too little room for a step cache on the device, but enough for the blocks in use. The
    models here have few blocks, so no further ones are loaded ahead.
    """
    patch.setattr(host_cache, "BLOCKS_AHEAD", 0)
    memory = engine.cache.store.memory
    memory.budget_bytes = memory.nbytes + own_bytes - 1


@pytest.mark.parametrize("negative_prompt", [None, "a dog"])
def test_a_cache_in_host_memory_gives_the_same_picture(
    engine: Engine,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    negative_prompt: str | None,
) -> None:
    settings: dict[str, Any] = {}
    if negative_prompt is not None and engine.adapter.spec.semantics.blends:
        settings.update(negative_prompt=negative_prompt, true_cfg_scale=2.0)
    expected = edit(engine, own_job(encoder, 12, "device", 20, **settings))
    assert expected.meta["cache_bytes"] == {}
    host_rows(engine)
    leave_room_on_host(engine, expected.meta["own_bytes"], monkeypatch)
    moved = edit(engine, own_job(encoder, 12, "host", 20, **settings))
    np.testing.assert_array_equal(moved.latents, expected.latents)
    assert moved.meta["cache_bytes"]["host"] > moved.meta["own_bytes"]
    same = ("cache", "anchors", "own_bytes", "computed_tokens", "dense_steps")
    assert [moved.meta[key] for key in same] == [expected.meta[key] for key in same]
    assert "dense_for" not in moved.meta
    idle(engine)


@pytest.mark.parametrize("at_step", [0, 1, 3, 5])
def test_without_memory_in_mid_edit_its_cache_moves_to_host_memory(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, at_step: int
) -> None:
    """Also in the middle of a refresh step, some of whose blocks have their tensors already."""
    expected = edit(engine, own_job(encoder, 13, "device", 20))
    rows, executor, encode = host_rows(engine), cast(Any, engine.executor), keep_tokens.encode
    at = expected.meta["anchors"][min(at_step, len(expected.meta["anchors"]) - 1)]
    calls = 0

    def scarce(x: Any, format: str) -> Any:
        nonlocal calls
        [record] = executor.rows.values()
        calls += record.row.step == at
        if record.row.step == at and calls == 3:
            raise torch.OutOfMemoryError("no memory for anchors")
        return encode(x, format)

    monkeypatch.setattr(keep_tokens, "encode", scarce)
    moved = edit(engine, own_job(encoder, 13, "moved", 20))
    assert calls >= 3
    np.testing.assert_array_equal(moved.latents, expected.latents)
    assert moved.meta["cache_bytes"]["host"] > 0
    assert "dense_for" not in moved.meta
    idle(engine)
    assert rows.booked == 0


def test_without_host_memory_either_it_goes_on_dense_and_says_so(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = host_rows(engine)
    book = rows.book
    own_bytes = edit(engine, own_job(encoder, 14, "a", 10)).meta["own_bytes"]
    leave_room_on_host(engine, own_bytes, monkeypatch)
    rows.book = lambda nbytes: rows.booked + nbytes <= own_bytes // 4 and book(nbytes)  # type: ignore[method-assign]
    meta = edit(engine, own_job(encoder, 14, "b", 10)).meta
    assert (meta["cache"], meta["dense_for"]) == ("own", "memory")
    idle(engine)
    rows.budget_bytes = own_bytes - 1
    meta = edit(engine, own_job(encoder, 14, "c", 10)).meta
    assert (meta["cache"], meta["dense_for"]) == ("miss", "memory")
    idle(engine)


def test_an_edit_whose_cache_does_not_come_back_goes_on_dense(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_rows(engine)
    loader = engine.cache.store.loader
    own_bytes = edit(engine, own_job(encoder, 15, "a", 10)).meta["own_bytes"]
    leave_room_on_host(engine, own_bytes, monkeypatch)

    def broken(*of: Any) -> Any:
        raise RuntimeError("the link is broken")

    monkeypatch.setattr(loader.mover, "move", broken)
    meta = edit(engine, own_job(encoder, 15, "b", 10)).meta
    assert len(meta["anchors"]) > 5
    idle(engine)


def hit_job(engine: Engine, encoder: Encoder, name: str, seed: int) -> EditJob:
    """A drawn edit of a template, the same for each seed: of the model that takes them with a
    negative prompt, of the other with dense first steps, whose residuals correct the entries.
    """
    rng = np.random.default_rng(seed)
    settings: dict[str, Any] = {"num_inference_steps": int(rng.integers(12, 24))}
    if engine.adapter.spec.semantics.blends and rng.random() < 0.5:
        settings.update(negative_prompt="a dog", true_cfg_scale=2.0)
    return job(encoder, int(rng.integers(100)), name, cache="require", **settings)


def refuse_room(engine: Engine, own_bytes: int, patch: pytest.MonkeyPatch) -> None:
    """Let the device have no room for a step cache of so many bytes; loads have theirs."""
    patch.setattr(host_cache, "BLOCKS_AHEAD", 0)  # models here have few blocks
    memory = engine.cache.store.memory
    book = memory.book
    patch.setattr(memory, "book", lambda n, **options: n != own_bytes and book(n, **options))


def test_a_cache_beside_a_template_gives_the_same_picture_in_host_memory(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh_seed()
    expected = edit(engine, hit_job(engine, encoder, "device", seed))
    assert (expected.meta["cache"], expected.meta["own_bytes"] > 0) == ("hit", True)
    rows = host_rows(engine)
    refuse_room(engine, expected.meta["own_bytes"], monkeypatch)
    moved = edit(engine, hit_job(engine, encoder, "host", seed))
    np.testing.assert_array_equal(moved.latents, expected.latents)
    same = ("cache", "own_bytes", "text_steps", "computed_tokens", "kinds")
    assert [moved.meta[key] for key in same] == [expected.meta[key] for key in same]
    assert moved.meta["cache_bytes"]["host"] > expected.meta["cache_bytes"].get("host", 0)
    assert "dense_for" not in moved.meta
    idle(engine)
    assert rows.booked == 0


def scarce(engine: Engine, patch: pytest.MonkeyPatch, fails: Callable[[list[int]], bool]) -> None:
    """Let the step cache of the row under way find no memory where `fails` says so, of the steps
    at which it has asked for some.
    """
    executor, encode = cast(Any, engine.executor), keep_tokens.encode
    steps: list[int] = []

    def scarce_encode(x: Any, format: str) -> Any:
        [record] = executor.rows.values()
        steps.append(record.row.step)
        if fails(steps):
            raise torch.OutOfMemoryError("no memory for a step cache")
        return encode(x, format)

    patch.setattr(keep_tokens, "encode", scarce_encode)


@pytest.mark.parametrize("call", [0, 3])
def test_without_memory_in_mid_edit_a_cache_beside_a_template_moves_to_host_memory(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    seed = fresh_seed()
    expected = edit(engine, hit_job(engine, encoder, "device", seed))
    rows, failed = host_rows(engine), list[int]()
    at = int(np.random.default_rng(seed).integers(3))

    def fails_once(steps: list[int]) -> bool:
        if failed or sum(step >= at for step in steps) <= call:
            return False
        failed.append(steps[-1])
        return True

    scarce(engine, monkeypatch, fails_once)
    moved = edit(engine, hit_job(engine, encoder, "moved", seed))
    assert failed
    np.testing.assert_array_equal(moved.latents, expected.latents)
    assert moved.meta["text_steps"] == expected.meta["text_steps"]
    assert moved.meta["cache_bytes"]["host"] > expected.meta["cache_bytes"].get("host", 0)
    assert "dense_for" not in moved.meta
    idle(engine)
    assert rows.booked == 0


def test_without_memory_anywhere_an_edit_of_a_template_computes_its_text_and_says_so(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = fresh_seed()
    expected = edit(engine, hit_job(engine, encoder, "device", seed)).meta
    scarce(engine, monkeypatch, lambda steps: True)
    meta = edit(engine, hit_job(engine, encoder, "scarce", seed)).meta
    assert (meta["cache"], meta["dense_for"]) == ("hit", "memory")
    assert meta["text_steps"] == meta["steps"] > expected["text_steps"]
    idle(engine)


def test_an_edit_of_a_template_whose_step_cache_does_not_come_back_computes_its_text(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template's entries still come."""
    seed = fresh_seed()
    expected = edit(engine, hit_job(engine, encoder, "device", seed)).meta
    host_rows(engine)
    refuse_room(engine, expected["own_bytes"], monkeypatch)
    mover = engine.cache.store.loader.mover
    move = mover.move

    def broken(parts: Any, ids: Any, *room: Any) -> Any:
        if ids is None:  # a step cache's, of which all tokens are read
            raise RuntimeError("the link is broken")
        return move(parts, ids, *room)

    monkeypatch.setattr(mover, "move", broken)
    meta = edit(engine, hit_job(engine, encoder, "lost", seed)).meta
    assert meta["cache"] == "hit"
    assert meta["kinds"]["kv"] == expected["kinds"]["kv"]
    assert meta["text_steps"] > expected["text_steps"]
    idle(engine)


def test_few_steps_and_what_insists_have_none(engine: Engine, encoder: Encoder) -> None:
    assert edit(engine, job(encoder, 4, "few", num_inference_steps=1)).meta["cache"] == "miss"
    same = job(encoder, 4, "same", num_inference_steps=10, reproducible=True)
    assert edit(engine, same).meta["cache"] == "hit"


def test_what_is_booked_is_enough(engine: Engine, encoder: Encoder) -> None:
    counts: list[int] = []
    executor: Any = engine.executor
    release = executor.release

    def watched(row: str) -> Any:
        record = executor.rows.get(row)
        if record is not None:
            passes = [record.row.step_cache, getattr(record.row.negative, "cache", None)]
            counts.append(sum(entry.nbytes for entry in passes if entry is not None))
        return release(row)

    executor.release = watched
    for seed in range(4):
        meta = edit(engine, job(encoder, seed, f"row-{seed}", num_inference_steps=10)).meta
        assert 0 < counts[-1] <= meta["own_bytes"]


def test_a_cancelled_one_leaves_nothing(engine: Engine, encoder: Encoder) -> None:
    sink = Sink()
    engine.submit(job(encoder, 6, "gone", num_inference_steps=900, progress=True), sink)
    eventually("it runs", lambda: len(sink.events) > 2)
    engine.cancel("gone")
    assert "cancelled" in str(sink.error())
    idle(engine)


def test_beside_edits_that_hit_and_dense_ones_each_is_as_alone(
    engine: Engine, encoder: Encoder
) -> None:
    """They come at once; where two anchors meet one of the rows waits."""
    jobs = [
        job(encoder, 7, "own", num_inference_steps=12, cache="own"),
        job(encoder, 8, "hit", num_inference_steps=11, cache="require"),
        job(encoder, 9, "dense", num_inference_steps=13, cache="off"),
        job(encoder, 10, "own-too", num_inference_steps=20, cache="own"),
    ]
    edits = [
        edit(
            engine,
            replace(
                edit_job,
                request=replace(
                    edit_job.request, request_id=f"{edit_job.request.request_id}-alone"
                ),
            ),
        )
        for edit_job in jobs
    ]
    sinks = [Sink() for _ in jobs]
    ask = engine.ask(lambda: [accept(engine, e, s) for e, s in zip(jobs, sinks, strict=True)])
    ask.result(30)
    for expected, sink in zip(edits, sinks, strict=True):
        final, latents = sink.final(), expected.latents
        assert final.meta.get("anchors") == expected.meta.get("anchors")
        assert np.abs(final.latents - latents).max() <= 1e-4 * max(1.0, np.abs(latents).max())
    idle(engine)


def test_rows_of_one_step_do_not_all_compute_their_anchors_in_it(
    engine: Engine, encoder: Encoder
) -> None:
    """Eight that come at once would all compute all tokens at the same three steps. Some wait; the
    pictures are as if they had not.
    """
    latents = [edit(engine, job(encoder, 20 + n, f"alone-{n}", num_inference_steps=20)).latents
             for n in range(8)]  # fmt: skip
    jobs = [job(encoder, 20 + n, f"row-{n}", num_inference_steps=20, cache="own") for n in range(8)]
    steps: list[list[Any]] = []
    executor: Any = engine.executor
    run = executor.run

    def watched(step: Any, *rest: Any) -> Any:
        result = run(step, *rest)
        steps.append(list(result.rows))
        return result

    executor.run = watched
    sinks = [Sink() for _ in jobs]
    ask = engine.ask(lambda: [accept(engine, e, s) for e, s in zip(jobs, sinks, strict=True)])
    ask.result(30)
    finals = [sink.final() for sink in sinks]
    anchors = [sum(row.looked_ahead or not row.read for row in step) for step in steps]
    assert (max(anchors), sum(anchors)) == (1, 8 * 3)
    for final, expected in zip(finals, latents, strict=True):
        assert final.meta["dense_steps"] == 3
        assert np.abs(final.latents - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


def test_edits_of_a_template_leave_their_text_out_between_anchors(
    engine: Engine, encoder: Encoder
) -> None:
    edit_job = job(encoder, 40, "hit", num_inference_steps=20, cache="require")
    meta, tokens = edit(engine, edit_job).meta, engine.adapter.tokens(edit_job)
    assert (meta["cache"], meta["text_steps"]) == ("hit", 3)
    assert meta["own_bytes"] > 0
    # So do they the ring of their mask, where models have pictures round it that hold still.
    leaves_ring = engine.adapter.spec.refresh.ring is not None
    # With lookahead, at all refresh steps but the first, so are the mask's once more.
    count = 22 * tokens.inner + 3 * tokens.ring
    assert meta["computed_tokens"] == (count if leaves_ring else 22 * tokens.active)
    idle(engine)
    engine.cache.store.memory.budget_bytes = engine.cache.store.memory.nbytes
    meta = edit(engine, job(encoder, 40, "full", num_inference_steps=20, cache="require")).meta
    assert (meta["cache"], meta.get("text_steps")) == ("hit", None)  # there is no room for any
    assert meta["computed_tokens"] == 20 * tokens.active
    idle(engine)


@pytest.mark.parametrize("policy", ["deadline", "rounds", "cfg"])
def test_where_devices_share_steps_an_edit_keeps_nothing_beside_a_template(
    engine: Engine, encoder: Encoder, policy: str
) -> None:
    """They would have to agree on who has what."""
    edit_job, config = job(encoder, 40, "hit", num_inference_steps=20), engine.config
    alone = RefreshSchedules(config, engine.adapter).beside_template(edit_job, 1)
    assert alone[0] is not None
    shared = replace_config(config, engine=replace_config(config.engine, devices=2, policy=policy))
    assert RefreshSchedules(shared, engine.adapter).beside_template(edit_job, 1) == (None,)


def test_a_router_prices_what_a_hit_leaves_out_as_its_worker_counts_it(
    engine: Engine, encoder: Encoder
) -> None:
    edit_job = job(encoder, 40, "priced", num_inference_steps=20)
    adapter = engine.adapter
    schedule = RefreshSchedules(engine.config, adapter).beside_template(edit_job, 0)[0]
    assert schedule is not None
    tokens = adapter.tokens(edit_job)
    between, at_anchors = (
        adapter.totals(edit_job, schedule, refresh=flag) for flag in (False, True)
    )
    counted = EditWork.of(edit_job, adapter).with_schedule(schedule, between, at_anchors)
    pricing = priced_by_flops(engine, edit_job, 20)
    router_edit = Edit(
        20, tokens.active, tokens.total, inner_tokens=tokens.inner, ring_tokens=tokens.ring
    )
    active = router_edit.active(pricing.rings.template, pricing.rings.lookahead)
    priced, _ = pricing.row(active, tokens.total, cached=True)
    assert active == pytest.approx(counted.cached_tokens)
    # All but what a pass takes by itself, whatever its tokens.
    assert priced == pytest.approx(1e-9 * counted.cached_flops, rel=0.02)
    once, _ = pricing.row(router_edit.active(pricing.rings.template), tokens.total, cached=True)
    assert once < 0.98 * priced


def test_a_router_prices_an_edit_with_refresh_steps_as_its_worker_counts_it(
    engine: Engine, encoder: Encoder
) -> None:
    """All anchors but the first are computed beside steps that read."""
    edit_job = job(encoder, 40, "priced", num_inference_steps=20)
    state = RequestState.of(engine.prepared(edit_job), Sink(), engine.adapter)
    refresh_schedule = RefreshSchedules(engine.config, engine.adapter).of(edit_job)
    assert refresh_schedule is not None
    state.set_plan(
        ExecutionPlan(
            "cached",
            "own",
            schedule=refresh_schedule,
            dense_steps=len(refresh_schedule.refresh_steps),
        ),
        engine.adapter,
    )
    tokens = engine.adapter.tokens(edit_job)
    pricing = priced_by_flops(engine, edit_job, 20)
    view = WorkerView("w", pricing, 1, 1, templates={})
    router_edit = Edit(
        20,
        tokens.active,
        tokens.total,
        refresh_steps=len(refresh_schedule.refresh_steps),
        inner_tokens=tokens.inner,
        ring_tokens=tokens.ring,
    )
    priced, _, _ = view.price(router_edit)
    assert priced == pytest.approx(1e-9 * state.work.cached_flops, rel=0.02)
    meta = edit(engine, job(encoder, 40, "runs", num_inference_steps=20)).meta
    assert state.step_tokens == pytest.approx(meta["computed_tokens"] / 20, abs=0.5)


def test_which_steps_leave_the_text_out_does_not_follow_from_the_batch(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that would have blocks compute, which needs the text, is asked where the row's own
    step is to compute it, alone: by itself and beside others the edit is the same.
    """
    options: dict[str, Any] = {"num_inference_steps": 20, "cache": "require"}
    planner = engine.runner.planner
    plan, blocks = planner.plan, engine.adapter.blocks
    counts: list[int] = []

    def computing(work: Any, rows: Any, dense: Any, *, fixed: bool, ranks: int) -> Any:
        counts.append(len(rows))
        result = plan(work, rows, dense, fixed=fixed, ranks=ranks)
        return result if fixed else replace(result, plan=plan_of_kinds(("dense",) * blocks))

    jobs = [job(encoder, 42 + n, f"text-{n}", **options) for n in range(3)]
    for edit_job in jobs:
        edit(engine, replace(edit_job, request=replace(edit_job.request, request_id="primes")))
    monkeypatch.setattr(planner, "plan", computing)
    monkeypatch.setattr(engine.runner, "_fixed", False)  # `[cache] plan` is `auto`
    alone = edit(engine, replace(jobs[0], request=replace(jobs[0].request, request_id="alone")))
    sinks = [Sink() for _ in jobs]
    accepted = engine.ask(lambda: [accept(engine, e, s) for e, s in zip(jobs, sinks, strict=True)])
    accepted.result(30)
    together, *_ = [sink.final() for sink in sinks]
    assert max(counts) == 6, "three rows and their lookaheads"
    for final in (alone, together):
        assert final.meta["text_steps"] == 3
        assert final.meta["kinds"]["kv"] == 19 * blocks
    assert np.abs(together.latents - alone.latents).max() <= 1e-4 * max(
        1.0, np.abs(alone.latents).max()
    )
    idle(engine)


def test_a_reproducible_edit_of_a_template_computes_its_text_at_every_step(
    engine: Engine, encoder: Encoder
) -> None:
    """Whether there is room for the text depends on what else is held."""
    for options in ({"reproducible": True}, {"cache": "require"}):
        edit_of_it = job(encoder, 41, str(options), num_inference_steps=20, **options)
        meta = edit(engine, edit_of_it).meta
        assert meta["cache"] == "hit"
        # META tells of it where steps leave the text out.
        assert ("text_steps" in meta) is ("cache" in options)
    idle(engine)


@pytest.mark.parametrize(("device", "format_name"), [("cpu", "model"), ("cuda", "int8")])
def test_what_anchors_leave_is_kept_as_the_device_decodes_it(device: str, format_name: str) -> None:
    assert CacheConfig().refresh_format_on(device) == format_name
    assert CacheConfig(own_format="int4").refresh_format_on(device) == "int4"
