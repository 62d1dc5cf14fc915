"""A worker of two devices: edits equal those of one, and outlive the processes that step them."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import structs

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.status_record import State
from maskserve_common.errors import Cancelled
from maskserve_engine.base.job import ControlInput, EditJob, FinalEvent, PreviewEvent
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.gangs.checks import check_devices
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.gangs.living_ranks import meeting_place
from maskserve_engine.gangs.messages import pack
from maskserve_engine.gangs.processes import RankProcess
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.executor import PlainRowSpec, StepInput
from maskserve_engine.requests.state import RequestState
from maskserve_engine.scheduling.step_scheduler import MakePolicy
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.start.assembly import load_engine
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, tolerance, unet_case
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.fakes.tiny_unet import VARIANTS
from tests.support.any_degree import AnyDegreeScheduler
from tests.support.engines import job
from tests.support.eventually import eventually
from tests.support.sink import Sink


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two ControlNets, of which one does not fit."""
    folder = tmp_path_factory.mktemp("nets")
    random_net(1, 1, 1).save_pretrained(folder / "net")
    random_net(2, 1, 1).save_pretrained(folder / "unsaid")
    config = folder / "unsaid" / "config.json"  # diffusers' default is another model's
    values = json.loads(config.read_text("utf-8"))
    del values["axes_dims_rope"]
    config.write_text(json.dumps(values), "utf-8")
    return folder


def config_for(folder: Path, devices: int, nets: Path | None = None, **model: Any) -> Config:
    return config_of(
        folder,
        model={"torch_threads": 1, **model},
        engine={"devices": devices, "warm_up": False},
        cache={
            "entry_format": "model",
            "stride": 1,
            "dense_above_ratio": 1.0,
            "plan": "fixed",
            "budget_bytes": 2**28,
            "own_text": "computed",  # as where devices share steps
        },
        controls={"folder": str(nets or "")},
    )


def with_control(engine: Engine, encoder: Encoder, edit_job: EditJob, name: str = "net") -> EditJob:
    """The edit with a random control picture."""
    known = ControlNets(engine.config, engine.adapter.spec).find(name, "")
    size, rng = edit_job.edit_mask.shape, np.random.default_rng(edit_job.request.seed)
    picture = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    moments = encoder.encode(picture, edit_job.edit_mask, "").moments
    resolved_control = ResolvedControl(name=name, scale=0.8, version=known.version, image=0)
    return replace(
        edit_job,
        request=replace(edit_job.request, controls=(resolved_control,)),
        controls=(ControlInput(known.version, picture, scale=0.8, moments=moments),),
    )


def started(config: Config, encoder: Encoder, policy: MakePolicy | None = None) -> Engine:
    engine = load_engine(config, policy=policy)
    engine.cache.prompt = lambda: encoder.encode_prompt("")
    engine.start()
    return engine


def drawn(config: Config, encoder: Encoder) -> Engine:
    """An engine whose two devices take steps at any degree."""
    drawing = structs.replace(config, engine=structs.replace(config.engine, policy="deadline"))
    return started(
        drawing, encoder, lambda rows, waiting, share: AnyDegreeScheduler(2, rows, waiting)
    )


@pytest.fixture(
    scope="module", params=["any degree", pytest.param("spread", marks=pytest.mark.slow)]
)
def two(
    request: pytest.FixtureRequest, tiny_fill: Path, encoder: Encoder, nets: Path
) -> Iterator[Engine]:
    config = config_for(tiny_fill, 2, nets)
    start = started if request.param == "spread" else drawn
    engine = start(config, encoder)
    yield engine
    engine.close(5.0)
    engine.manager.scheduler.check_integrity()
    assert len(engine.manager.scheduler) == 0


@pytest.fixture(scope="module")
def one(tiny_fill: Path, encoder: Encoder, nets: Path) -> Iterator[Engine]:
    engine = started(config_for(tiny_fill, 1, nets), encoder)
    yield engine
    engine.close(5.0)


def ranks(engine: Engine) -> GangExecutor:
    assert isinstance(engine.executor, GangExecutor)
    return engine.executor


def both_back(engine: Engine) -> None:
    eventually("all ranks are back", lambda: not ranks(engine).devices.lost, 60.0)


def edited(engine: Engine, jobs: list[EditJob]) -> list[FinalEvent]:
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    return [sink.final() for sink in sinks]


def run(engine: Engine, jobs: list[EditJob]) -> list[np.ndarray]:
    return [final.latents for final in edited(engine, jobs)]


def assert_same(results: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert np.abs(result - reference).max() <= tolerance(reference)


def test_edits_equal_those_of_one_device(one: Engine, two: Engine, encoder: Encoder) -> None:
    jobs = [job(encoder, seed, f"edit-{seed}", cache="off") for seed in range(8)]
    assert_same(run(two, jobs), run(one, jobs))
    assert_both_alone_and_together(two)


@pytest.mark.parametrize("cache", ["off", "require"])
def test_edits_with_control_equal_those_of_one_device(
    one: Engine, two: Engine, encoder: Encoder, cache: str
) -> None:
    """A cached one keeps what its net found at some steps with the device that it is on: where it
    may be moved, it is reproducible.
    """
    more = {"cache": cache, "reproducible": cache == "require"}
    jobs = [job(encoder, 3, f"controlled-{n}-{cache}", num_inference_steps=6, **more)
            for n in range(4)]  # fmt: skip
    plain, controlled = jobs[:2], [with_control(one, encoder, edit_job) for edit_job in jobs[2:]]
    expected = run(one, [*plain, *controlled])
    assert np.abs(expected[0] - expected[2]).max() > 10 * tolerance(expected[0])
    assert_same(run(two, [*plain, *controlled]), expected)


def test_a_net_that_does_not_fit_is_refused_in_a_sentence(two: Engine, encoder: Encoder) -> None:
    sink = Sink()
    two.submit(with_control(two, encoder, job(encoder, 2, "unfit"), "unsaid"), sink)
    assert re.search(
        r"ControlNet unsaid: its axes_dims_rope is .16, 56, 56., that of the model .4, 6, 6.$",
        str(sink.error()),
    )
    assert len(run(two, [with_control(two, encoder, job(encoder, 2, "fit", cache="off"))])) == 1


def assert_both_alone_and_together(engine: Engine) -> None:
    policy = engine.manager.scheduler
    if isinstance(policy, AnyDegreeScheduler):
        assert policy.draws.drawn == {(0,), (1,), (0, 1)}
        assert 0.0 < ranks(engine).ranks.exchange.call_seconds < 1.0  # measured as they met


def test_cached_edits_read_on_both_devices_what_one_of_them_made(
    one: Engine, two: Engine, encoder: Encoder
) -> None:
    first = job(encoder, 3, "first", cache="require", num_inference_steps=4)
    assert_same(run(two, [first]), run(one, [first]))
    jobs = [job(encoder, 3, f"again-{n}", cache="require", num_inference_steps=4) for n in range(4)]
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        two.submit(edit_job, sink)
    finals = [sink.final() for sink in sinks]
    assert_same([final.latents for final in finals], run(one, jobs))
    assert {final.meta["cache"] for final in finals} == {"hit"}


def test_ranks_that_share_an_edit_load_the_entries_of_their_heads(
    one: Engine, two: Engine, encoder: Encoder
) -> None:
    """META counts the bytes that one rank loaded: one of two heads."""
    policy = two.manager.scheduler
    if not isinstance(policy, AnyDegreeScheduler):
        return
    options: dict[str, Any] = {"cache": "require", "num_inference_steps": 4}
    run(two, [job(encoder, 3, "primes", **options)])
    (whole,) = edited(one, [job(encoder, 3, "whole", **options)])
    for devices, share in (((0, 1), 0.5), ((1,), 1.0)):
        policy.draws.always = devices
        (final,) = edited(two, [job(encoder, 3, f"on {devices}", **options)])
        policy.draws.always = ()
        assert_same([final.latents], [whole.latents])
        assert sum(final.meta["cache_bytes"].values()) == share * sum(
            whole.meta["cache_bytes"].values()
        )


def test_a_step_that_ranks_share_teaches_what_a_step_costs(
    two: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has taken its share of the work; what they exchange is taken off."""
    policy = two.manager.scheduler
    if not isinstance(policy, AnyDegreeScheduler):
        return
    samples: list[tuple[float, float]] = []
    costs = two.runner.planner.costs
    monkeypatch.setattr(costs, "step", lambda flops, seconds, *_: samples.append((flops, seconds)))
    counted = []
    for devices in ((1,), (0, 1)):
        policy.draws.always = devices
        run(two, [job(encoder, 3, f"teaches {devices}", cache="off", num_inference_steps=4)])
        policy.draws.always = ()
        [flops] = {flops for flops, _ in samples}
        assert len(samples) == 4
        counted.append(flops)
        samples.clear()
    assert counted[0] == 2 * counted[1]
    edit = RequestState.of(job(encoder, 3, "asked"), Sink(), two.adapter)
    calls = 2 * two.adapter.blocks * ranks(two).ranks.exchange.call_seconds
    assert calls < two.runner._overhead_shares([edit], 2) < 1.0


def test_ranks_let_go_of_edits_that_went_on_elsewhere(two: Engine, encoder: Encoder) -> None:
    run(two, [job(encoder, seed, f"moved-{seed}", cache="off") for seed in range(6)])
    for process in ranks(two).ranks.processes:
        assert process.call("__getattribute__", "_specs").result(10.0) == {}


def test_previews_come_from_the_ranks(two: Engine, encoder: Encoder) -> None:
    sink = Sink()
    two.submit(job(encoder, 1, "shown", num_inference_steps=4, preview_every=2, cache="off"), sink)
    final = sink.final()
    events = [event for event in sink.events if isinstance(event, PreviewEvent)]
    assert all(event.latents.shape == final.latents.shape for event in events)


def test_a_cancelled_edit_is_answered_while_its_step_runs(two: Engine, encoder: Encoder) -> None:
    sink = Sink()
    two.submit(job(encoder, 5, "cancelled", num_inference_steps=200, cache="off"), sink)
    eventually("a step", lambda: two.counters["steps_total"] > 0)
    two.cancel("cancelled")
    assert isinstance(sink.error(), Cancelled)
    assert len(run(two, [job(encoder, 6, "cancelled", num_inference_steps=2, cache="off")])) == 1


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_edits_go_on_where_a_rank_is_lost(
    one: Engine, two: Engine, encoder: Encoder, number: signal.Signals
) -> None:
    jobs = [
        job(encoder, seed, f"lost-{seed}", num_inference_steps=60, strength=1.0, cache="off")
        for seed in range(4)
    ]
    jobs[2:] = [with_control(one, encoder, edit_job) for edit_job in jobs[2:]]
    expected = run(one, jobs)
    both_back(two)
    counter = two.counters["steps_total"]
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        two.submit(edit_job, sink)
    process = ranks(two).ranks.processes[1]
    eventually("a row is there", lambda: rows_on(two, process))
    os.kill(process.pid, number)
    eventually("it is noticed", lambda: 1 in ranks(two).devices.lost)
    finals = [sink.final() for sink in sinks]
    assert_same([final.latents for final in finals], expected)
    assert all(final.meta["steps"] == 60 for final in finals)
    # No step was taken twice, but for the one that the rank was lost in.
    assert two.counters["steps_total"] - counter <= 60 * len(jobs) + len(jobs)
    both_back(two)
    policy = two.manager.scheduler
    if isinstance(policy, AnyDegreeScheduler):
        policy.draws.drawn.clear()
    assert_same(run(two, jobs), expected)
    assert_both_alone_and_together(two)  # the gang has met again


# test_cfg_pair.py loses one there; that a row goes on on another device: the test above.
@pytest.mark.slow
def test_a_rank_that_is_lost_between_anchors_makes_the_next_step_one(
    two: Engine, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = two.manager.scheduler
    if not isinstance(policy, AnyDegreeScheduler):
        return  # which device has the edit is not drawn
    both_back(two)
    decide = policy.draws.decide

    def on_one_device(now: float, works: Any) -> Any:
        if 1 in ranks(two).devices.lost:
            policy.draws.always = (0,)
        return decide(now, works)

    monkeypatch.setattr(policy.draws, "decide", on_one_device)
    options: dict[str, Any] = {"num_inference_steps": 60, "strength": 1.0, "cache": "own"}
    policy.draws.always = (1,)
    [reference] = edited(two, [job(encoder, 4, "kept", **options)])
    planned = reference.meta["anchors"]
    assert len(planned) == 3
    sink = Sink()
    two.submit(job(encoder, 4, "lost", progress=True, **options), sink)
    eventually("it is between anchors", lambda: len(sink.events) > 3)
    ranks(two).ranks.processes[1].kill()
    final = sink.final()
    policy.draws.always = ()
    # Where it went on it computed all tokens, and then its next refresh step with lookahead.
    [dense, next_refresh] = sorted(set(final.meta["anchors"]) - set(planned))
    assert next_refresh == dense + 1
    both_back(two)


def test_edits_of_a_template_leave_their_text_out_where_each_device_has_its_own(
    tiny_fill: Path, encoder: Encoder
) -> None:
    """As on one device: no device needs to know what another one has kept."""

    def config_of_text(devices: int) -> Config:
        config = config_for(tiny_fill, devices)
        return structs.replace(config, cache=structs.replace(config.cache, own_text="frozen"))

    options: dict[str, Any] = {"cache": "require", "num_inference_steps": 20}
    one, two = (started(config_of_text(devices), encoder) for devices in (1, 2))
    try:
        finals = [edited(engine, [job(encoder, 3, "hit", **options)])[0] for engine in (one, two)]
        by_one, by_two = finals
        assert by_one.meta["text_steps"] == by_two.meta["text_steps"] == 3
        for name in ("computed_tokens", "own_bytes"):  # what is kept is kept in the same format
            assert by_one.meta[name] == by_two.meta[name]
        assert by_two.meta["refresh_errors"] == pytest.approx(
            by_one.meta["refresh_errors"], abs=1e-4
        )
        assert_same([by_two.latents], [by_one.latents])
        sink = Sink()
        two.submit(job(encoder, 3, "lost", progress=True, **options), sink)
        eventually("it is between anchors", lambda: len(sink.events) > 3)
        for process in ranks(two).ranks.processes:
            if rows_on(two, process):
                process.kill()
        lost = sink.final()
        # Where it went on there was nothing that a step without its text could read.
        assert (lost.meta["cache"], lost.meta["steps"]) == ("hit", 20)
        assert lost.meta["text_steps"] >= 3
    finally:
        one.close(5.0)
        two.close(5.0)


def test_ranks_that_are_out_of_step_say_so_and_none_waits(two: Engine, encoder: Encoder) -> None:
    if not isinstance(two.manager.scheduler, AnyDegreeScheduler):
        return  # they form no gang
    both_back(two)
    gang = tuple(ranks(two).ranks.processes)
    name = ranks(two).ranks.gangs[gang]
    answers = [
        process.call("step", StepInput(number, ()), name) for number, process in enumerate(gang)
    ]
    for answer in answers:
        with pytest.raises(RuntimeError, match="ranks are out of step"):
            answer.result(10.0)
    assert len(run(two, [job(encoder, 2, "after", num_inference_steps=2, cache="off")])) == 1


@pytest.mark.slow  # the record's freshness: tests/unit/engine/loop/test_engine.py
def test_the_engine_gives_signs_of_life_while_no_rank_is_there(
    two: Engine, encoder: Encoder
) -> None:
    both_back(two)
    published: list[float] = []
    publish = two.publisher.publish

    def counted(state: State) -> None:
        published.append(time.monotonic())
        publish(state)

    two.publisher.publish = counted  # type: ignore[method-assign]
    sink = Sink()
    two.submit(job(encoder, 9, "held", num_inference_steps=60, cache="off"), sink)
    eventually("a step", lambda: len(published) > 1)
    killed = time.monotonic()
    for process in ranks(two).ranks.processes:
        process.kill()
    assert sink.final().meta["steps"] == 60
    both_back(two)
    away = time.monotonic() - killed  # seconds: a rank's start, longer where others compute, too
    del two.publisher.publish  # type: ignore[method-assign]
    silences = np.diff(published)
    assert max(silences) < 0.5 * away


def rows_on(engine: Engine, process: RankProcess) -> bool:
    rows = list(ranks(engine).rows.values())
    return any(process in row.steps_in_rank for row in rows)


# Steps run as under any degree, above; tests/unit/core/worker holds how rounds choose.
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rounds", "together"])
def test_other_policies_give_the_edits_of_one_device(
    one: Engine, tiny_fill: Path, encoder: Encoder, policy: Any
) -> None:
    """As configured: some are late, some due at no time; and with a rank that is lost."""
    config = config_for(tiny_fill, 2)
    tables = structs.replace(config.engine, policy=policy, round_steps=2)
    engine = started(structs.replace(config, engine=tables), encoder)
    try:
        jobs = [
            job(encoder, seed, f"round-{seed}", num_inference_steps=30, strength=1.0, cache="off")
            for seed in range(5)
        ]
        for number, ms in ((1, 1), (2, 1), (3, 60_000)):
            jobs[number] = replace(jobs[number], request=replace(jobs[number].request, due_ms=ms))
        expected = run(one, jobs)
        assert_same(run(engine, jobs), expected)
        sinks = [Sink() for _ in jobs]
        for edit_job, sink in zip(jobs, sinks, strict=True):
            engine.submit(edit_job, sink)
        process = ranks(engine).ranks.processes[1]
        eventually("a row is there", lambda: rows_on(engine, process))
        process.kill()
        assert_same([sink.final().latents for sink in sinks], expected)
        engine.manager.scheduler.check_integrity()
    finally:
        engine.close(5.0)


def test_what_devices_do_not_go_with_is_refused_in_a_sentence(tiny_fill: Path) -> None:
    config = config_for(tiny_fill, 2)
    served = structs.replace(config.controls, service="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"2 devices per worker .* \[controls\] service"):
        load_engine(structs.replace(config, controls=served))
    with pytest.raises(ConfigError, match=r"2 devices on 1 GPU\(s\); accepted: up to 1"):
        check_devices(config, gpus=1)
    check_devices(config, gpus=2)


@pytest.mark.parametrize("policy", ["deadline", "rounds", "together"])
def test_devices_above_the_models_heads_are_refused_in_a_sentence(
    tiny_fill: Path, policy: Any
) -> None:
    """It has two; each device with a batch of its own needs none."""
    config = config_for(tiny_fill, 4)
    shared = structs.replace(config, engine=structs.replace(config.engine, policy=policy))
    with pytest.raises(ConfigError, match="4 devices cannot share the 2 attention heads of this"):
        load_engine(shared)
    check_devices(config, gpus=0)


@pytest.mark.slow  # a model that does not load: tests/unit/engine/stages/test_loader.py
def test_a_model_that_ranks_cannot_load_is_a_sentence(tiny_fill: Path, tmp_path: Path) -> None:
    config, folder = config_for(tiny_fill, 2), tmp_path / "model"
    shutil.copytree(tiny_fill, folder)
    for weights in (folder / "transformer").glob("*.safetensors"):
        weights.unlink()  # what the denoiser's own process does not read
    absent = structs.replace(config, model=structs.replace(config.model, path=str(folder)))
    with pytest.raises(ConfigError, match="a rank did not start"):
        load_engine(absent)


@pytest.mark.parametrize("name", VARIANTS)
def test_edits_of_unets_can_be_sent_to_a_rank(tiny_unets: dict[str, Path], name: str) -> None:
    """With all that was prepared of them, what is kept to be quick left out."""
    config = config_of(tiny_unets[name])
    adapter, encoder = load_adapter(config), load_encoder(config)
    edit_job = encode_case(encoder, unet_case(np.random.default_rng(4)), "edit")
    ready = adapter.prepare_template(adapter.prepare(edit_job), 5)
    rows = [adapter.dense_row(ready)]
    document = pickle.loads(pack(PlainRowSpec(ready)))
    rows.append(adapter.dense_row(document.job))
    for row in rows:
        adapter.step([row], None)
    assert np.array_equal(*(row.result().array() for row in rows))


@pytest.mark.slow
def test_errors_that_ranks_measure_place_refresh_steps(tiny_kontext: Path) -> None:
    encoder, metas = load_encoder(config_of(tiny_kontext)), list[list[Any]]()
    for devices in (1, 2):
        config = config_for(tiny_kontext, devices)
        cache = structs.replace(config.cache, fidelity=14.0, own_format="model")
        engine = started(structs.replace(config, cache=cache), encoder)
        try:
            jobs = [job(encoder, n, str(n), num_inference_steps=20, strength=1.0) for n in range(3)]
            metas.append([(f.meta["cache"], f.meta["anchors"]) for f in edited(engine, jobs)])
        finally:
            engine.close(5.0)
    assert metas[0] == metas[1]
    assert {cache for cache, _ in metas[0]} == {"own"}


# families/flux2 has ranks in threads that make and read them; families/mmdit what they are.
@pytest.mark.slow
def test_exact_references_go_with_a_row_to_any_rank(tmp_path: Path) -> None:
    """Each rank of an edit without a template makes them whole; of a template's each loads its
    heads.
    """
    folder, text = build_tiny_flux2(tmp_path / "exact", exact=True), {"max_sequence_length": 48}
    encoder = load_encoder(config_of(folder, model=text))

    def edits(count: int, name: str, cache: str) -> list[EditJob]:
        options: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": None, "cache": cache}
        return [job(encoder, 3, f"{name}-{n}", **options) for n in range(count)]

    one = started(config_for(folder, 1, **text), encoder)
    expected = run(one, edits(1, "dense", "off"))
    edited(one, edits(1, "primes", "require"))
    [whole] = edited(one, edits(1, "whole", "require"))
    one.close(5.0)
    two = drawn(config_for(folder, 2, **text), encoder)
    try:
        policy = two.manager.scheduler
        assert isinstance(policy, AnyDegreeScheduler)
        assert_same(run(two, edits(3, "dense", "off")), 3 * expected)
        assert_same(run(two, edits(3, "cached", "require")), 3 * [whole.latents])
        assert_both_alone_and_together(two)
        for devices, share in (((0, 1), 0.5), ((1,), 1.0)):
            policy.draws.always = devices
            [final] = edited(two, edits(1, f"on {devices}", "require"))
            assert_same([final.latents], [whole.latents])
            loaded, of_all = (sum(answer.meta["cache_bytes"].values()) for answer in (final, whole))
            assert loaded == share * of_all > 0
    finally:
        two.close(5.0)
    two.manager.scheduler.check_integrity()


@pytest.mark.slow
def test_edits_of_unets_begin_anew_where_a_rank_is_lost(tiny_unets: dict[str, Path]) -> None:
    config = config_for(tiny_unets["sd-fill"], 2)
    encoder = load_encoder(config)
    jobs = [
        encode_case(
            encoder,
            unet_case(
                np.random.default_rng(seed), num_inference_steps=60, strength=1.0, cache="off"
            ),
            f"edit-{seed}",
        )
        for seed in range(4)
    ]
    one = started(config_for(tiny_unets["sd-fill"], 1), encoder)
    expected = run(one, jobs)
    one.close(5.0)
    two = started(config, encoder)
    try:
        sinks = [Sink() for _ in jobs]
        for edit_job, sink in zip(jobs, sinks, strict=True):
            two.submit(edit_job, sink)
        process = ranks(two).ranks.processes[1]
        eventually("a row is there", lambda: rows_on(two, process))
        os.kill(process.pid, signal.SIGKILL)
        assert_same([sink.final().latents for sink in sinks], expected)
    finally:
        two.close(5.0)


def test_gangs_meet_on_the_loopback_alone() -> None:
    store = meeting_place()
    listening = [
        place.laddr.ip
        for place in psutil.Process().net_connections("tcp")
        if place.status == psutil.CONN_LISTEN and place.laddr.port == store.port
    ]
    assert listening == ["127.0.0.1"]
