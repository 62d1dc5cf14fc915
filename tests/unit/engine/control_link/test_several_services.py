"""ControlNets of a row in several services: the bytes of one service and of none, whichever service
answers first, and replicas where rows wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import ConfigError
from maskserve_common.config_file import config_of as configuration
from maskserve_common.errors import EngineFailed, Overloaded
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link import served as served_rows
from maskserve_engine.control_link import services as control_services
from maskserve_engine.control_link.served import LinkRow
from maskserve_engine.control_link.services import (
    ControlService,
    ControlServices,
    assigned,
    missing_replicas,
    summed_runs,
)
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.control_nets import random_net, random_unet_net
from tests.fakes.jobs import config_of, encode_case, random_case, unet_case
from tests.support.control_service import DirectCalls, Service
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng
from tests.support.eventually import eventually

pytestmark = pytest.mark.spread("model", sort=is_unet)

NAMES = ("a", "b", "c")
MIX: tuple[tuple[str, ...], ...] = (("a", "b", "c"), ("c", "a"), ("b", "a", "a"), ("c", "b", "a"))
"""The first row uses all services: none is idle, so no replica changes what is packed together."""


# Decisions


def test_each_net_runs_where_the_fewest_nets_are_open() -> None:
    rng = fresh_rng()
    for _ in range(200):
        count = int(rng.integers(1, 5))
        nets_of = [{n for n in NAMES if rng.random() < 0.6} for _ in range(count)]
        nets_of[int(rng.integers(count))] |= set(NAMES)
        open_nets = [int(n) for n in rng.integers(0, 4, count)]
        nets = [str(n) for n in rng.choice(NAMES, int(rng.integers(1, 5)))]
        services = assigned(nets, nets_of, open_nets)
        counts = list(open_nets)
        for number, (net, service) in enumerate(zip(nets, services, strict=True)):
            assert net in nets_of[service]
            if net in nets[:number]:
                assert service == services[nets.index(net)]
            else:
                holders = [n for n in range(count) if net in nets_of[n]]
                assert (counts[service], service) == min((counts[n], n) for n in holders)
            counts[service] += 1
        idle = {number for number, open_count in enumerate(counts) if not open_count}
        replicas = missing_replicas(nets, services, nets_of, counts)
        assert len({replica.service for replica in replicas}) == len(replicas)
        for replica in replicas:
            assert replica.service in idle
            assert replica.net in nets
            assert replica.net not in nets_of[replica.service]
            assert counts[services[nets.index(replica.net)]] > 1


def test_only_leading_nets_of_one_service_are_summed_there() -> None:
    rng = fresh_rng()
    for _ in range(100):
        services = [int(n) for n in rng.integers(0, 3, int(rng.integers(1, 6)))]
        runs = summed_runs(services)
        assert [n for run in runs for n in run] == list(range(len(services)))
        first, *further = runs
        assert {services[n] for n in first} == {services[0]}
        assert all(len(run) == 1 for run in further)
        assert not further or services[further[0].start] != services[0]


# Rows


class Model:
    """A base in this process, and the same ControlNets beside it and in three services."""

    def __init__(self, model: Path, folder: Path) -> None:
        config = config_of(model)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.flux = self.adapter.spec.family == "flux"
        nets: dict[str, Any] = {}
        for number, name in enumerate(NAMES):
            base: Any = self.adapter
            nets[name] = (
                random_net(number, 1, 1 + number % 2)
                if self.flux
                else random_unet_net(base.model, number)
            )
        self.services = [Service(model, folder / str(number), nets) for number in range(3)]
        self.versions, self.contents = self.services[0].versions, self.services[0].contents
        self.replay = Replay(self.adapter)
        self.nets = {
            self.versions[name]: self.adapter.control_net(
                type(net).from_pretrained(folder / "0" / "nets" / name).eval()
            )
            for name, net in nets.items()
        }

    def denoiser(
        self, services: Sequence[Service], names: Sequence[str] = NAMES
    ) -> ControlServices:
        """Sessions with these services, which hold the ControlNets between them."""
        device = torch.device("cpu")
        pool = ControlServices.of(
            *(
                ControlService(
                    DirectCalls(service.front, service.triton),
                    device,
                    "float32",
                    10.0,
                    address=f"host-{number}:8001",
                )
                for number, service in enumerate(services)
            )
        )
        for name in names:
            pool.load(name, self.versions[name], self.contents[name], 60.0)
        return pool

    def jobs(self, rng: np.random.Generator, mix: Sequence[Sequence[str]]) -> list[EditJob]:
        """Jobs of one size with these ControlNets, and with unequal steps and scales."""
        first = (random_case if self.flux else unet_case)(rng)
        mask = first.mask.copy()
        mask[8:24, 8:24] = 255
        guidance = {} if self.flux else {"guidance_scale": float(rng.choice([1.0, 7.5]))}
        jobs = []
        for number, names in enumerate(mix):
            make, count = random_case if self.flux else unet_case, int(rng.integers(4, 7))
            case = make(rng, num_inference_steps=count, strength=1.0, **guidance)
            case = replace(case, pixels=first.pixels, mask=mask)
            controls = []
            for name in names:
                picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
                moments = self.encoder.encode(picture, mask, "").moments if self.flux else None
                scale, end = float(rng.uniform(0.3, 1.2)), float(rng.choice([1.0, 0.7]))
                version = self.versions[name]
                controls.append(ControlInput(version, picture, scale, 0.0, end, moments=moments))
            job = encode_case(self.encoder, case, str(number))
            jobs.append(self.adapter.prepare(replace(job, controls=tuple(controls))))
        return jobs

    def rows(
        self, jobs: Sequence[EditJob], services: ControlServices | None, adapters: Any = "exact"
    ) -> list[Any]:
        rows: list[Any] = []
        for job in jobs:
            rows.append(self.adapter.dense_row(job))
            if services is None:
                self.adapter.control(rows[-1], job, self.nets)
                continue
            opening = self.adapter.opening(rows[-1], job)
            assert opening is not None
            self.adapter.serve_control(rows[-1], services.open(opening, adapters))
        return rows

    def run(self, rows: Sequence[Any], *, together: bool = True) -> list[bytes]:
        """Latents of the rows at their ends."""
        for group in [list(rows)] if together else [[row] for row in rows]:
            while running := [row for row in group if row.step < row.steps]:
                self.replay.step(running, ("kv",) * self.adapter.blocks)
        return [row.result().array().tobytes() for row in rows]


@pytest.fixture(scope="module", params=["fill", "inpaint", "sd-base", "sdxl-base"])
def model(
    request: pytest.FixtureRequest,
    tiny_fill: Path,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    folder = {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}[request.param]
    shared_model = Model(folder, tmp_path_factory.mktemp("services"))
    yield shared_model
    for service in shared_model.services:
        service.close()


def last_first() -> Callable[[Any, Any], Tensor | None]:
    """A rival: the sum of residuals as a reader of the last service first would add them."""
    sum_of = served_rows._Sum.of
    return lambda self, residuals: sum_of(self, list(residuals)[::-1])


@pytest.mark.parametrize("together", [True, False])
def test_bytes_are_those_of_one_service_and_of_none(
    model: Model, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = fresh_rng()
    drawn = [tuple(map(str, rng.choice(NAMES, int(rng.integers(1, 4))))) for _ in range(3)]
    jobs = model.jobs(rng, [*MIX, *drawn])
    local = model.run(model.rows(jobs, None), together=together)
    for count in (1, 2, 3):
        services = model.denoiser(model.services[:count])
        rows = model.rows(jobs, services)
        assert model.run(rows, together=together) == local, count
        services.close()
    services = model.denoiser(model.services)
    rows = model.rows(jobs[:1], services)
    control = (rows[0].residuals if model.flux else rows[0].control).served
    assert len({row.link for row in control.link_rows}) == 3
    monkeypatch.setattr(served_rows._Sum, "of", last_first())
    alone = model.run(model.rows(jobs[:1], None))
    assert model.run(rows) != alone, "the order of the sum does not show"
    services.close()


def test_residuals_of_one_step_ahead_are_those_of_one_service(model: Model) -> None:
    jobs = model.jobs(fresh_rng(), MIX[:2])
    by_count = []
    for count in (1, 3):
        services = model.denoiser(model.services[:count])
        by_count.append(model.run(model.rows(jobs, services, "fast"), together=False))
        services.close()
    assert by_count[0] == by_count[1]


# Replicas, losses and refusals


@pytest.fixture
def flux(tiny_inpaint: Path, tmp_path: Path) -> Iterator[Model]:
    flux_model = Model(tiny_inpaint, tmp_path)
    yield flux_model
    for service in flux_model.services:
        service.close()


def link_rows(row: Any) -> tuple[LinkRow, ...]:
    rows: tuple[LinkRow, ...] = row.residuals.served.link_rows
    return rows


def test_a_net_with_waiting_rows_gets_a_replica_and_later_rows_use_it(flux: Model) -> None:
    jobs = flux.jobs(fresh_rng(), [("a",)] * 5)
    services = flux.denoiser(flux.services, ["a"])
    version, local = flux.versions["a"], flux.run(flux.rows(jobs, None), together=False)
    assert [version in service.nets for service in services.services] == [True, False, False]
    rows = flux.rows(jobs[:2], services)
    eventually("a replica is loaded", lambda: version in services.services[1].nets)
    assert version not in services.services[2].nets
    rows += flux.rows(jobs[2:4], services)
    eventually("an idle service loads one, too", lambda: version in services.services[2].nets)
    rows += flux.rows(jobs[4:], services)
    links = [service._link for service in services.services]
    assert [links.index(link_rows(row)[0].link) for row in rows] == [0, 0, 1, 1, 2]
    assert flux.run(rows, together=False) == local
    services.drop(version)
    assert not services.holds(version)
    services.close()


def test_rows_without_the_lost_service_go_on_and_new_ones_use_those_left(flux: Model) -> None:
    rng = fresh_rng()
    jobs = flux.jobs(rng, [("a",), ("b",), ("c",), ("a", "b", "c")])
    local = flux.run(flux.rows(jobs, None), together=False)
    services = flux.denoiser(flux.services)
    rows, lost = flux.rows(jobs, services), int(rng.integers(3))
    flux.services[lost].front.close()
    for number in range(4):
        if number in (lost, 3):
            with pytest.raises(EngineFailed, match=f"was lost .*host-{lost}:8001"):
                flux.run([rows[number]])
        else:
            assert flux.run([rows[number]]) == [local[number]]
    states = ["loading" if number == lost else "ready" for number in range(3)]
    assert [status.state for status in services.statuses()] == states
    net = NAMES[lost]
    assert not services.holds(flux.versions[net])
    with pytest.raises(EngineFailed, match=rf"no service holds {net}"):
        flux.rows([jobs[lost]], services)
    assert services.services[(lost + 1) % 3].open_nets == 2, "rows that failed are not closed yet"
    services.load(net, flux.versions[net], flux.contents[net], 60.0)
    assert not services.services[lost].is_resting, "the lost one is asked to load before the others"
    assert flux.run(flux.rows(jobs, services), together=False) == local
    services.close()


def test_another_version_is_refused_by_address_and_the_others_go_on(flux: Model) -> None:
    """So is a net whose service does not answer."""
    folder = Path(flux.services[0].config.controls.folder) / "a" / "config.json"
    folder.write_text(folder.read_text() + "\n")
    services = flux.denoiser(flux.services)
    version = flux.versions["a"]
    assert [version in service.nets for service in services.services] == [False, True, False]
    services.close()
    alone = flux.denoiser(flux.services[:1], [])
    with pytest.raises(EngineFailed) as refused:
        alone.load("a", version, flux.contents["a"], 60.0)
    assert "another version of ControlNet a " in str(refused.value)
    assert "[controls] service host-0:8001" in str(refused.value)
    alone.close()


def test_an_address_that_does_not_answer_is_named(flux: Model) -> None:
    class Unreachable(DirectCalls):
        def call(self, op: dict[str, Any], arrays: bytes, limit_s: float) -> dict[str, Any]:
            raise Overloaded("the ControlNet service does not answer; try again later")

    first = flux.services[0]
    calls = Unreachable(first.front, first.triton)
    services = ControlServices.of(
        ControlService(calls, torch.device("cpu"), "float32", 1.0, address="host-9:8001")
    )
    with pytest.raises(Overloaded, match=r"does not answer.*\[controls\] service host-9:8001"):
        services.load("a", flux.versions["a"], flux.contents["a"], 60.0)
    [service] = services.services
    assert service.is_resting, "a service that has just failed would be asked for replicas"


def test_services_of_a_name_are_followed(flux: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one takes replicas, and one that is gone keeps its rows to their ends."""
    addresses_now = ["10.0.0.1:8001"]
    monkeypatch.setattr(control_services, "resolved", lambda addresses, known: tuple(addresses_now))
    monkeypatch.setattr(control_services, "_RESOLVE_EVERY_S", 0.0)
    by_address = dict(zip((f"10.0.0.{n}:8001" for n in (1, 2, 3)), flux.services, strict=True))

    def service_at(address: str) -> ControlService:
        calls = DirectCalls(by_address[address].front, by_address[address].triton)
        return ControlService(calls, torch.device("cpu"), "float32", 10.0, address=address)

    services = ControlServices(["dns:controls:8001"], service_at)
    version = flux.versions["a"]
    services.load("a", version, flux.contents["a"], 60.0)
    jobs = flux.jobs(fresh_rng(), [("a",)] * 4)
    local = flux.run(flux.rows(jobs, None), together=False)
    rows = flux.rows(jobs[:1], services)
    addresses_now[:] = ["10.0.0.2:8001"]
    rows += flux.rows(jobs[1:2], services)
    eventually("the new one is addresses_now", lambda: len(services.services) == 2)
    rows += flux.rows(jobs[2:3], services)
    eventually("it takes a replica", lambda: version in services.services[0].nets)
    rows += flux.rows(jobs[3:], services)
    first, second = (service._link for service in services.services[::-1])
    assert [link_rows(row)[0].link for row in rows] == [first, first, first, second]
    assert flux.run(rows, together=False) == local
    services.drop(version)
    services.load("b", flux.versions["b"], flux.contents["b"], 60.0)
    [left] = services.services
    assert left.address == "10.0.0.2:8001"
    services.close()


@pytest.mark.parametrize(
    ("controls", "problem"),
    [
        ({"service": "a:1, b:2 ,a:1"}, "a:1 is listed twice"),
        ({"service": "a:1,b:2", "unequal_depths": "shallowest"}, "unequal_depths"),
        ({"service": "dns:a:1", "unequal_depths": "shallowest"}, "unequal_depths"),
    ],
)
def test_addresses_that_do_not_go_together_are_refused(
    controls: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        _ = configuration({"controls": controls}).controls.addresses


def test_one_address_or_several_with_commas() -> None:
    for service, addresses in (("", ()), ("a:1", ("a:1",)), ("a:1, b:2", ("a:1", "b:2"))):
        assert configuration({"controls": {"service": service}}).controls.addresses == addresses
