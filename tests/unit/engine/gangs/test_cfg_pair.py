"""A worker of two devices that deal each step's passes: its edits equal those of one device, and
outlive the process that computes one of them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel
from msgspec import structs

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.request import ResolvedControl
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.gangs.executor import GangExecutor
from maskserve_engine.loop.engine import Engine
from maskserve_engine.planning.refresh_steps import lookahead_steps_of, refresh_steps
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.start.assembly import load_engine
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance, unet_case
from tests.support.eventually import eventually
from tests.support.sink import Sink


class Site:
    """The same model on one device and on two."""

    def __init__(self, folder: Path, nets: Path) -> None:
        config = config_of(folder, controls={"folder": str(nets)})
        self.encoder: Encoder = load_encoder(config)
        save_net(config, nets / "shape")
        self.net = ControlNets(config, self.encoder.spec).find("shape", "controls")
        self.one, self.two = (self._started(folder, nets, devices) for devices in (1, 2))

    def _started(self, folder: Path, nets: Path, devices: int) -> Engine:
        config = config_for(folder, devices)
        controls = structs.replace(config.controls, folder=str(nets))
        engine = load_engine(structs.replace(config, controls=controls))
        engine.cache.prompt = lambda: self.encoder.encode_prompt("")
        engine.start()
        return engine

    @property
    def ranks(self) -> GangExecutor:
        assert isinstance(self.two.executor, GangExecutor)
        return self.two.executor

    def job(self, name: str, seed: int, *, two: bool, **options: Any) -> EditJob:
        rng = np.random.default_rng(seed)
        options = {"strength": 1.0, "num_inference_steps": 5, **options}
        if self.encoder.spec.family == "unet":
            case = unet_case(rng, guidance_scale=7.5 if two else 1.0, **options)
        else:
            case = random_case(rng, **(guided(rng) if two else {}), **options)
        mask = np.zeros((48, 40), np.uint8)
        mask[8:24, 8:24] = 255
        pixels = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
        return encode_case(self.encoder, replace(case, pixels=pixels, mask=mask), name)

    def controlled(self, job: EditJob, start: float) -> EditJob:
        """With a ControlNet from a share of its steps on."""
        options: dict[str, Any] = {"scale": 0.8, "start": start}
        picture = np.random.default_rng(3).integers(0, 256, (48, 40, 3), dtype=np.uint8)
        version = self.net.version
        return replace(
            job,
            request=replace(
                job.request, controls=(ResolvedControl(name="shape", version=version, **options),)
            ),
            controls=(ControlInput(version, picture, moments=job.moments, **options),),
        )

    def check(self, jobs: list[EditJob]) -> list[dict[str, Any]]:
        """They equal those of one device; META of the pair's."""
        expected = [sink.final() for sink in submitted(self.one, jobs)]
        finals = [sink.final() for sink in submitted(self.two, jobs)]
        for final, reference in zip(finals, expected, strict=True):
            maximum = np.abs(final.latents - reference.latents).max()
            assert maximum <= tolerance(reference.latents), final.meta
        return [final.meta for final in finals]

    def all_back(self) -> None:
        eventually("all ranks are back", lambda: not self.ranks.devices.lost, 60.0)


def config_for(folder: Path, devices: int) -> Config:
    policy = "cfg" if devices == 2 else "spread"
    return config_of(
        folder,
        model={"torch_threads": 1},
        engine={"devices": devices, "policy": policy, "warm_up": False},
        cache={
            "entry_format": "model",
            "stride": 1,
            "plan": "fixed",
            "budget_bytes": 2**28,
            "own_anchors": 0.25,
            "own_format": "model",
            "own_text": "computed",  # as beside templates where devices share steps
        },
    )


def save_net(config: Config, folder: Path) -> None:
    """A ControlNet of the model's size; nothing in it is zero."""
    base: Any = load_adapter(config).model  # type: ignore[attr-defined]
    if "transformer_blocks" in dict(base.named_children()):
        random_net(3, 1, 1).save_pretrained(folder)
        return
    # The tiny VAE shrinks 4 times, not 8: so does the part that reads pictures.
    net: Any = ControlNetModel.from_unet(base, conditioning_embedding_out_channels=(8, 8, 16))
    for name, weight in net.named_parameters():
        if name.startswith("controlnet"):
            torch.nn.init.normal_(weight, std=0.2)
    net.save_pretrained(folder)


def submitted(engine: Engine, jobs: list[EditJob]) -> list[Sink]:
    """All are taken in one turn of the engine: none is steps ahead of the others."""
    sinks, all_in = [Sink() for _ in jobs], threading.Event()
    engine.ask(partial(all_in.wait, 30))
    for job, sink in zip(jobs, sinks, strict=True):
        engine.submit(job, sink)
    all_in.set()
    return sinks


@pytest.fixture(scope="module", params=["unet", pytest.param("flux", marks=pytest.mark.slow)])
def site(
    request: pytest.FixtureRequest,
    tiny_unets: dict[str, Path],
    tiny_inpaint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    folder = tiny_unets["sd-base"] if request.param == "unet" else tiny_inpaint
    new_site = Site(folder, tmp_path_factory.mktemp("nets"))
    yield new_site
    for engine in (new_site.two, new_site.one):
        engine.close(5.0)
    new_site.two.manager.scheduler.check_integrity()
    assert len(new_site.two.manager.scheduler) == 0


def test_dense_edits_of_one_and_two_passes_equal_those_of_one_device(site: Site) -> None:
    site.check(
        [
            site.job(f"dense-{seed}", seed, two=seed % 3 != 0, num_inference_steps=3 + seed,
                     cache="off", reproducible=seed == 4)
            for seed in range(6)
        ]
    )  # fmt: skip


def test_cached_edits_beside_one_that_is_primed_equal_those_of_one_device(site: Site) -> None:
    jobs = [
        site.job(f"cached-{n}", 7, two=n % 2 == 0, cache="require" if n < 3 else "off")
        for n in range(4)
    ]
    assert [meta["cache"] for meta in site.check(jobs)[:3]] == ["hit"] * 3


def test_controlnets_act_from_the_same_step_on_in_both_passes(site: Site) -> None:
    plain = [site.job(f"shape-{n}", 11, two=n != 1, cache="off") for n in range(3)]
    jobs = [site.controlled(job, start) for job, start in zip(plain, (0.0, 0.0, 0.5), strict=True)]
    assert [len(meta["controls"]) for meta in site.check(jobs)] == [1, 1, 1]
    with_and_without = [site.job("shape-no", 11, two=True, cache="off"), jobs[0], jobs[2]]
    latents = [sink.final().latents for sink in submitted(site.two, with_and_without)]
    assert not any(np.allclose(a, b, atol=1e-3) for a, b in combinations(latents, 2))


def test_anchors_of_edits_own_are_those_of_one_device(site: Site) -> None:
    jobs = [
        site.job(f"own-{n}", 20 + n, two=n != 1, num_inference_steps=12 + 4 * n, cache="own")
        for n in range(3)
    ]
    for meta in site.check(jobs):
        assert len(meta["anchors"]) == refresh_count(meta["steps"], 0.25)


def test_a_rank_that_is_lost_between_anchors_makes_the_next_step_one(site: Site) -> None:
    """The rank that is left has the step cache of one pass; once both are there, so has each of
    them. The next step looks ahead to compute the rest.
    """
    site.all_back()
    options: dict[str, Any] = {"num_inference_steps": 80, "cache": "own", "progress": True}
    job, adapter = site.job("between", 21, two=True, **options), site.one.adapter
    [sink] = submitted(site.two, [job])
    eventually("it is between anchors", lambda: len(sink.events) > 2)
    site.ranks.ranks.processes[1].kill()
    meta = sink.final().meta
    spec, count = adapter.spec, refresh_count(meta["steps"], 0.25)
    sigmas = [sigma for sigma, _ in adapter.sigmas(job)]
    planned = lookahead_steps_of(
        refresh_steps(count, sigmas, spec.refresh.evenly_over, spec.refresh.growth)
    )
    assert planned < set(meta["anchors"])
    further = set(meta["anchors"]) - planned
    assert 1 <= len(further) <= 4, meta  # two where it is lost, two where it is back in time
    assert meta["dense_steps"] == len(meta["anchors"])
    site.all_back()
    site.two.cache.check_integrity()


# test_gang_executor.py loses a rank of the same executor; that a row goes on in another process as
# if it had stayed: tests/unit/engine/batch/test_cfg_parallel.py.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("device", [1, 0])
def test_edits_go_on_where_a_rank_is_lost(site: Site, number: signal.Signals, device: int) -> None:
    """From the step that it had come to; and with both, once it is back."""
    jobs = [
        site.job(f"lost-{seed}", seed, two=seed != 1, num_inference_steps=60, cache="off")
        for seed in range(3)
    ]
    site.all_back()
    expected = [sink.final() for sink in submitted(site.one, jobs)]
    counter = site.two.counters["steps_total"]
    sinks = submitted(site.two, jobs)
    eventually("some steps", lambda: site.two.counters["steps_total"] > counter + 5)
    os.kill(site.ranks.ranks.processes[device].pid, number)
    eventually("it is noticed", lambda: device in site.ranks.devices.lost)
    for sink, reference in zip(sinks, expected, strict=True):
        final = sink.final()
        assert np.abs(final.latents - reference.latents).max() <= tolerance(reference.latents)
    # No step was taken twice, but for the one that the rank was lost in.
    assert site.two.counters["steps_total"] - counter <= 60 + len(jobs) + 2
    site.all_back()
    site.check([site.job("after", 5, two=True, cache="off")])


def test_what_cannot_be_a_pair_is_refused_at_start(tiny_fill: Path, tiny_inpaint: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model with classifier-free guidance"):
        load_engine(config_for(tiny_fill, 2))
    config = config_for(tiny_inpaint, 2)
    four = structs.replace(config, engine=structs.replace(config.engine, devices=4))
    with pytest.raises(ConfigError, match="takes two devices, not 4"):
        load_engine(four)
