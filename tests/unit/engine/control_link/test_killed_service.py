"""One of three ControlNet services, each a process, is killed while edits run."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link.services import ControlService, ControlServices
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.requests.executor import PlainRowSpec, StepInput, StepResult
from maskserve_engine.spec.control_nets import ControlNets, content_of
from maskserve_studies.adapters.service_process import PipeCalls, service_process
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

NAMES = ("a", "b", "c")
MIX = (("a", "b", "c"), ("a",), ("b",), ("c",), ("c", "b"))


class Site:
    """A base in this process, and three processes that serve its ControlNets."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        for number, name in enumerate(NAMES):
            random_net(number, 1, 1).save_pretrained(folder / name)
        self.config = config_of(model, controls={"folder": str(folder)})
        self.encoder, self.adapter = load_encoder(self.config), load_adapter(self.config)
        control_nets = ControlNets(self.config, load_spec(str(model)))
        self.nets = {name: control_nets.find(name, "x") for name in NAMES}
        self.local = {
            self.nets[name].version: self.adapter.control_net(
                type(random_net(0, 1, 1)).from_pretrained(folder / name).eval()
            )
            for name in NAMES
        }
        served = structs.replace(self.config, runtime_dir="")
        self.calls = [stack.enter_context(service_process(None, config=served)) for _ in range(3)]

    def denoiser(self) -> ControlServices:
        device = torch.device("cpu")
        services = ControlServices.of(
            *(
                ControlService(_Kept(calls), device, "float32", 20.0, address=f"host-{number}:1")
                for number, calls in enumerate(self.calls)
            )
        )
        for name in NAMES:
            self.load(services, name)
        return services

    def load(self, services: ControlServices, name: str) -> None:
        net = self.nets[name]
        services.load(name, net.version, content_of(net.path), 60.0)

    def jobs(self, rng: np.random.Generator) -> list[EditJob]:
        jobs = []
        for number, names in enumerate(MIX):
            steps = int(rng.integers(3, 7))
            case = random_case(rng, num_inference_steps=steps, strength=1.0)
            controls = []
            for name in names:
                picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
                moments = self.encoder.encode(picture, case.mask, "").moments
                scale, version = float(rng.uniform(0.3, 1.2)), self.nets[name].version
                controls.append(ControlInput(version, picture, scale, moments=moments))
            jobs.append(
                replace(encode_case(self.encoder, case, str(number)), controls=tuple(controls))
            )
        return jobs

    def alone(self, job: EditJob) -> bytes:
        """Latents of an edit whose ControlNets run beside the base."""
        row: Any = self.adapter.dense_row(self.adapter.prepare(job))
        self.adapter.control(row, self.adapter.prepare(job), self.local)
        while row.step < row.steps:
            self.adapter.step([row], None)
        latents: bytes = row.result().array().tobytes()
        return latents


class _Kept:
    """Calls that outlive a denoiser: the process is the site's."""

    def __init__(self, calls: PipeCalls) -> None:
        self.call = calls.call

    def close(self) -> None:
        """Close nothing."""


@pytest.fixture(scope="module")
def site(tiny_inpaint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tiny_inpaint, tmp_path_factory.mktemp("nets"), stack)


def step(executor: LocalExecutor, row: str) -> StepResult:
    step_results: list[StepResult] = []
    executor.step(StepInput(1, (row,)), step_results.append)
    return step_results[0]


def test_edits_that_use_the_killed_one_end_and_the_others_keep_their_bytes(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """New edits use those that are left, and nothing of the ended ones stays."""
    caplog.set_level(60, "maskserve_engine.loop.local_executor")  # its records hold rows
    rng = fresh_rng()
    jobs = site.jobs(rng)
    expected = [site.alone(job) for job in jobs]
    before = open_files()
    edit_and_kill(site, jobs, expected, rng)
    gc.collect()  # errors and rows refer to each other
    eventually("nothing is open", lambda: not open_files() - before)


def open_files() -> Counter[str]:
    """Count the sockets and slots that this process has open, by kind."""
    kinds = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(("socket:", "/dev/shm")):
                kinds[target.partition(":")[0]] += 1
    return kinds


def edit_and_kill(
    site: Site, jobs: list[EditJob], expected: list[bytes], rng: np.random.Generator
) -> None:
    services = site.denoiser()
    executor = LocalExecutor(site.adapter, None, services)
    names = [str(number) for number in range(len(jobs))]
    for name, job in zip(names, jobs, strict=True):
        executor.make(name, PlainRowSpec(site.adapter.prepare(job)))
    victim, at = int(rng.integers(3)), int(rng.integers(0, 3 * len(jobs)))
    lost = {
        name
        for name in names
        if any(row.link is services.services[victim]._link for row in _links(executor, name))
    }
    assert lost, "each service has edits"
    turn, failed, done = 0, dict[str, EngineFailed](), dict[str, bytes]()
    while len(failed) + len(done) < len(names):
        for name in names:
            if name in failed or name in done:
                continue
            if turn == at:
                os.kill(site.calls[victim].pid, signal.SIGKILL)
            turn += 1
            failed |= step(executor, name).failed
            if name not in failed and executor.is_done(name):
                done[name] = executor.result(name).array().tobytes()
    assert failed.keys() == lost - done.keys()
    assert set(done) >= set(names) - lost
    assert all("ControlNet service was lost" in str(error) for error in failed.values())
    assert all(f"host-{victim}:1" in str(error) for error in failed.values())
    assert all(done[name] == expected[int(name)] for name in done)
    for name in names:
        executor.release(name)
    for name in NAMES:
        if not services.holds(site.nets[name].version):
            site.load(services, name)
    for name, job in zip(names, jobs, strict=True):
        executor.make(name, PlainRowSpec(site.adapter.prepare(job)))
        while not executor.is_done(name):
            assert not step(executor, name).failed
        assert executor.result(name).array().tobytes() == expected[int(name)]
        executor.release(name)
    left = [calls for number, calls in enumerate(site.calls) if number != victim]
    folders = [service._link.messages._folder for service in services.services if service._link]  # type: ignore[attr-defined]
    for calls in left:
        eventually("its rows are gone", lambda calls=calls: counts(calls)["rows"] == 0)
    executor.idle()  # the last batch holds its rows
    executor.close()
    for calls in left:
        eventually("its session is over", lambda calls=calls: counts(calls)["sessions"] == 0)
    for number, folder in enumerate(folders):
        slots = [path for path in folder.iterdir() if not path.is_socket()]
        assert number == victim or not slots


def counts(calls: PipeCalls) -> dict[str, Any]:
    return calls.call({"op": "health"}, b"", 10.0)


def _links(executor: LocalExecutor, row: str) -> Any:
    served = executor.rows[row].served
    assert served is not None
    return served.link_rows
