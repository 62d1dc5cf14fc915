"""`adapters: fast` beside a ControlNet service: rows equal diffusers' pipelines whose ControlNets
are late in the same way, and wait for nothing from the second step on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxControlNetInpaintPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
)
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.errors import EngineFailed
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link.reuse import Reuse, SentRequest
from maskserve_engine.control_link.services import ControlServices
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.latents import PackedLatents, extrapolated_latents
from tests.fakes.control_nets import random_net, random_unet_net
from tests.fakes.jobs import (
    Case,
    config_of,
    encode_case,
    random_case,
    tolerance,
    unet_case,
)
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_unet import samplers
from tests.support.cached_rows import Primed, cached
from tests.support.control_service import Service
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("model", sort=is_unet)


class Model:
    def __init__(self, folder: Path, run: Path) -> None:
        config = config_of(folder, model={"outside_noise": "edit"})
        self.folder, self.encoder, self.adapter = folder, load_encoder(config), load_adapter(config)
        self.unet = isinstance(self.adapter, UnetAdapter)
        adapter: Any = self.adapter
        self.nets = {
            "one": random_unet_net(adapter.model, 1) if self.unet else random_net(1, 1, 1),
            "two": random_unet_net(adapter.model, 2) if self.unet else random_net(2, 1, 2),
        }
        self.service = Service(folder, run, self.nets)
        self.replay = Replay(self.adapter)

    def case(self, rng: np.random.Generator, **options: Any) -> Case:
        guidance = {"guidance_scale": float(rng.choice([1.0, 5.0]))} if self.unet else {}
        make = unet_case if self.unet else random_case
        case = make(rng, strength=1.0, **{"num_inference_steps": 6, **guidance, **options})
        mask = case.mask.copy()
        mask[8:24, 8:24] = 255
        return replace(case, mask=mask)

    def job(self, rng: np.random.Generator, case: Case, name: str = "r", **options: Any) -> EditJob:
        """With the control `one`, or `net`."""
        picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
        moments = None if self.unet else self.encoder.encode(picture, case.mask, "").moments
        net = self.service.versions[options.pop("net", "one")]
        control = ControlInput(net, picture, moments=moments, **{"scale": 0.6, **options})
        job = replace(encode_case(self.encoder, case, name), controls=(control,))
        return self.adapter.prepare(job)

    def row(
        self, job: EditJob, service: ControlServices, adapters: Any, primed: Primed | None = None
    ) -> Any:
        row: Any = (
            self.adapter.dense_row(job) if primed is None else cached(self.replay, job, primed)
        )
        opening = self.adapter.opening(row, job)
        assert opening is not None
        served = service.open(opening, adapters)
        self.adapter.serve_control(row, served)
        row_of[id(row)] = row, served
        return row

    def run(self, rows: Sequence[Any], late: Sequence[Any] = ()) -> dict[str, NDArray[np.float32]]:
        """To their ends; some join behind the first step."""
        results, running, arrivals = {}, list(rows), list(late)
        while running:
            self.replay.step(running, ("kv",) * self.adapter.blocks)
            results |= {r.request_id: r.result().array() for r in running if r.step == r.steps}
            running, arrivals = [r for r in running if r.step < r.steps] + arrivals, []
        return results

    def oracle(self, case: Case, job: EditJob) -> NDArray[np.float32]:
        """[C, h, w] of diffusers' pipeline with a ControlNet that is late."""
        [control] = job.controls
        net = deepcopy(self.nets["one"])
        cls: Any = FluxControlNetInpaintPipeline
        options: dict[str, Any] = {}
        if self.unet:
            xl = (self.folder / "text_encoder_2").exists()
            cls = (
                StableDiffusionXLControlNetInpaintPipeline
                if xl
                else StableDiffusionControlNetInpaintPipeline
            )
            options = {} if xl else {"safety_checker": None}
        pipeline = cls.from_pretrained(self.folder, controlnet=net, **options)
        pipeline.set_progress_bar_config(disable=True)
        prepared: Any = job.prepared
        blend = prepared.inputs.start.blend
        scale = case.settings.guidance_scale if self.unet else 1.0
        late = Late(pipeline, None if blend is None else blend.mask, scale or 1.0)
        pipeline_args = {
            "control_image": Image.fromarray(control.picture),
            "controlnet_conditioning_scale": control.scale,
            "callback_on_step_end": late.step_ended,
        }
        if not self.unet:
            return diffusers_latents(pipeline, case, **pipeline_args)
        latents = diffusers_edit(
            pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            output_type="latent", **pipeline_args,
        )  # fmt: skip
        return np.asarray(latents[0].numpy())


row_of: dict[int, tuple[Any, Any]] = {}
"""Rows, held so that ids are theirs, and what the service has of each."""


class Late:
    """Has a pipeline's ControlNet say what it says of latents extrapolated by a copy of the
    pipeline's sampler, with the model's last answer.
    """

    def __init__(self, pipeline: Any, mask: Tensor | None, scale: float) -> None:
        self.pipeline, self.mask, self.scale = pipeline, mask, scale
        self.calls, self.answer = 0, torch.empty(0)
        self.last_output: Any = None
        self.latents = torch.empty(0)
        self.extrapolated: dict[int, tuple[Tensor, Any]] = {}
        model = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
        model.register_forward_hook(self._answered)
        pipeline.controlnet.register_forward_pre_hook(self._before_net, with_kwargs=True)
        pipeline.controlnet.register_forward_hook(self._after_net)

    def step_ended(
        self, pipeline: Any, i: int, t: Any, tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        self.latents = tensors["latents"]
        times = pipeline.scheduler.timesteps
        if i + 2 < len(times):
            sampler = deepcopy(pipeline.scheduler)
            moved = sampler.step(self.answer, times[i + 1], self.latents, return_dict=False)[0]
            self.extrapolated[i + 2] = moved, sampler
        return {}

    def _answered(self, model: Any, args: Any, output: Any) -> None:
        answer = output[0]
        if self.scale > 1:
            away, answer = answer.chunk(2)
            answer = away + self.scale * (answer - away)
        self.answer = answer

    def _before_net(self, net: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.calls < 2:
            return None
        moved, sampler = self.extrapolated[self.calls]
        if self.mask is not None:  # outside of it both follow the noised source
            moved = self.mask * moved + (1 - self.mask) * self.latents
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": moved}
        moved = sampler.scale_model_input(moved, sampler.timesteps[self.calls])
        return (torch.cat([moved] * len(args[0])), *args[1:]), kwargs

    def _after_net(self, net: Any, args: Any, output: Any) -> Any:
        before, self.last_output = self.last_output, output
        self.calls += 1
        return before if self.calls == 2 else output


@pytest.fixture(scope="module", params=["inpaint", "sd-base", "sdxl-fill"])
def model(
    request: pytest.FixtureRequest,
    tiny_inpaint: Path,
    tiny_unets: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    folder = {"inpaint": tiny_inpaint, **tiny_unets}[request.param]
    shared_model = Model(folder, tmp_path_factory.mktemp("service"))
    yield shared_model
    shared_model.service.close()
    row_of.clear()


@pytest.mark.each_value
def test_a_row_equals_the_pipeline_whose_net_is_as_late(model: Model) -> None:
    rng = fresh_rng()
    case = model.case(rng)
    job = model.job(rng, case)
    service = model.service.denoiser()
    result = model.run([model.row(job, service, "fast")])["r"]
    expected = model.oracle(case, job)
    assert np.abs(result - expected).max() <= tolerance(expected)
    exact = model.run([model.row(job, service, "exact")])["r"]
    assert np.abs(result - exact).max() > 2 * tolerance(expected), "nothing is late"
    service.close()


def test_rows_of_a_mixed_batch_are_as_alone(model: Model) -> None:
    """Fast and exact, dense and cached; one joins late, and two controls begin and end."""
    rng = fresh_rng()
    first = model.case(rng)
    service = model.service.denoiser()
    jobs = []
    ranges: tuple[dict[str, Any], ...] = (
        {}, {"end": 0.7}, {"start": 0.4, "net": "two"}, {}, {"net": "two"},
    )  # fmt: skip
    for number, options in enumerate(ranges):
        case = model.case(rng, num_inference_steps=int(rng.integers(4, 7)))
        case = replace(case, pixels=first.pixels, mask=first.mask)
        jobs.append(model.job(rng, case, str(number), **options))
    primed = Primed(model.adapter, model.encoder, jobs[0])
    ways = ("fast", "fast", "fast", "exact", "fast")

    def rows() -> list[Any]:
        triples = zip(jobs, ways, (None, primed, None, None, primed), strict=True)
        return [model.row(job, service, way, entries) for job, way, entries in triples]

    alone = [model.run([row])[row.request_id] for row in rows()]
    together = rows()
    result = model.run(together[:4], together[4:])
    for number, expected in enumerate(alone):
        assert np.abs(result[str(number)] - expected).max() <= tolerance(expected), number
    service.close()


def test_no_step_waits_behind_the_first_one(model: Model) -> None:
    """Where residuals come within a step."""
    rng = fresh_rng()
    service = model.service.denoiser()
    row = model.row(model.job(rng, model.case(rng)), service, "fast")
    served = row_of[id(row)][1]
    waits, stale = [], []
    while row.step < row.steps:
        model.adapter.step([row], None)
        waits.append(len(service.take_waits()))
        stale.append(served.stale)
        end = time.monotonic() + 10
        while not _all_there(served) and time.monotonic() < end:
            time.sleep(0.005)
    assert not any(waits[1:])
    assert stale == [False] + [True] * (row.steps - 1)
    service.close()


def _all_there(served: Any) -> bool:
    """Whether what was asked for the row has been answered."""
    [row] = served.link_rows
    link = row.link
    while link.messages.has_next():
        link._read(1.0)
    return all(link._answers[number].ended for number in row.reuse.numbers)


def test_what_an_ask_ahead_cannot_have_costs_the_row_alone(model: Model) -> None:
    """Its batch-mate asks anew, and is exact in that step."""
    rng = fresh_rng()
    first = model.case(rng)
    jobs = [
        model.job(rng, replace(model.case(rng), pixels=first.pixels, mask=first.mask), name)
        for name in ("lost", "mate")
    ]
    service = model.service.denoiser()
    lost, mate = rows = [model.row(job, service, "fast") for job in jobs]
    for _ in range(2):
        model.adapter.step(rows, None)
    served = row_of[id(lost)][1]
    [link_row] = served.link_rows
    session = model.service.front.service.sessions._sessions[link_row.link.session]
    slots = session.rows.pop(link_row.name).slots
    for _ in range(2):  # the answer to what was asked before is still there
        try:
            model.adapter.step(rows, None)
        except EngineFailed:
            break
    else:
        pytest.fail("nobody has said that the row is not there")
    at = mate.step
    with pytest.raises(EngineFailed, match="not open"):
        model.adapter.step([lost], None)
    model.adapter.step([mate], None)
    assert mate.step == at + 1
    assert not row_of[id(mate)][1].stale
    model.run([mate])
    slots.remove()
    service.close()


@pytest.mark.parametrize("name", samplers())
def test_looking_ahead_moves_no_row(tiny_unets: dict[str, Path], name: str) -> None:
    """And finds what a copy of it finds."""
    folder = tiny_unets["sd-base"]
    config = config_of(folder)
    loaded, encoder = load_adapter(config), load_encoder(config)
    assert isinstance(loaded, UnetAdapter)
    adapter = UnetAdapter(loaded.spec, loaded.model, samplers()[name], exact_vae=loaded.exact_vae)
    rng = fresh_rng()
    case = unet_case(rng, num_inference_steps=5, strength=1.0)
    job = adapter.prepare(encode_case(encoder, case, "r"))
    plain, watched = adapter.dense_row(job), adapter.dense_row(job)
    assert extrapolated_latents(watched) is None
    for step in range(plain.steps):
        adapter.step([plain], None)
        adapter.step([watched], None)
        guess = extrapolated_latents(watched)
        assert (guess is None) == (step + 2 >= plain.steps)
        if guess is not None:
            copied = deepcopy(watched)
            assert copied.answer is not None
            latents = PackedLatents([copied])
            latents.samples()
            latents.advance([copied.answer[None]])
            assert torch.equal(guess, latents.samples()[0])
    assert torch.equal(plain.latents, watched.latents)


def test_which_residuals_a_step_adds() -> None:
    """By the rule itself: never older than a step, of the same scales, for the same tokens."""
    scales = [(0.5,), (0.5,), (0.0,), (0.5,), (0.5,), (0.7,)]

    def none_failed(number: int) -> bool:
        return False

    ahead = Reuse(scales, fast=True)
    assert ahead.needs_extrapolated(0, 4)
    assert not ahead.needs_extrapolated(1, 4)
    assert ahead.needs_extrapolated(2, 4)
    assert not ahead.needs_extrapolated(5, 4)
    ahead.keep(SentRequest(1, 3, 4, 0, extrapolated=True))
    assert ahead.at(3, 4, none_failed) == SentRequest(1, 3, 4, 0, extrapolated=True)
    assert not ahead.needs_extrapolated(2, 4)
    assert ahead.needs_extrapolated(2, 9)

    for number, step in enumerate((0, 2, 4)):
        ahead.keep(SentRequest(number, step, 4, 0, extrapolated=False))
        if step == 0:  # behind a row's first step there is nothing else
            sent_ask = SentRequest(0, 0, 4, 0, extrapolated=False)
            assert ahead.at(1, 4, none_failed) is not None
            assert ahead.at(1, 9, none_failed) is None, "other tokens"
            assert ahead.at(1, 4, lambda number: True) is None, "it has failed"
            assert not ahead.needs_present(1, sent_ask)
    assert ahead.at(2, 4, none_failed) is None, "nothing acts"
    assert ahead.at(5, 4, none_failed) is None, "another scale"
    assert Reuse(scales, fast=True).at(3, 4, none_failed) is None, "never asked"
    assert ahead.needs_present(5, None)

    exact = Reuse(scales, fast=False)
    exact.keep(sent_ask)
    assert exact.at(1, 4, none_failed) is None
    assert exact.needs_present(1, None)
    assert not exact.needs_extrapolated(0, 4)
