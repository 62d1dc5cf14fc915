"""Rows whose ControlNets a service runs equal those whose nets run beside the base, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.control_nets import (
    PICTURE_ONLY,
    random_net,
    random_sd3_net,
    random_unet_net,
    random_z_image_net,
)
from tests.fakes.jobs import config_of, encode_case, random_case, unet_case
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.fakes.tiny_z_image import build_tiny_z_image
from tests.support import refresh_rows
from tests.support.cached_rows import Primed, cached
from tests.support.control_service import Service
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("model", sort=is_unet)

MIX: tuple[tuple[str, ...], ...] = ((), ("one",), ("two", "one"), ("one", "one"), ())


class Model:
    """A base in this process, and the same ControlNets beside it and in a service."""

    def __init__(self, model: Path, folder: Path, nets: dict[str, Any] | None) -> None:
        config = config_of(model, cache={"own_anchors": 0.35})
        self.config, self.encoder, self.adapter = config, load_encoder(config), load_adapter(config)
        if nets is None:
            base = self.adapter.model  # type: ignore[attr-defined]
            nets = {"one": random_unet_net(base, 1), "two": random_unet_net(base, 2)}
        self.flux = self.adapter.spec.family != "unet"
        self.service = Service(model, folder, nets)
        self.replay = Replay(self.adapter)
        # Read from the folder, too: how weights lie in memory decides how CPUs round.
        self.nets = {
            self.service.versions[name]: self.adapter.control_net(
                type(net).from_pretrained(folder / "nets" / name).eval()
            )
            for name, net in nets.items()
        }

    def jobs(self, rng: np.random.Generator, steps: int | None = None) -> list[EditJob]:
        """Jobs of one size, with and without control; None: a few steps each, not all as many."""
        first = (random_case if self.flux else unet_case)(rng)
        mask = first.mask.copy()
        mask[8:24, 8:24] = 255
        guided = self.adapter.spec.guidance == "cfg"
        scale = float(rng.choice([1.0, 7.5])) if guided else None
        guidance: dict[str, Any] = {} if scale is None else {"guidance_scale": scale}
        if self.flux and scale == 7.5:
            guidance["negative_prompt"] = "x"
        jobs = []
        for number, names in enumerate(MIX):
            count = int(rng.integers(4, 7)) if steps is None else steps
            make = random_case if self.flux else unet_case
            case = make(rng, num_inference_steps=count, strength=1.0, **guidance)
            case = replace(case, pixels=first.pixels, mask=mask)
            controls = []
            for name in names:
                picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
                moments = self.encoder.encode(picture, mask, "").moments if self.flux else None
                scale, end = float(rng.uniform(0.3, 1.2)), float(rng.choice([1.0, 0.7]))
                controls.append(
                    ControlInput(
                        self.service.versions[name], picture, scale, 0.0, end, moments=moments
                    )
                )
            job = encode_case(self.encoder, case, str(number))
            jobs.append(replace(job, controls=tuple(controls)))
        return jobs

    def rows(
        self, jobs: Sequence[EditJob], service: ControlServices | None, primed: Primed | None
    ) -> list[Any]:
        """Rows of the jobs, every other one cached where there are entries."""
        rows = []
        for number, job in enumerate(jobs):
            ready = self.adapter.prepare(job)
            row: Any = (
                self.adapter.dense_row(ready)
                if primed is None or number % 2 == 0
                else cached(self.replay, ready, primed)
            )
            if service is None:
                self.adapter.control(row, ready, self.nets)
            elif (opening := self.adapter.opening(row, ready)) is not None:
                self.adapter.serve_control(row, service.open(opening))
            rows.append(row)
        return rows

    def run(self, rows: Sequence[Any]) -> dict[str, NDArray[np.float32]]:
        """To their ends; the last two join late."""
        results: dict[str, NDArray[np.float32]] = {}
        running, late = list(rows[:3]), list(rows[3:])
        while running:
            self.replay.step(running, ("kv",) * self.adapter.blocks)
            results |= {r.request_id: r.result().array() for r in running if r.step == r.steps}
            running, late = [r for r in running if r.step < r.steps] + late, []
        return results


@pytest.fixture(
    scope="module", params=["fill", "inpaint", "sd3", "z-image", "sd-base", "sdxl-base"]
)
def model(
    request: pytest.FixtureRequest,
    tiny_fill: Path,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    folders = {"fill": tiny_fill, "inpaint": tiny_inpaint, **tiny_unets}
    nets: dict[str, Any] | None = None
    if request.param == "sd3":  # the service reads the base's positions for a net that lacks them
        folders["sd3"] = build_tiny_sd3(tmp_path_factory.mktemp("sd3") / "model")
        nets = {"one": random_sd3_net(1, 2), "two": random_sd3_net(2, 2, **PICTURE_ONLY)}
    elif request.param == "z-image":  # the service reads the base's blocks of the picture
        folders["z-image"] = build_tiny_z_image(tmp_path_factory.mktemp("z-image") / "model")
        refines = {
            "add_control_noise_refiner": "control_layers", "control_refiner_layers_places": (0,),
        }  # fmt: skip
        nets = {"one": random_z_image_net(1), "two": random_z_image_net(2, **refines)}
    elif request.param in ("fill", "inpaint"):
        nets = {"one": random_net(1, 1, 1), "two": random_net(2, 1, 2, guidance_embeds=True)}
    shared_model = Model(folders[request.param], tmp_path_factory.mktemp("service"), nets)
    yield shared_model
    shared_model.service.close()


@pytest.mark.parametrize("entries", [False, True])
def test_a_mixed_batch_is_the_same_bytes_with_a_service(model: Model, entries: bool) -> None:
    rng = fresh_rng()
    jobs = model.jobs(rng)
    primed = Primed(model.adapter, model.encoder, jobs[0]) if entries else None
    result = model.run(model.rows(jobs, None, primed))
    service = model.service.denoiser()
    by_service = model.run(model.rows(jobs, service, primed))
    service.close()
    assert result.keys() == by_service.keys() == {str(n) for n in range(len(MIX))}
    for name, latents in result.items():
        assert np.array_equal(by_service[name], latents), name
    plain = model.run(model.rows([replace(job, controls=()) for job in jobs], None, primed))
    assert not np.array_equal(plain["1"], result["1"]), "the control changes nothing"


@pytest.mark.parametrize("fast", [False, True])
def test_rows_with_lookahead_are_the_same_bytes_with_a_service(model: Model, fast: bool) -> None:
    """With residuals of one step ahead the steps between differ; those of a lookahead are requested
    when they are needed, and the edit ends.
    """
    jobs = model.jobs(fresh_rng())
    text = model.adapter.spec.refresh.leaves_text
    plans = [refresh_rows.plan(0, 2, model.adapter.steps(job) - 1, text=text) for job in jobs]

    def run(service: ControlServices | None) -> list[Any]:
        rows: list[Any] = []
        for job, plan in zip(jobs, plans, strict=True):
            rows.append(model.adapter.refreshing_row(job, plan))
            if service is None:
                model.adapter.control(rows[-1], job, model.nets)
            elif (opening := model.adapter.opening(rows[-1], job)) is not None:
                served = service.open(opening, "fast" if fast else "exact")
                model.adapter.serve_control(rows[-1], served)
        refresh_rows.run(model.adapter, rows, plans)
        return [row.result().array() for row in rows]

    result, service = run(None), model.service.denoiser()
    by_service = run(service)
    service.close()
    for mine, other, job in zip(result, by_service, jobs, strict=True):
        assert np.isfinite(other).all()
        assert np.array_equal(mine, other) or (fast and job.controls)


def test_denoisers_share_a_service_and_none_sees_the_others_rows(model: Model) -> None:
    """Their steps alternate, so that a batch of one is interrupted by the other's."""
    rng = fresh_rng()
    sets = [model.jobs(rng)[:3] for _ in range(2)]
    expected = [model.run(model.rows(jobs, None, None)) for jobs in sets]
    services = [model.service.denoiser() for _ in sets]
    running = [
        model.rows(jobs, service, None) for jobs, service in zip(sets, services, strict=True)
    ]
    bases = [model.adapter, load_adapter(model.config)]
    results: list[dict[str, Any]] = [{}, {}]
    while any(running):
        for number, rows in enumerate(running):
            if rows:
                bases[number].step(rows, None)
            done = {r.request_id: r.result().array() for r in rows if r.step == r.steps}
            results[number] |= done
            running[number] = [r for r in rows if r.step < r.steps]
    for service in services:
        service.close()
    for mine, latents in zip(results, expected, strict=True):
        assert all(np.array_equal(mine[name], latents[name]) for name in latents)


@pytest.mark.parametrize("served", [False, True])
def test_rows_that_take_turns_are_the_same_bytes_as_alone(model: Model, served: bool) -> None:
    """Rows of reproducible edits share no step; between two of one row's come those of others."""
    jobs = model.jobs(fresh_rng(), steps=11)[1:4]
    service = model.service.denoiser() if served else None

    def rows() -> list[Any]:
        return model.rows(jobs, service, None)

    alone, turns = rows(), rows()
    for row in alone:
        while row.step < row.steps:
            model.replay.step([row], None)
    while any(row.step < row.steps for row in turns):
        for row in turns:
            if row.step < row.steps:
                model.replay.step([row], None)
    if service is not None:
        service.close()
    for one, other in zip(alone, turns, strict=True):
        assert np.array_equal(one.result().array(), other.result().array()), one.request_id
