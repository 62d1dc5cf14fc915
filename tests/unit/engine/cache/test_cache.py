"""Templates: keys, priming, waiting, eviction; through the engine thread with a tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskserve_common.config import ConfigError
from maskserve_common.contracts.keys import Anchor, TemplateKey, anchor_steps, cover, nearest_anchor
from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_engine.base.job import EditJob, FinalEvent
from maskserve_engine.cache.entries import AnchorEntry, Coded
from maskserve_engine.cache.loader import Arrival, HostMover
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.templates import CacheLookup
from tests.fakes.jobs import config_of, tolerance
from tests.support.engines import accept, edit, job, make_engine
from tests.support.eventually import eventually
from tests.support.sink import Sink

pytestmark = pytest.mark.spread("seed")

KEY = TemplateKey(
    model_revision="m",
    pixels_id="p",
    noise_seed=1,
    priming_prompt="",
    guidance=3.0,
    text_tokens=16,
    dtype="float32",
    entry_kind="kv",
    entry_format="int8",
)
OTHER: dict[str, Any] = {
    "model_revision": "n",
    "pixels_id": "q",
    "noise_seed": 2,
    "priming_prompt": "x",
    "guidance": 3.5,
    "text_tokens": 17,
    "dtype": "bfloat16",
    "entry_kind": "h",
    "entry_format": "int4",
    "entry_halves": 2,
    "layout_version": 99,
    "adapters": "d",
}


def test_every_field_of_the_key_changes_the_name() -> None:
    assert set(OTHER) == {f.name for f in fields(TemplateKey)}
    names = {KEY.digest()} | {replace(KEY, **{k: v}).digest() for k, v in OTHER.items()}
    assert len(names) == 1 + len(OTHER)
    assert replace(KEY).digest() == KEY.digest()
    # As it was before a key knew of adapters: what was primed then is found.
    assert KEY.digest() == "7b156923acdae673453fec4183ab0240"


def test_the_nearest_anchor_within_tolerance() -> None:
    anchors = tuple(Anchor(s, 1000 * s) for s in (1.0, 0.8, 0.5))
    assert nearest_anchor(anchors, 0.78, 780.0, 0.15) == anchors[1]
    assert nearest_anchor(anchors, 0.3, 300.0, 0.15) is None
    assert nearest_anchor(anchors, 0.9, 900.0, 0.15) == anchors[0]  # a tie: the larger sigma
    assert nearest_anchor((Anchor(0.5, 500.0, 2.0),), 0.5, 500.0, 0.15) is None
    assert nearest_anchor(anchors, 0.8, 500.0, 0.15) is None  # the model would be told otherwise


@pytest.mark.parametrize("stride", [1, 2, 3, 7, 20, 1000])
@pytest.mark.parametrize("steps", [1, 4, 20, 28])
def test_of_every_so_many_steps_the_middle_one_is_an_anchor(steps: int, stride: int) -> None:
    sigmas = sorted(np.random.default_rng(steps).uniform(0, 1, steps).tolist(), reverse=True)
    chosen = anchor_steps(sigmas, stride)
    assert len(chosen) == -(-steps // stride)
    for number, anchor in enumerate(chosen):
        served = sigmas[number * stride : (number + 1) * stride]
        farthest = [max(abs(served[0] - s), abs(served[-1] - s)) for s in served]
        reach = max(abs(served[0] - sigmas[anchor]), abs(served[-1] - sigmas[anchor]))
        assert reach <= min(farthest) + 1e-12  # of two steps either will do


@pytest.mark.parametrize("tolerance", [0.05, 0.15, 0.25, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_covering_anchors_leave_no_sigma_out_of_reach(tolerance: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors = tuple(Anchor(float(s), 1000 * float(s)) for s in rng.uniform(0, 1, seed))
    covered = cover(anchors, tolerance)
    assert set(anchors) <= set(covered)
    assert all(0.0 <= anchor.sigma <= 1.0 for anchor in covered)
    for sigma in np.linspace(0, 1, 501):
        assert nearest_anchor(covered, float(sigma), 1000 * float(sigma), tolerance + 1e-9)
    assert cover(covered, tolerance) == covered  # nothing is added twice


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


def assert_tables_agree(engine: Engine) -> None:
    """A stopped engine publishes exactly the templates that its store holds."""
    engine.cache.check_integrity()
    template_ids = {str(t["template_id"]) for t in engine.cache.templates() if not t["priming"]}
    assert set(engine.cache.template_ids()["device"]) == template_ids


@pytest.fixture
def engine(tiny_fill: Path, encoder: Encoder) -> Any:
    engine = make_engine(tiny_fill, encoder)
    yield engine
    engine.close(5.0)
    assert_tables_agree(engine)
    engine.manager.scheduler.check_integrity()
    assert not engine.cache.priming
    assert not engine.cache.store.memory.pinned


def settle(engine: Engine) -> None:
    def idle() -> bool:
        return engine.ask(lambda: len(engine.manager.scheduler)).result(30) == 0

    eventually("the engine is idle", idle, 30.0)


def test_a_template_is_primed_on_its_second_lookup_and_hit_on_the_third(
    engine: Engine, encoder: Encoder
) -> None:
    outcomes = []
    for number in range(4):
        outcomes.append(edit(engine, job(encoder, 1, f"e{number}")).meta["cache"])
        settle(engine)
    assert outcomes == ["miss", "miss", "hit", "hit"]
    (template,) = engine.templates().result(30)
    assert template["anchors"] >= 4  # stride 1 of the model's four default steps
    assert template["bytes"] == engine.cache.store.memory.nbytes > 0


def window_of(encoder: Encoder, picture: str, number: int, steps: int, **settings: Any) -> EditJob:
    """An edit in a window of a picture."""
    drawn = job(encoder, number, f"{picture}-{number}", num_inference_steps=steps, **settings)
    window = (8 * number, 0, *drawn.request.model_size)
    return replace(drawn, request=replace(drawn.request, template_id=picture, window=window))


def test_a_window_of_a_known_picture_is_primed_before_its_first_edit(
    tiny_fill: Path, encoder: Encoder
) -> None:
    engine = make_engine(tiny_fill, encoder, stride=0)  # one anchor

    def outcomes(picture: str, steps: int, windows: Iterable[int]) -> list[str]:
        edits = (window_of(encoder, picture, number, steps) for number in windows)
        return [edit(engine, window).meta["cache"] for window in edits]

    try:
        assert outcomes("a" * 32, 12, range(4)) == ["miss", "hit", "hit", "hit"]
        assert outcomes("b" * 32, 12, [8]) == ["miss"], "that is another picture"
        due = [window_of(encoder, "c" * 32, n, 12, deadline_ms=60_000) for n in range(16, 19)]
        assert [edit(engine, window).meta["cache"] for window in due] == ["miss"] * 3
        registered = window_of(encoder, "d" * 32, 32, 12, template_id="d" * 32)
        assert edit(engine, registered).meta["cache"] == "hit"
    finally:
        engine.close(5.0)


def test_a_window_is_not_primed_for_edits_that_save_less_work_than_that(
    tiny_fill: Path, encoder: Encoder
) -> None:
    """Anchors of four steps are as much work as four dense steps, of which a mask leaves little."""
    engine = make_engine(tiny_fill, encoder, stride=1)
    try:
        for number in range(3):
            window = window_of(encoder, "a" * 32, number, 4)
            masked = np.full_like(window.edit_mask, 255)
            masked[-8:] = 0
            assert edit(engine, replace(window, edit_mask=masked)).meta["cache"] == "miss"
    finally:
        engine.close(5.0)


def test_a_hit_computes_the_active_tokens_only_and_says_so(
    engine: Engine, encoder: Encoder
) -> None:
    final = edit(engine, job(encoder, 2, "e", cache="require", num_inference_steps=4))
    meta = final.meta
    assert meta["cache"] == "hit"
    assert meta["kinds"] == {"kv": 4 * engine.adapter.blocks}
    assert meta["cache_bytes"]["device"] > 0
    assert meta["active_tokens"] < meta["total_tokens"]
    assert meta["computed_tokens"] == 4 * meta["active_tokens"]
    row = engine.counters
    assert row["cached_rows_total"] == 4


def test_first_steps_run_dense_where_the_configuration_says_so(
    tiny_fill: Path, encoder: Encoder
) -> None:
    edit_job = job(encoder, 2, "e", cache="require", num_inference_steps=4)
    differ = []
    for steps in range(5):
        engine = make_engine(tiny_fill, encoder, dense_steps=steps)
        blocks = engine.adapter.blocks
        dense = edit(engine, job(encoder, 2, "d", cache="off", num_inference_steps=4)).latents
        final = edit(engine, edit_job)
        kinds = {"dense": steps * blocks, "kv": (4 - steps) * blocks}
        assert final.meta["kinds"] == {kind: ran for kind, ran in kinds.items() if ran}
        active, total = final.meta["active_tokens"], final.meta["total_tokens"]
        assert final.meta["computed_tokens"] == steps * total + (4 - steps) * active
        assert engine.counters["cached_rows_total"] == 4 - steps
        differ.append(np.abs(final.latents - dense).max())
        engine.close(5.0)
        assert_tables_agree(engine)
    assert [difference > 0.0 for difference in differ] == [True] * 4 + [False]


def test_off_never_uses_or_makes_entries(engine: Engine, encoder: Encoder) -> None:
    for number in range(3):
        assert edit(engine, job(encoder, 3, f"e{number}", cache="off")).meta["cache"] == "off"
    settle(engine)
    assert engine.templates().result(30) == []


@pytest.mark.parametrize("settings", [{}, {"cache": "off"}], ids=["cached", "dense"])
def test_reproducible_edits_are_bit_equal_at_any_load(
    engine: Engine, encoder: Encoder, settings: dict[str, Any]
) -> None:
    """Beside other edits, reproducible or not, and templates that are primed, of which one is its
    own: each round primes it anew. It takes more steps than vectors are computed for at a time.
    """
    options = {"reproducible": True, "num_inference_steps": 13, **settings}
    alone = edit(engine, job(encoder, 4, "alone", **options))
    for number in range(4):
        engine.evict(alone.meta["template_id"]).result(30)
        other_jobs = [
            job(encoder, 40 + 7 * number + i, f"o{number}.{i}", reproducible=i % 3 == 0)
            for i in range(6)
        ]
        same = job(encoder, 4, f"same{number}", **options)
        jobs = [*other_jobs[:number], same, *other_jobs[number:]]
        sinks = [Sink() for _ in jobs]
        for edit_job, sink in zip(jobs, sinks, strict=True):
            engine.submit(edit_job, sink)
        finals = [sink.final() for sink in sinks]
        assert finals[number].meta["cache"] == alone.meta["cache"]
        assert np.array_equal(finals[number].latents, alone.latents)


def test_two_templates_two_prompts_two_guidances_never_meet(
    engine: Engine, encoder: Encoder
) -> None:
    """Each cached result equals that of a fresh engine that has seen nothing else."""
    other_prompt = encoder.encode_prompt("another prompt altogether")
    jobs = [
        job(encoder, 5, "a", cache="require"),
        job(encoder, 6, "b", cache="require"),
        replace(job(encoder, 5, "c", cache="require"), conditioning=other_prompt),
        job(encoder, 5, "d", cache="require", guidance_scale=7.0),
    ]
    together = [edit(engine, edit_job).latents for edit_job in jobs]
    keys = [engine.cache.key_of(edit_job) for edit_job in jobs]
    assert keys[0] == keys[2]  # a prompt is no part of the template
    assert len(set(keys)) == 3
    for edit_job, latents in zip(jobs, together, strict=True):
        engine.evict(edit_job.request.template_id).result(30)
        again = edit(
            engine, replace(edit_job, request=replace(edit_job.request, request_id="again"))
        )
        assert np.abs(again.latents - latents).max() <= tolerance(latents)


def test_equal_pixels_at_two_resolutions_are_two_templates(
    engine: Engine, encoder: Encoder
) -> None:
    small = job(encoder, 7, "s")
    request = replace(small.request, pixels_id="f" * 32)
    assert engine.cache.key_of(small) != engine.cache.key_of(replace(small, request=request))


def test_eviction_while_a_row_runs_changes_nothing(engine: Engine, encoder: Encoder) -> None:
    expected = edit(engine, job(encoder, 8, "first", cache="require", num_inference_steps=30))
    sink = Sink()
    engine.submit(
        job(encoder, 8, "x", cache="require", num_inference_steps=30, progress=True), sink
    )
    eventually("the row runs", lambda: sink.events)
    template_id = job(encoder, 8, "y").request.template_id
    assert engine.ask(engine.cache.template_ids).result(30)["device"] == (template_id,)
    assert engine.evict(template_id).result(30) > 0
    assert engine.ask(engine.cache.template_ids).result(30)["device"] == ()
    assert np.abs(sink.final().latents - expected.latents).max() <= tolerance(expected.latents)


@pytest.mark.parametrize("settings", [{"cache": "require"}, {"reproducible": True}])
def test_who_insists_has_its_template_primed_again_when_it_goes_before_the_edit_gets_a_row(
    engine: Engine, encoder: Encoder, settings: dict[str, Any]
) -> None:
    expected = edit(engine, job(encoder, 16, "first", **settings))
    sink, again = Sink(), job(encoder, 16, "again", **settings)

    def evict_while_it_queues() -> None:
        accept(engine, again, sink)
        assert engine.cache.evict(expected.meta["template_id"]) > 0

    engine.ask(evict_while_it_queues).result(30)
    final = sink.final()
    assert final.meta["kinds"] == expected.meta["kinds"]
    assert "dense" not in final.meta["kinds"]
    assert np.array_equal(final.latents, expected.latents)
    assert engine.cache.counters()["cache_hits_total"] == 2


def test_a_fetch_that_ends_while_it_is_decided_how_an_edit_runs_is_waited_for(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = edit(engine, job(encoder, 16, "first", cache="require"))
    sink, store, event = Sink(), engine.cache.store, threading.Event()
    again, sight = job(encoder, 16, "again", cache="require"), engine.cache.look_up

    def sight_just_before_it_ends(*args: Any, **named: Any) -> CacheLookup:
        lookup = sight(*args, **named)
        if engine.cache.is_loading(lookup.key):
            event.set()
            assert store.settle(30.0)
        return lookup

    def evict_while_it_queues() -> None:
        accept(engine, again, sink)
        monkeypatch.setattr(engine.cache, "look_up", sight_just_before_it_ends)
        store.lower._files.submit(event.wait)
        assert engine.cache.evict(expected.meta["template_id"]) > 0

    engine.ask(evict_while_it_queues).result(30)
    assert np.array_equal(sink.final().latents, expected.latents)
    assert event.is_set()


def test_an_edit_whose_template_goes_again_and_again_is_told(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(engine, job(encoder, 17, "first", cache="require"))
    monkeypatch.setattr(engine.cache.store, "hold", lambda key, anchor: None)
    sink = Sink()
    engine.submit(job(encoder, 17, "again", cache="require"), sink)
    assert isinstance(sink.error(), Overloaded)
    timeline = sink.events[-1].timeline
    assert (timeline.waited, timeline.queued, timeline.admitted) == (False, 0.0, 0.0)
    settle(engine)


def test_out_of_memory_while_priming_costs_no_edit(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.adapter.step

    def scarce(rows: Any, plan: Any, reads: Any) -> None:
        if any(hasattr(row, "recorder") for row in rows):
            raise torch.OutOfMemoryError("no memory for priming")
        real(rows, plan, reads)

    monkeypatch.setattr(engine.adapter, "step", scarce)
    outcomes = [edit(engine, job(encoder, 9, f"e{i}")).meta["cache"] for i in range(3)]
    assert outcomes == ["miss"] * 3
    for name, settings in (("r", {"reproducible": True}), ("q", {"cache": "require"})):
        sink = Sink()  # neither may be answered with other pixels than the cache gives
        engine.submit(job(encoder, 9, name, **settings), sink)
        error = sink.error()
        assert isinstance(error, EngineFailed)
        assert f"SETTINGS.{next(iter(settings))} " in str(error)
    settle(engine)


def test_a_priming_whose_end_fails_ends_once_and_no_edit_waits_for_it(
    engine: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(key: str) -> int:
        raise RuntimeError("the store cannot evict")

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache.store, "put", lambda key, entry, note: False)
        patch.setattr(engine.cache.store, "evict", broken)
        sink = Sink()
        engine.submit(job(encoder, 26, "waits", cache="require"), sink)
        assert isinstance(sink.error(), EngineFailed)
        settle(engine)
    assert engine.state == "ready"
    assert edit(engine, job(encoder, 27, "next", cache="require")).meta["cache"] == "hit"


def test_a_budget_that_cannot_hold_one_template_is_refused_with_its_size(
    tiny_fill: Path, encoder: Encoder
) -> None:
    with pytest.raises(
        ConfigError, match=r"\[cache\] budget_bytes: 1000 bytes cannot .* (\d+) bytes"
    ):
        make_engine(tiny_fill, encoder, budget_bytes=1000)


def test_a_start_says_what_a_template_takes_and_how_many_fit(
    tiny_fill: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        make_engine(tiny_fill, encoder).close(5.0)
    (line,) = [r.getMessage() for r in caplog.records if "a template of" in r.getMessage()]
    assert "device 0.25 GiB" in line


def test_an_edit_that_waits_counts_once(engine: Engine, encoder: Encoder) -> None:
    edit(engine, job(encoder, 41, "w", cache="require"))
    counters = engine.cache.counters()
    assert (counters["cache_hits_total"], counters["cache_misses_total"]) == (1, 0)
    assert counters["cache_hits_total.device"] == 1


def test_the_least_recently_used_template_makes_room(tiny_fill: Path, encoder: Encoder) -> None:
    probe = make_engine(tiny_fill, encoder)
    sizes = []
    for seed in (11, 12, 13):
        edit(probe, job(encoder, seed, f"p{seed}", cache="require"))
        sizes.append(probe.cache.store.memory.nbytes - sum(sizes))
    probe.close(5.0)
    engine = make_engine(tiny_fill, encoder, budget_bytes=sum(sizes) - 1)
    for seed in (11, 12, 11, 13):
        edit(engine, job(encoder, seed, f"{seed}-{time.monotonic_ns()}", cache="require"))
    template_ids = {t["template_id"] for t in engine.templates().result(30)}
    assert job(encoder, 12, "x").request.template_id not in template_ids
    assert engine.cache.store.memory.nbytes <= engine.cache.store.memory.budget_bytes
    assert engine.cache.store.memory.evictions >= 1
    engine.close(5.0)
    assert_tables_agree(engine)


def test_a_cancelled_edit_that_waits_for_priming_is_answered(
    engine: Engine, encoder: Encoder
) -> None:
    sinks = [Sink() for _ in range(3)]
    jobs = [job(encoder, 14, f"w{number}", cache="require") for number in range(3)]

    def cancel_one_of_three() -> None:  # in one turn of the engine: no step comes between
        for edit_job, sink in zip(jobs, sinks, strict=True):
            accept(engine, edit_job, sink)
        engine.manager.cancel("w1")

    engine.ask(cancel_one_of_three).result(30)
    assert sinks[1].error().code == "CANCELLED"
    assert [sinks[number].final().meta["cache"] for number in (0, 2)] == ["hit", "hit"]


def test_an_edit_is_not_taken_for_one_of_its_name_that_waited(
    engine: Engine, encoder: Encoder
) -> None:
    waited, sink = Sink(), Sink()

    def reuse_the_name() -> None:
        accept(engine, job(encoder, 14, "same", cache="require"), waited)
        engine.manager.cancel("same")
        accept(engine, job(encoder, 15, "same", cache="off", num_inference_steps=40), sink)

    engine.ask(reuse_the_name).result(30)
    assert waited.error().code == "CANCELLED"
    assert sink.final().meta["cache"] == "off"
    settle(engine)
    assert len(engine.manager.scheduler) == 0
    assert [type(event) for event in sink.events] == [FinalEvent]


def test_the_tables_do_not_grow_with_templates_that_are_gone(
    tiny_fill: Path, encoder: Encoder
) -> None:
    engine = make_engine(tiny_fill, encoder, budget_bytes=5 * 10**5)
    edits = [job(encoder, seed, f"b{seed}", cache="require") for seed in range(20, 30)]
    for edit_job in edits:
        edit(engine, edit_job)
    assert engine.cache.store.memory.evictions >= 5
    assert len(engine.cache.store.memory.entries()) <= 5
    engine.close(5.0)


def test_entries_know_their_size(engine: Engine, encoder: Encoder) -> None:
    edit(engine, job(encoder, 15, "e", cache="require"))
    (template,) = engine.templates().result(30)
    tokens = 0
    memory = engine.cache.store.memory
    for anchor in memory.anchors(str(template["key"])):
        entry = memory.get(str(template["key"]), anchor)
        assert isinstance(entry, AnchorEntry)
        for block in entry.blocks:
            assert block.keys is not None
            tokens += block.keys.data.numel() + block.values.data.numel()  # type: ignore[union-attr]
    assert template["bytes"] == 4 * tokens  # float32, model format: nothing else is kept


def test_a_template_can_be_primed_ahead_of_its_first_edit(engine: Engine, encoder: Encoder) -> None:
    first = job(encoder, 16, "ahead", num_inference_steps=4)
    assert engine.prime(first).result(30) == "priming"
    settle(engine)
    assert engine.prime(first).result(30) == "primed"
    assert edit(engine, job(encoder, 16, "e")).meta["cache"] == "hit"


def test_a_pinned_template_stays_when_others_need_room(tiny_fill: Path, encoder: Encoder) -> None:
    probe = make_engine(tiny_fill, encoder)
    edit(probe, job(encoder, 17, "p", cache="require"))
    size = probe.cache.store.memory.nbytes
    probe.close(5.0)
    engine = make_engine(tiny_fill, encoder, budget_bytes=max(size, 250_000))
    pinned = job(encoder, 17, "a", cache="require")
    engine.pin(pinned.request.template_id).result(30)
    edit(engine, pinned)
    assert edit(engine, job(encoder, 18, "b")).meta["cache"] == "miss"
    refused = Sink()
    engine.submit(job(encoder, 18, "c", reproducible=True), refused)
    assert isinstance(refused.error(), EngineFailed)
    assert edit(engine, job(encoder, 17, "c")).meta["cache"] == "hit"
    assert engine.unpin(pinned.request.template_id).result(30)
    engine.cache.store.check_integrity()
    assert not engine.cache.templates()[0]["pinned"]
    engine.close(5.0)


def test_templates_of_equal_pixels_share_entries_for_as_long_as_one_is_pinned(
    engine: Engine, encoder: Encoder
) -> None:
    plain = job(encoder, 17, "a", cache="require")
    names = [plain.request.template_id + "1" * 32, plain.request.template_id + "2" * 32]
    edits = [replace(plain, request=replace(plain.request, template_id=name)) for name in names]
    outcomes = [edit(engine, edit_job).meta["cache"] for edit_job in edits]
    assert outcomes == ["hit", "hit"]
    (template,) = engine.templates().result(30)
    assert template["template_id"] == names[0]
    assert engine.cache.template_ids()["device"] == (plain.request.template_id,)

    def pinned() -> bool:
        return bool(engine.templates().result(30)[0]["pinned"])

    assert engine.pin(names[1], "one").result(30)
    assert engine.pin(names[0], "another").result(30)
    assert engine.unpin(names[0]).result(30)
    assert pinned()
    assert engine.unpin(names[1]).result(30)
    assert not pinned()
    engine.cache.pins.check_integrity()
    assert engine.evict(names[1]).result(30) > 0
    assert engine.templates().result(30) == []


def test_of_what_may_be_pinned_each_key_has_a_share(tiny_fill: Path, encoder: Encoder) -> None:
    """One key pinned all that fits: nothing of anybody else's was kept."""
    probe = make_engine(tiny_fill, encoder)
    edit(probe, job(encoder, 17, "p", cache="require"))
    size = probe.cache.store.memory.nbytes
    probe.close(5.0)
    engine = make_engine(tiny_fill, encoder, budget_bytes=int(4.5 * size))
    names = []
    for number in range(4):
        one = job(encoder, 17 + number, f"e{number}", cache="require")
        edit(engine, one)
        names.append(one.request.template_id)
    for name in names[:2]:
        assert engine.pin(name, "greedy").result(30)
    with pytest.raises(Overloaded, match="this key has its share of the cache pinned"):
        engine.pin(names[2], "greedy").result(30)
    assert engine.pin(names[2], "modest").result(30)
    assert engine.pin(names[3]).result(30), "an operator may have all"
    assert engine.unpin(names[0]).result(30)
    engine.cache.pins.check_integrity()
    engine.close(5.0)


class DyingMover(HostMover):
    """Takes the loader's thread with it when it moves its fifth part."""

    def __init__(self) -> None:
        self.moves = 0

    def move(self, parts: tuple[Coded, ...], ids: NDArray[np.int64] | None) -> Arrival:
        self.moves += 1
        if self.moves == 5:
            raise SystemExit
        return super().move(parts, ids)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_edit_whose_loader_dies_goes_on_and_the_next_finds_another(
    tiny_fill: Path, encoder: Encoder
) -> None:
    engine = make_engine(tiny_fill, encoder)
    loader = engine.cache.store.loader
    edit(engine, job(encoder, 19, "primes", cache="require"))
    loader.mover = DyingMover()
    hurt = edit(engine, job(encoder, 19, "hurt", cache="require", num_inference_steps=6))
    assert hurt.meta["kinds"].keys() == {"kv", "dense"}
    assert np.isfinite(hurt.latents).all()
    well = edit(engine, job(encoder, 19, "well", cache="require", num_inference_steps=6))
    assert well.meta["kinds"].keys() == {"kv"}
    loader.mover = DyingMover()
    sink = Sink()  # it may not be answered with other pixels
    engine.submit(job(encoder, 19, "same", reproducible=True, num_inference_steps=6), sink)
    assert "send it again" in str(sink.error())
    assert engine.state == "ready"
    engine.close(10.0)
    assert_tables_agree(engine)


def test_an_idle_engine_says_when_a_row_has_left_something_behind(
    tiny_fill: Path, encoder: Encoder
) -> None:
    engine = make_engine(tiny_fill, encoder)
    edit(engine, job(encoder, 20, "a", cache="require"))
    eventually("it has looked", lambda: engine.checked_steps > 0)
    assert engine.counters["cache_integrity_failures_total"] == 0
    engine.cache.store.memory.book(1)  # as a row that is gone would have
    edit(engine, job(encoder, 20, "b", cache="require"))
    eventually("it is told", lambda: engine.counters["cache_integrity_failures_total"] == 1)
    engine.cache.store.memory.unbook(1)
    engine.close(10.0)
    assert_tables_agree(engine)


def test_a_priming_that_begins_where_the_engine_was_idle_is_not_left_behind(
    tiny_fill: Path, encoder: Encoder
) -> None:
    engine = make_engine(tiny_fill, encoder)
    for seed in range(21, 25):  # each comes sooner than the engine looks
        edit(engine, job(encoder, seed, f"edit {seed}", cache="require"))
    eventually("it has looked", lambda: engine.checked_steps == engine.counters["steps_total"])
    assert engine.counters["cache_integrity_failures_total"] == 0
    engine.close(10.0)
    assert_tables_agree(engine)
