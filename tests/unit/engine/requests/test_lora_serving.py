"""Edits with LoRAs through the engine: waiting, parking, own entries, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_common.config import Config
from maskserve_common.contracts.request import Lora
from maskserve_common.contracts.status_record import AdapterTierTotal
from maskserve_common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MaskserveError,
    Overloaded,
)
from maskserve_common.files.adapter_folder import AdapterFile
from maskserve_common.resources.loading import Loaded
from maskserve_engine.adapters.lora_loader import Place
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.start.assembly import load_engine
from maskserve_triton.metric_table import ENGINE_METRICS
from tests.fakes.jobs import config_of
from tests.support.engines import job as plain_job
from tests.support.eventually import eventually
from tests.support.refresh_rows import row_of
from tests.support.sink import Sink

STEPS = 4
NBYTES = 4096
"""Bytes of each adapter on the device."""
FILE_BYTES = NBYTES // 2
"""Bytes of its file: two per weight, where the CPU has four."""


class SlowLoras:
    """Loads LoRAs when the test says so: each adapter's weights are drawn from its name."""

    def __init__(self, config: Config, place: Place) -> None:
        self._place, self.places = place, {}
        self.requests: list[str] = []
        self.open: dict[str, threading.Event] = {}
        self.fails: dict[str, Exception] = {}
        self.host: tuple[AdapterFile, ...] = ()
        self.nbytes = FILE_BYTES

    def half_bytes(self, lora: Lora) -> int:
        return self.file_bytes(lora)

    def file_bytes(self, lora: Lora) -> int:
        return self.nbytes

    def typical_bytes(self) -> float:
        return 7.0 * FILE_BYTES

    def on_host(self) -> tuple[AdapterFile, ...]:
        return self.host

    def load(self, lora: Lora, done: Callable[[Any], None]) -> None:
        self.requests.append(lora.name)

        def work() -> None:
            self.open.setdefault(lora.name, threading.Event()).wait(30)
            if lora.name in self.fails:
                done(self.fails[lora.name])
                return
            nbytes = self._place(lora.version, self.factors(lora.name))
            layers = {path: factor.numbers for path, factor in self.factors(lora.name).items()}
            digest = f"digest-of-{lora.name}"
            done(Loaded(digest, nbytes, 0.5, self.nbytes, "storage", layers))

        threading.Thread(target=work, daemon=True).start()

    def factors(self, name: str) -> dict[str, Factors]:
        rng = torch.Generator().manual_seed(sum(name.encode()))
        return {
            path: Factors(
                torch.randn(2, place.shape[1], generator=rng) * 0.3,
                torch.randn(place.shape[0], 2, generator=rng) * 0.3,
            )
            for path, place in self.places.items()
        }

    def let_come(self, *names: str) -> None:
        for name in names:
            self.open.setdefault(name, threading.Event()).set()

    def close(self) -> None:
        self.let_come(*self.requests)


class Site:
    """An engine whose LoRAs load when the test says so, and an adapter of the same model beside."""

    def __init__(
        self, folder: Path, encoder: Encoder, oracle: Any, devices: int = 1, **adapters: Any
    ) -> None:
        self.encoder, self.oracle = encoder, oracle
        config = config_of(
            folder,
            engine={"devices": devices, "warm_up": devices == 1},
            adapters={"store": str(folder), **adapters},
            cache={
                "entry_format": "model",
                "own_format": "model",
                "stride": 1,
                "dense_above_ratio": 1.0,
                "plan": "fixed",
                "budget_bytes": 2**28,
            },
        )
        self.engine = load_engine(config, lora_loader=SlowLoras)
        self.engine.cache.prompt = lambda: encoder.encode_prompt("")
        loader: Any = self.engine.lora_loader
        self.loader: SlowLoras = loader
        self.loader.places = oracle.places
        self.engine.start()

    def job(self, name: str, seed: int = 1, *loras: tuple[str, float], **more: Any) -> EditJob:
        adapters = tuple(
            [Lora(name=n, scale=scale, version=f"version-of-{n}") for n, scale in loras]
        )
        more = {"num_inference_steps": STEPS, "cache": "off", **more}
        job = plain_job(self.encoder, seed, name, **more)
        return replace(job, request=replace(job.request, loras=adapters))

    def begin(self, job: EditJob) -> Sink:
        sink = Sink()
        self.engine.submit(job, sink)
        return sink

    def alone(
        self, job: EditJob, attach_at: int = 0, schedule: RefreshSchedule | None = None
    ) -> np.ndarray:
        """Latents of a row by itself that has its LoRAs from a step on: a dense one, or one with
        refresh steps.
        """
        row = row_of(self.oracle, job, schedule)
        kinds = plan_of_kinds(("kv",) * self.oracle.blocks)
        factors = [
            (self.oracle.low_rank(self.loader.factors(lora.name)), lora.scale)
            for lora in job.request.loras
        ]
        while row.step < row.steps:
            if row.step == attach_at:
                self.oracle.attach(row, job, tuple(factors))
            reads = None
            if schedule is not None and row.step not in schedule.dense:
                reads = StepCacheReader(row, self.oracle.blocks).entry_at(row.step)
            self.oracle.step([row], reads and kinds, [reads])
        latents: np.ndarray = row.result().array()
        return latents

    def waits(self, name: str) -> bool:
        edit = self.engine.manager.edits.get(name)
        return edit is not None and edit.waiting

    def idle(self) -> None:
        """Nothing is left behind."""
        manager = self.engine.manager
        eventually("all are answered", lambda: not manager.edits)
        assert manager.adapters.loras is not None
        assert not manager.adapters.loras._owners
        assert not manager.late_rows.rows
        assert not manager.resource_states._pins
        manager.resource_states.check_integrity()
        manager.scheduler.check_integrity()


@pytest.fixture(scope="module")
def encoder(tiny_fill: Path) -> Encoder:
    return load_encoder(config_of(tiny_fill))


@pytest.fixture(scope="module")
def oracle(tiny_fill: Path) -> Adapter:
    return load_adapter(config_of(tiny_fill))


@pytest.fixture
def make(tiny_fill: Path, encoder: Encoder, oracle: Adapter) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make_site(devices: int = 1, **adapters: Any) -> Site:
        sites.append(Site(tiny_fill, encoder, oracle, devices, **adapters))
        return sites[-1]

    yield make_site
    for site in sites:
        site.idle()
        site.engine.close(5.0)
        site.engine.cache.store.check_integrity()


def profile(folder: Path, **sigmas: float) -> str:
    import json

    path = folder / "profiles.json"
    path.write_text(json.dumps(sigmas))
    return str(path)


def refusal(sink: Sink, kind: type[MaskserveError]) -> str:
    error = sink.error()
    assert isinstance(error, kind)
    return str(error)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= 1e-4 * max(1.0, float(np.abs(other).max())))


def test_an_exact_edit_waits_for_its_loras_and_nobody_else_does(make: Callable[..., Site]) -> None:
    site = make()
    edit = site.job("with", 1, ("a", 1.0), ("b", -0.5))
    waiting = site.begin(edit)
    sinks = [site.begin(site.job(f"other-{n}", n)) for n in range(3)]
    for number, other in enumerate(sinks):
        assert close(other.final().latents, site.alone(site.job("x", number)))
    assert site.engine.manager.edits["with"].waiting
    site.loader.let_come("a")
    site.loader.let_come("b")
    final = waiting.final()
    assert close(final.latents, site.alone(edit))
    assert not close(final.latents, site.alone(site.job("x", 1)))
    assert [lora["digest"] for lora in final.meta["loras"]] == ["digest-of-a", "digest-of-b"]
    assert (final.meta["adapters"], final.meta["loras_from_step"]) == ("exact", 0)
    assert final.meta["loras_waited_ms"] > 0
    again = site.begin(site.job("again", 1, ("a", 1.0), ("b", -0.5))).final()
    assert np.array_equal(again.latents, final.latents)
    assert sorted(site.loader.requests) == ["a", "b"]
    assert again.meta["loras_waited_ms"] == 0


def test_eight_loras_share_a_batch_and_each_edit_is_its_own(make: Callable[..., Site]) -> None:
    site = make()
    names = [f"lora-{n}" for n in range(8)]
    site.loader.let_come(*names)
    jobs = [site.job(f"edit-{n}", n, (name, 1.0)) for n, name in enumerate(names)]
    sinks = [site.begin(job) for job in jobs]
    finals = [sink.final() for sink in sinks]
    for job, final in zip(jobs, finals, strict=True):
        assert close(final.latents, site.alone(job))


def test_a_fast_edit_runs_without_until_it_may_not_and_then_parks(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    site = make(profiles=profile(tmp_path, a=0.6))
    edit = site.job("fast", 1, ("a", 1.0), adapters="fast")
    sink = site.begin(edit)
    eventually("it is parked", lambda: site.waits("fast"))
    sigmas = [sigma for sigma, _ in site.engine.adapter.sigmas(edit)]
    without = sum(sigma > 0.6 for sigma in sigmas)
    assert 0 < without < STEPS
    assert site.engine.manager.edits["fast"].tally.done == without
    # Its place in the batch is free meanwhile.
    assert close(site.begin(site.job("other", 2)).final().latents, site.alone(site.job("x", 2)))
    site.loader.let_come("a")
    final = sink.final()
    assert final.meta["loras_from_step"] == without
    assert close(final.latents, site.alone(edit, attach_at=without))
    late = site.begin(site.job("late", 1, ("a", 1.0), adapters="fast")).final()
    assert late.meta["loras_from_step"] == 0  # it is here now


def test_an_edit_that_parks_between_refresh_steps_goes_on_with_its_step_cache(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    """Its step cache was computed without the LoRA, so its next step is a refresh step with it."""
    site = make(profiles=profile(tmp_path, a=0.6))
    options: dict[str, Any] = {"num_inference_steps": 12, "cache": "own", "adapters": "fast"}
    edit = site.job("fast", 1, ("a", 1.0), **options)
    sink = site.begin(edit)
    eventually("it is parked", lambda: site.waits("fast"))
    without = site.engine.manager.edits["fast"].tally.done
    site.loader.let_come("a")
    final = sink.final()
    assert final.meta["cache"] == "own"
    assert {0, without} <= set(final.meta["anchors"])
    refresh_schedule = RefreshSchedules(site.engine.config, site.oracle).of(edit)
    assert refresh_schedule is not None
    assert close(
        final.latents, site.alone(edit, without, replace(refresh_schedule, format="model"))
    )


def test_what_a_lora_computes_is_counted_from_when_its_row_has_it(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    site = make(profiles=profile(tmp_path, a=0.6))
    sink = site.begin(site.job("fast", 1, ("a", 1.0), adapters="fast"))
    eventually("it is parked", lambda: site.waits("fast"))
    edit = site.engine.manager.edits["fast"]
    bare, adapter = edit.work, site.engine.adapter
    assert (bare.totals.added, edit.status().adapter_bytes) == (None, 0)
    site.loader.let_come("a")
    sink.final()
    base = adapter.work(*edit.job.moments.shape[1:])
    layers = {path: factor.numbers for path, factor in site.loader.factors("a").items()}
    added = base.lora_work(layers).batch_flops(None, (), bare.totals)
    assert edit.work.dense_flops == pytest.approx(bare.dense_flops + added)
    assert edit.work.cached_flops > bare.cached_flops
    assert edit.work.step_flops("dense") == edit.work.dense_flops  # what its ticket says
    assert edit.status().adapter_bytes == FILE_BYTES


def test_a_fast_edit_without_a_profile_is_an_exact_one(make: Callable[..., Site]) -> None:
    site = make()
    edit = site.job("fast", 1, ("a", 1.0), adapters="fast")
    sink = site.begin(edit)
    eventually("it waits", lambda: site.waits("fast"))
    assert site.engine.manager.edits["fast"].tally.done == 0
    site.loader.let_come("a")
    assert close(sink.final().latents, site.alone(edit))


def test_cached_edits_with_loras_have_entries_of_their_own(make: Callable[..., Site]) -> None:
    """Oracle: all tokens active in a dense row; here as near as the cache comes without LoRAs."""
    site = make()
    site.loader.let_come("a", "b")
    options = {"cache": "require"}
    plain = site.begin(site.job("plain", 1, **options)).final()
    one = site.begin(site.job("one", 1, ("a", 1.0), **options)).final()
    two = site.begin(site.job("two", 1, ("a", 0.5), **options)).final()
    other = site.begin(site.job("other", 1, ("b", 1.0), **options)).final()
    again = site.begin(site.job("again", 1, ("a", 1.0), **options)).final()
    keys = {template["key"] for template in site.engine.templates().result()}
    assert len(keys) == 4  # of a template: without, and of each LoRA and scale
    assert np.array_equal(one.latents, again.latents)
    finals = [plain, one, two, other]
    for number, final in enumerate(finals):
        assert final.meta["cache"] == "hit"
        for another in finals[number + 1 :]:
            assert np.abs(final.latents - another.latents).max() > 1e-3


def test_base_entries_serve_rows_with_loras_if_so_configured(make: Callable[..., Site]) -> None:
    site = make(entries="base")
    site.loader.let_come("a")
    site.begin(site.job("plain", 1, cache="require")).final()
    site.begin(site.job("one", 1, ("a", 1.0), cache="require")).final()
    assert len({template["key"] for template in site.engine.templates().result()}) == 1


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fast_row_changes_entries_when_its_lora_arrives(
    make: Callable[..., Site], tmp_path: Path, devices: int
) -> None:
    site = make(devices, profiles=profile(tmp_path, a=0.6), device_bytes=3 * NBYTES)
    offered: list[str] = []
    audits: Any = site.engine.manager.audits
    audits.offer = lambda key, job, latents: offered.append(job.request.request_id)
    site.loader.let_come("a", "b", "c", "d")
    site.begin(site.job("plain", 1, cache="require")).final()
    exact = site.begin(site.job("exact", 1, ("a", 1.0), cache="require")).final()
    for name in ("b", "c", "d") * 2:  # push it out: priming was a use of it, too
        site.begin(site.job(name, 2, (name, 1.0))).final()
    site.loader.open["a"].clear()
    assert site.engine.manager.adapters.loras is not None
    assert "a" not in site.engine.manager.adapters.loras.names()
    sink = site.begin(site.job("fast", 1, ("a", 1.0), cache="auto", adapters="fast"))
    eventually("it is parked", lambda: site.waits("fast"))
    begun = site.engine.manager.edits["fast"].reads
    site.loader.let_come("a")
    final = sink.final()
    assert begun is not None
    assert final.meta["cache"] == "hit"
    assert final.meta["loras_from_step"] > 0
    assert np.abs(final.latents - exact.latents).max() > 1e-4
    # Made again it would have its LoRA from the start, and what differs is not the template's.
    eventually("the exact one is offered for an audit", lambda: "exact" in offered)
    assert "fast" not in offered


def test_what_goes_wrong_with_a_lora_ends_its_edits_alone(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    site = make(profiles=profile(tmp_path, bad=0.6))
    site.loader.fails["bad"] = InvalidRequest("SETTINGS.loras", "adapter bad is truncated")
    exact = site.begin(site.job("exact", 1, ("good", 1.0), ("bad", 1.0)))
    fast = site.begin(site.job("fast", 1, ("bad", 1.0), adapters="fast"))
    fine = site.begin(site.job("fine", 2, ("good", 1.0)))
    site.loader.let_come("bad")
    for sink in (exact, fast):
        assert "adapter bad is truncated" in refusal(sink, InvalidRequest)
    site.loader.let_come("good")
    assert close(fine.final().latents, site.alone(site.job("x", 2, ("good", 1.0))))
    del site.loader.fails["bad"]  # the next edit tries anew
    edit = site.job("next", 1, ("bad", 1.0))
    assert close(site.begin(edit).final().latents, site.alone(edit))


def test_edits_that_wait_can_be_cancelled_and_have_deadlines(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    site = make(profiles=profile(tmp_path, a=0.6))
    parked = site.begin(site.job("parked", 1, ("a", 1.0), adapters="fast"))
    waiting = site.begin(site.job("waiting", 1, ("a", 1.0)))
    late = site.begin(site.job("late", 1, ("a", 1.0), deadline_ms=200))
    eventually("it is parked", lambda: site.waits("parked"))
    for name in ("parked", "waiting"):
        site.engine.cancel(name)
    for sink in (parked, waiting):
        refusal(sink, Cancelled)
    refusal(late, DeadlineExceeded)


def test_the_least_recent_makes_room_and_none_that_is_in_use(make: Callable[..., Site]) -> None:
    site = make(device_bytes=2 * NBYTES)
    site.loader.let_come("a", "b", "c")
    for name in ("a", "b", "a", "c"):
        site.begin(site.job(f"of-{name}", 1, (name, 1.0))).final()
    loras = site.engine.manager.adapters.loras
    assert loras is not None
    assert loras.names() == ("a", "c")
    sinks = [site.begin(site.job(f"held-{n}", 1, (n, 1.0))) for n in ("x", "y")]
    refused = site.begin(site.job("refused", 1, ("z", 1.0)))
    assert "no room for adapter z" in refusal(refused, Overloaded)
    site.loader.let_come("x", "y")
    for sink in sinks:
        sink.final()


def test_what_is_at_hand_is_told_and_loads_are_measured(make: Callable[..., Site]) -> None:
    site = make(device_bytes=2 * NBYTES)
    manager = site.engine.manager
    loras = manager.adapters.loras
    assert loras is not None
    site.loader.host = tuple(
        AdapterFile(Path(name), name, "v", f"sha-{name}", 100, 0.0) for name in ("a", "far")
    )
    waiting = site.begin(site.job("waiting", 1, ("a", 1.0)))
    eventually("it waits", lambda: site.waits("waiting"))
    on_its_way = {entry.name: entry.tier for entry in loras.listed()}
    assert on_its_way == {"far": "host", "a": "coming"}
    site.loader.let_come("a", "b", "c")
    waiting.final()
    for name in ("b", "c"):
        site.begin(site.job(name, 1, (name, 1.0))).final()
    tiers = {entry.name: (entry.tier, entry.digest) for entry in loras.listed()}
    assert tiers == {
        "a": ("host", "sha-a"),
        "far": ("host", "sha-far"),
        "b": ("device", "digest-of-b"),
        "c": ("device", "digest-of-c"),
    }
    assert loras.tiers()["host"] == AdapterTierTotal(2, 200)
    assert loras.tiers()["device"].count == 2
    assert loras.listed() is loras.listed()
    assert loras.counters["adapter_evictions_total"] == 1
    assert loras.costs.published["storage"].seconds(FILE_BYTES) == pytest.approx(0.5)
    observed = list(site.engine.observations.take())
    for name, _, labels in observed:
        assert len(ENGINE_METRICS[name].labels) == len(labels)
    names = [name for name, _, _ in observed]
    assert names.count("adapter_load_seconds") == 3
    assert "adapter_wait_seconds" in names


def test_what_made_room_for_a_rarer_one_comes_back_unasked(make: Callable[..., Site]) -> None:
    site = make(device_bytes=2 * NBYTES)
    site.loader.let_come("a", "b", "rare")
    loras = site.engine.manager.adapters.loras
    assert loras is not None
    for number, name in enumerate(("a", "b", "a", "b", "rare")):
        site.begin(site.job(f"{number}", 1, (name, 1.0))).final()
    eventually("a is back", lambda: loras.names() == ("a", "b"))
    assert site.loader.requests == ["a", "b", "rare", "a"]


def test_what_cannot_come_back_hurts_nobody(make: Callable[..., Site]) -> None:
    site = make(device_bytes=NBYTES)
    site.loader.let_come("a", "rare")
    loras = site.engine.manager.adapters.loras
    assert loras is not None
    for number in range(2):
        site.begin(site.job(f"{number}", 1, ("a", 1.0))).final()
    site.loader.fails["a"] = Overloaded("the storage is gone")
    site.begin(site.job("other", 1, ("rare", 1.0))).final()
    eventually("it has failed", lambda: loras.counters["adapter_load_failures_total"] == 1)
    del site.loader.fails["a"]
    edit = site.job("again", 1, ("a", 1.0))
    assert close(site.begin(edit).final().latents, site.alone(edit))


def test_a_lora_larger_than_the_budget_fails_its_edits_alone(make: Callable[..., Site]) -> None:
    site = make(device_bytes=NBYTES // 2)
    sink = site.begin(site.job("with", 1, ("a", 1.0)))
    assert "no room for adapter a" in refusal(sink, Overloaded)
    assert site.begin(site.job("without", 1)).final()


def test_what_is_booked_is_what_the_weights_take(make: Callable[..., Site]) -> None:
    """The file is in half precision, as most are."""
    site = make()
    site.loader.nbytes = 2 * sum(
        x.numel() for factors in site.loader.factors("a").values() for x in factors
    )
    site.loader.let_come("a")
    site.begin(site.job("x", 1, ("a", 1.0))).final()
    loras = site.engine.manager.adapters.loras
    assert loras is not None
    assert site.engine.manager.resource_states.nbytes("lora") == loras.nbytes()


def test_a_scale_of_0_asks_for_nothing(make: Callable[..., Site]) -> None:
    site = make()
    final = site.begin(site.job("nothing", 1, ("a", 0.0))).final()
    assert not site.loader.requests
    plain = site.begin(site.job("plain", 1)).final()
    assert np.array_equal(final.latents, plain.latents)


def test_without_a_store_edits_with_loras_are_refused(
    tiny_fill: Path, encoder: Encoder, oracle: Adapter, make: Callable[..., Site]
) -> None:
    site = make()
    edit = site.job("x", 1, ("a", 1.0))
    engine = load_engine(config_of(tiny_fill))
    engine.start()
    sink = Sink()
    engine.submit(replace(edit), sink)
    assert "adapters are not served here" in refusal(sink, InvalidRequest)
    engine.close(5.0)


@pytest.mark.parametrize("loses", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_devices_have_the_loras_of_their_rows(make: Callable[..., Site], loses: bool) -> None:
    """Whichever steps them: with entries of their own, arriving late, behind a lost process."""
    site = make(devices=2)
    site.loader.let_come("warm", "cold")
    jobs = [
        site.job(f"edit-{n}", n, *loras)
        for n, loras in enumerate(
            [(), (("warm", 1.0),), (("cold", 0.7),), (("warm", 0.5), ("cold", -0.4))]
        )
    ]
    expected = [site.alone(job) for job in jobs]
    assert not close(expected[1], site.alone(site.job("plain", 1)))

    def served(name: str) -> list[np.ndarray]:
        js = [replace(j, request=replace(j.request, request_id=f"{name}-{n}"))
                 for n, j in enumerate(jobs)]  # fmt: skip
        return [sink.final().latents for sink in [site.begin(job) for job in js]]

    for result, alone in zip(served("first"), expected, strict=True):
        assert close(result, alone)
    cached = site.job("cached", 1, ("warm", 1.0), cache="require")
    final = site.begin(cached).final()
    assert final.meta["cache"] == "hit"
    executor = site.engine.executor
    assert isinstance(executor, GangExecutor)
    if not loses:
        return
    lost = executor.ranks.processes[1]
    lost.kill()
    eventually("it is noticed", lambda: executor.ranks.processes[1] is not lost)
    eventually("it is back", lambda: not executor.devices.lost, 60.0)
    for result, alone in zip(served("again"), expected, strict=True):
        assert close(result, alone)
