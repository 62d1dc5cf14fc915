"""The cluster simulator: against queueing theory, against itself, and its own checks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from maskserve_benchmarks.simulator import bars
from maskserve_benchmarks.simulator.capacity import at_load, capacity
from maskserve_benchmarks.simulator.cluster import Cluster
from maskserve_benchmarks.simulator.hardware import Hardware
from maskserve_benchmarks.simulator.loras import NBYTES, LoraTiers
from maskserve_benchmarks.simulator.result import NotConserved, check_conserved, run, simulate
from maskserve_benchmarks.simulator.scenario import BATCHING, Scenario, Tiers
from maskserve_benchmarks.simulator.workload import MIXES, Workload, draw, mean_ratio
from maskserve_common.config import CacheConfig, ModelConfig
from maskserve_common.routing import POLICIES
from maskserve_engine.adapters.lora_loader import LORAS

HARDWARE = Hardware()
PUBLIC = Workload(150, 4.0, steps=(8, 20))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_masks_have_the_published_mean_and_quantiles(mix):
    assert mean_ratio(mix) == pytest.approx(mix.mean, rel=0.01)
    p, ratio = np.array(mix.quantiles).T
    assert mix.ratios(p) == pytest.approx(ratio)
    workload = Workload(20_000, 1.0, mix.name, ring=0)
    drawn = [r.active / 4096 for r in draw(workload, 4096, 1)]
    assert np.mean(drawn) == pytest.approx(mix.mean, rel=0.05)  # a draw: 1 % or so
    for q, at in mix.quantiles[2:-1]:
        assert np.quantile(drawn, q) == pytest.approx(at, rel=0.1)


def test_a_ring_grows_each_square_mask_and_changes_nothing_else() -> None:
    plain, ringed = (draw(replace(PUBLIC, ring=ring), 4096, 1) for ring in (0, 1))
    for bare, grown in zip(plain, ringed, strict=True):
        assert replace(grown, active=bare.active) == bare
        side = math.sqrt(bare.active)
        # Within what rounding to whole tokens leaves open.
        assert grown.active == pytest.approx(min(4096, (side + 2) ** 2), abs=1 + 2 / side)


@pytest.mark.parametrize("burst", [1.0, 2.5])
def test_gaps_have_their_mean_and_spread(burst: float):
    arrivals = [r.arrival for r in draw(Workload(20_000, 5.0, burst=burst), 4096, 1)]
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burst, rel=0.05)


def test_templates_are_zipf():
    drawn = [r.template for r in draw(Workload(20_000, 1.0), 4096, 1)]
    weights = 1.0 / np.arange(1, 971)
    assert drawn.count("t00000") / 20_000 == pytest.approx(1.0 / weights.sum(), rel=0.05)
    assert drawn.count("t00009") / 20_000 == pytest.approx(0.1 / weights.sum(), rel=0.2)


def test_a_rate_changes_gaps_only():
    slow, fast = (draw(replace(PUBLIC, rate=r), 4096, 3) for r in (1.0, 4.0))
    assert [replace(a, arrival=0.0) for a in slow] == [replace(b, arrival=0.0) for b in fast]
    assert [a.arrival for a in slow] == pytest.approx([4.0 * b.arrival for b in fast])


def test_an_edit_alone_takes_its_steps():
    workload = Workload(1, 1.0, steps=(20,))
    _, cluster = run(
        Scenario(workload, workers=1, warmup=0.0, pre_seconds=0.5, post_seconds=0.25), HARDWARE, 1
    )
    (job,) = cluster.jobs
    step = HARDWARE.step_seconds(1, round(job.row.tokens), 0)
    assert job.ended - job.request.arrival == pytest.approx(0.5 + 20 * step + 0.25)
    # What the first block loads is not hidden, and not foretold; steps are timed by 32 tokens.
    assert job.predicted == pytest.approx(20 * step, rel=0.08)


def test_one_row_at_a_time_waits_as_queueing_theory_says():
    """One place in the batch is an M/G/1 queue: Pollaczek and Khinchine's mean wait."""
    scenario = Scenario(
        Workload(6000, 1.0, "production", steps=(4,)), workers=1, max_rows=1, warmup=0.0
    )
    scenario = at_load(scenario, HARDWARE, 0.6)
    _, cluster = run(scenario, HARDWARE, 2)
    service = np.array([job.denoised - job.started for job in cluster.jobs])
    wait = np.mean([job.started - job.request.arrival for job in cluster.jobs])
    rate = len(service) / cluster.jobs[-1].request.arrival
    expected = rate * np.mean(service**2) / (2 * (1 - rate * np.mean(service)))
    assert wait == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", BATCHING)
def test_equal_seeds_give_equal_runs_and_nothing_is_lost(policy: str, batching: str):
    scenario = Scenario(
        PUBLIC, policy, workers=3, batching=batching, pre_seconds=0.1, post_seconds=0.1, noise=0.1
    )
    first, second_run = (simulate(scenario, HARDWARE, 7) for _ in range(2))
    assert first == second_run
    assert first.done == first.measured == 135
    assert simulate(scenario, HARDWARE, 8) != first


def test_deadlines_and_full_queues_end_edits_once_too():
    scenario = Scenario(
        replace(PUBLIC, rate=50.0), workers=2, max_rows=2, max_waiting=20, deadline=8.0, warmup=0.0
    )
    result = simulate(scenario, HARDWARE, 1)
    assert result.refused > 0
    assert result.expired > 0
    assert result.done + result.expired + result.refused == 150
    assert result.p99 <= 8.0 + 8 * HARDWARE.step_seconds(0, 0, 2)


def test_an_edit_that_misses_its_template_is_dense_at_its_own_anchors_alone() -> None:
    workload = Workload(1, 1.0, "production", templates=40)
    cold = Tiers(1, 10, 0, warm=False)
    result, cluster = run(Scenario(workload, workers=1, tiers=cold, warmup=0.0), HARDWARE, 1)
    [job] = cluster.jobs
    anchors, steps, active = job.refresh_steps, job.request.steps, round(job.row.tokens)
    assert len(anchors) == job.edit.refresh_steps == 3 < steps
    between, dense = HARDWARE.step_seconds(1, active, 0, 1), HARDWARE.step_seconds(0, 0, 1)
    # All but the first are computed beside a step that reads.
    anchor_step_s = HARDWARE.step_seconds(1, active, 1, 1)
    expected = dense + (len(anchors) - 1) * anchor_step_s + (steps - len(anchors)) * between
    assert job.denoised - job.started == pytest.approx(expected)
    assert between <= HARDWARE.step_seconds(1, active, 0)  # which loads
    assert (result.misses, cluster.workers["w000"].loaded_bytes) == (1, 0.0)


@pytest.mark.parametrize("known", [True, False])
def test_tiers_fetch_prime_and_evict(known: bool):
    workload = Workload(400, 4.0, "production", templates=40, zipf=0.5)
    disk = Tiers(1, 10, 40, known)
    fetching = simulate(Scenario(workload, workers=2, tiers=disk), HARDWARE, 1)
    assert fetching.fetches > 0
    assert fetching.misses == fetching.primed == 0
    cold = Tiers(2, 5, 10, known, warm=False)
    scenario = Scenario(replace(workload, rate=1.0), workers=2, tiers=cold)
    result, cluster = run(scenario, HARDWARE, 1)
    assert result.misses > result.primed > 0
    assert result.fetches > 0
    (host,) = cluster.hosts
    tiers = host.tiers()
    assert tiers == {"host": set(host.memory.entries()), "disk": set(host.disk.entries())}
    assert len(tiers["host"]) == 5
    assert len(tiers["disk"]) == 10
    for tier in (host.memory, host.disk):
        tier.check_integrity()
    assert not host.fetching


def test_what_is_not_said_is_as_the_product_has_it() -> None:
    """FLUX Fill keeps one anchor in int4, others one of 7 steps; a ring of one token."""
    assert HARDWARE.entry_format == CacheConfig().entry_format == "int4"
    assert (HARDWARE.anchors, Hardware(model="sdxl").anchors) == (1, 4)
    assert (HARDWARE.text, Hardware(model="sdxl").text) == (512, 77)
    assert Workload(1, 1.0).ring == ModelConfig().mask_ring == 1


@pytest.mark.parametrize("model", ["sdxl", "sd21"])
def test_unets_are_simulated_too(model: str) -> None:
    hardware = Hardware(model=model)
    small, large = (hardware.step_seconds(1, hardware.tokens // n, 0) for n in (50, 3))
    assert 0 < small < large < hardware.step_seconds(0, 0, 1)
    tiles = Hardware(model=model, halo=4)
    assert tiles.step_seconds(1, tiles.tokens // 50, 0) < small
    result = simulate(Scenario(PUBLIC, workers=3), hardware, 1)
    assert result.done == result.measured == 135


def test_capacity_is_what_a_saturated_worker_serves():
    workload = replace(PUBLIC, requests=400)
    rate = capacity(HARDWARE, workload)
    below = simulate(at_load(Scenario(workload, workers=1), HARDWARE, 0.7), HARDWARE, 1)
    above = simulate(at_load(Scenario(workload, workers=1), HARDWARE, 2.0), HARDWARE, 1)
    assert rate > 0
    assert below.utilisation == pytest.approx(0.7, abs=0.15)
    assert above.utilisation > 0.98
    assert above.mean > 4 * below.mean


def tampered(cluster: Cluster, fault: str) -> None:
    job = cluster.jobs[5]
    if fault == "lost":
        cluster.jobs.remove(job)
    elif fault == "doubled":
        cluster.jobs.append(job)
    elif fault == "unanswered":
        cluster.answers -= 1
    elif fault == "short":
        job.tokens_done -= job.row.tokens
    elif fault == "step":
        cluster.workers[job.worker].row_steps += 1
    elif fault == "early":
        job.denoised = job.started


@pytest.mark.parametrize("fault", ["lost", "doubled", "unanswered", "short", "step", "early"])
def test_the_checks_notice_what_is_not_conserved(fault: str):
    _, cluster = run(Scenario(PUBLIC, workers=3), HARDWARE, 1)
    requests = draw(PUBLIC, HARDWARE.tokens, 1)
    check_conserved(cluster, requests)
    tampered(cluster, fault)
    with pytest.raises(NotConserved):
        check_conserved(cluster, requests)


def test_static_batches_end_together():
    scenario = Scenario(replace(PUBLIC, rate=30.0), workers=1, batching="static")
    _, cluster = run(scenario, HARDWARE, 1)
    starts = sorted({job.started for job in cluster.jobs})
    for start in starts:
        batch = [job for job in cluster.jobs if job.started == start]
        assert len(batch) <= 8
        assert len({job.ended for job in batch}) == 1
        assert not any(start < other_start < batch[0].ended for other_start in starts)


def test_rows_that_compute_their_text_share_a_step_that_others_spend_loading(monkeypatch):
    """FlashPS's rows do. Of others each block reads its entry, and with one for each step a link
    takes as long for every further row.
    """
    monkeypatch.setattr(bars, "EDITS", 400)
    monkeypatch.setattr(bars, "SEEDS", (1,))
    gained = [
        bars.batching((0.5,), (bars.SMALL_BATCHES_IDLE,), text)[0]["over"]["static"]
        for text in ("computed", "frozen")
    ]
    assert gained[0] > 1.5 * gained[1] > 0


def test_mask_aware_is_under_round_robin_where_masks_differ():
    scenario = at_load(Scenario(Workload(400, 1.0), workers=4), HARDWARE, 0.9)
    mask_aware, round_robin = (
        simulate(replace(scenario, policy=p), HARDWARE, 1) for p in ("mask_aware", "round_robin")
    )
    assert mask_aware.p95 < 0.75 * round_robin.p95


def test_many_workers():
    scenario = at_load(Scenario(Workload(300, 1.0), workers=256), HARDWARE, 0.3)
    result = simulate(scenario, HARDWARE, 1)
    assert result.done == result.measured
    assert result.good_share == 1.0


def test_control_costs_its_steps_and_a_policy_may_know_of_it() -> None:
    """Counted: a net beside each row adds what `control_seconds` says to a batch of one."""
    plain = Workload(40, 1e-3, "production")
    with_nets = replace(plain, controlled=1.0)
    plain_requests, controlled_requests = (
        draw(item, HARDWARE.tokens, 3) for item in (plain, with_nets)
    )
    assert [replace(item, controlled=False) for item in controlled_requests] == plain_requests
    assert all(item.controlled for item in controlled_requests)
    seconds = []
    for priced in (True, False):
        cluster = Cluster(Scenario(with_nets, workers=1, controls_priced=priced), HARDWARE)
        cluster.run(controlled_requests)
        for job in cluster.jobs:
            cached = job.row.tokens < HARDWARE.tokens
            step_s = (
                HARDWARE.step_seconds(1, job.row.tokens, 0)
                if cached
                else (HARDWARE.step_seconds(0, 0, 1))
            )
            net = HARDWARE.control_seconds(job.row.tokens, cached=cached)
            denoise_s = job.denoised - job.started
            assert denoise_s == pytest.approx(job.request.steps * (step_s + net))
            # The estimate knows no plan; what the net adds it knows.
            assert (job.predicted > 0.9 * denoise_s) == priced or net < 0.1 * step_s
        seconds.append(sum(job.predicted for job in cluster.jobs))
    assert seconds[0] > 1.2 * seconds[1]


def test_a_lora_is_waited_for_once_and_the_policy_may_know_where_it_is() -> None:
    plain = Workload(60, 1e-3, "production")
    with_loras = replace(plain, with_lora=1.0, loras=2)
    plain_requests, lora_requests = (draw(item, HARDWARE.tokens, 3) for item in (plain, with_loras))
    assert [replace(item, loras=()) for item in lora_requests] == plain_requests
    cluster = Cluster(Scenario(with_loras, workers=1, loras=LoraTiers(slots=2)), HARDWARE)
    cluster.run(lora_requests)
    load = LORAS.estimates["storage"].seconds(NBYTES)
    loaded_loras = set()
    for job in cluster.jobs:
        first = job.request.loras not in loaded_loras
        loaded_loras.add(job.request.loras)
        assert job.started - job.sent == pytest.approx(load if first else 0.0)
        assert job.predicted == pytest.approx(job.denoised - job.sent, rel=0.1)
        cached = job.row.tokens < HARDWARE.tokens
        step_s = HARDWARE.step_seconds(*((1, job.row.tokens, 0) if cached else (0, 0, 1)))
        added = HARDWARE.lora_seconds(NBYTES, job.row.tokens, cached=cached)
        assert 0.003 * step_s < added < 0.01 * step_s
        denoise_s = job.denoised - job.started
        assert denoise_s == pytest.approx(job.request.steps * (step_s + added))
    [worker] = cluster.workers.values()
    assert worker.loras is not None
    assert worker.loras.loads == {"host": 0, "storage": 2}


def test_a_policy_that_knows_where_loras_are_has_fewer_loaded() -> None:
    workload = Workload(300, 1.0, "production", with_lora=0.95)
    loads = {
        knows_loras: simulate(
            at_load(Scenario(workload, loras=LoraTiers(slots=6, known=knows_loras)), HARDWARE, 0.6),
            HARDWARE,
            5,
        ).lora_loads
        for knows_loras in (True, False)
    }
    assert 0 < loads[True] < 0.7 * loads[False]


def test_an_edit_is_refused_where_its_lora_has_no_room_beside_those_of_edits_under_way() -> None:
    workload = Workload(50, 1e3, "production", with_lora=1.0)
    result, cluster = run(Scenario(workload, workers=1, loras=LoraTiers(slots=1)), HARDWARE, 2)
    assert min(result.refused, result.done) > 0
    admitted_loras = {job.request.loras for job in cluster.jobs}
    assert len(admitted_loras) < len(
        {request.loras for request in cluster.refused} | admitted_loras
    )
