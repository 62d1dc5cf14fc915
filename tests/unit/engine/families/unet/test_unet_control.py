"""UNet rows with ControlNets against diffusers' own pipelines and classes, alone and in any mix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    MultiControlNetModel,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPipeline,
)
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.steps.replay import Replay, plan_of_kinds, refreshed_every
from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.step_cache import NetStepCaches, RefreshSchedule, StepCacheReader
from maskserve_engine.cache.entries import PARTS
from maskserve_engine.families.control import Controlled
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.control import UnetNetInput, UnetNets, UnetSample, controlled
from maskserve_engine.families.unet.forward import PackedPasses
from maskserve_engine.families.unet.latents import PackedLatents
from maskserve_engine.families.unet.rows import UnetLookahead, UnetRow
from tests.fakes.control_nets import random_unet_net
from tests.fakes.jobs import (
    Case,
    config_of,
    encode_case,
    tolerance,
    unet_case,
    without_mask,
)
from tests.fakes.pipelines import diffusers_edit, whole_picture
from tests.fakes.tiny_unet import EACH_SORT, VARIANTS
from tests.support import refresh_rows
from tests.support.cached_rows import KINDS, Primed, cached, result, run
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.host_rows import check_lost_net_caches, check_net_caches
from tests.support.lookahead_unet import Ahead, LookaheadNet, LookaheadUnet

pytestmark = pytest.mark.spread("model", "served")


def large_case(rng: np.random.Generator, **settings: Any) -> Case:
    """A random edit whose mask is seen by some latents."""
    case = unet_case(rng, **settings)
    mask = case.mask.copy()
    mask[8:24, 8:24] = 255
    return replace(case, mask=mask)


class Model:
    def __init__(self, folder: Path, outside_noise: str = "edit", halo: int = 0) -> None:
        self.folder, self.xl = folder, (folder / "text_encoder_2").exists()
        config = config_of(
            folder,
            model={"outside_noise": outside_noise},
            cache={"conv_halo": halo, **({"entry_kind": "kv"} if halo else {})},
        )
        adapter = load_adapter(config)
        assert isinstance(adapter, UnetAdapter)
        self.encoder, self.adapter = load_encoder(config), adapter
        self.real = {
            "one": random_unet_net(adapter.model, 1),
            "two": random_unet_net(adapter.model, 2, controlnet_conditioning_channel_order="bgr"),
        }
        self.nets = {name: adapter.control_net(net) for name, net in self.real.items()}

    def job(self, case: Case, controls: tuple[ControlInput, ...] = (), name: str = "r") -> EditJob:
        return replace(encode_case(self.encoder, case, name), controls=controls)

    def row(self, job: EditJob) -> Any:
        row = self.adapter.dense_row(job)
        self.adapter.control(row, job, self.nets)
        return row

    def alone(self, job: EditJob) -> NDArray[np.float32]:
        row = self.row(job)
        while row.step < row.steps:
            self.adapter.step([row], None)
        return np.asarray(row.result().array())

    def oracle(
        self,
        case: Case,
        controls: tuple[ControlInput, ...],
        prepare: Callable[[Any], object] = lambda pipeline: None,
    ) -> NDArray[np.float32]:
        """[C, h, w] of the ControlNet pipeline of the edit's kind, once it was prepared."""
        nets = [self.real[control.net] for control in controls]
        pictures = [Image.fromarray(control.picture) for control in controls]
        cls = _PIPELINES[case.kind][self.xl]
        parts: dict[str, Any] = {} if self.xl else {"safety_checker": None}
        is_match = len(nets) == 1
        pipeline = cls.from_pretrained(
            self.folder, controlnet=nets[0] if is_match else MultiControlNetModel(nets), **parts
        )
        pipeline.set_progress_bar_config(disable=True)
        prepare(pipeline)
        scales, starts, ends = zip(*[(c.scale, c.start, c.end) for c in controls], strict=True)
        picture = "image" if case.kind == "generate" else "control_image"
        inputs = {
            picture: pictures[0] if is_match else pictures,
            "controlnet_conditioning_scale": scales[0] if is_match else list(scales),
            "control_guidance_start": starts[0] if is_match else list(starts),
            "control_guidance_end": ends[0] if is_match else list(ends),
        }
        if case.kind != "inpaint":
            return np.asarray(whole_picture(pipeline, case, **inputs)[0].numpy())
        latents = diffusers_edit(
            pipeline,
            case.pixels,
            case.mask,
            case.prompt,
            case.settings,
            case.seed,
            output_type="latent",
            **inputs,
        )
        return np.asarray(latents[0].numpy())


_PIPELINES: dict[EditKind, tuple[Any, Any]] = {
    "inpaint": (
        StableDiffusionControlNetInpaintPipeline,
        StableDiffusionXLControlNetInpaintPipeline,
    ),
    "edit": (
        StableDiffusionControlNetImg2ImgPipeline,
        StableDiffusionXLControlNetImg2ImgPipeline,
    ),
    "generate": (StableDiffusionControlNetPipeline, StableDiffusionXLControlNetPipeline),
}
"""Pipelines of each kind of edit: of Stable Diffusion, and of SDXL."""


@pytest.fixture(scope="module", params=EACH_SORT)
def model(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Model:
    return Model(tiny_unets[request.param])


def picture(rng: np.random.Generator, case: Case) -> NDArray[np.uint8]:
    return rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)


@pytest.mark.each_value
@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("nets", [("one",), ("two", "one")])
def test_a_dense_row_equals_the_pipeline(
    model: Model, nets: tuple[str, ...], guidance: float
) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=5, strength=1.0, guidance_scale=guidance)
    controls = tuple(
        ControlInput(net, picture(rng, case), float(rng.uniform(0.3, 1.2)), start, end)
        for net, start, end in zip(nets, (0.2, 0.0), (0.9, 1.0), strict=False)
    )
    expected, latents = model.oracle(case, controls), model.alone(model.job(case, controls))
    assert np.abs(latents - expected).max() <= tolerance(expected)
    assert np.abs(latents - model.alone(model.job(case))).max() > 10 * tolerance(expected)


@pytest.mark.each_value
@pytest.mark.parametrize("guidance", [1.0, 7.5])
@pytest.mark.parametrize("kind", ["edit", "generate"])
@pytest.mark.parametrize("base", ["sd-base", "sdxl-base"])
def test_nets_without_a_mask_equal_the_pipeline(
    base: str, kind: EditKind, guidance: float, tiny_unets: dict[str, Path]
) -> None:
    rng, model = fresh_rng(), Model(tiny_unets[base])
    strength = 0.7 if kind == "edit" else 1.0
    case = large_case(rng, num_inference_steps=6, strength=strength, guidance_scale=guidance)
    case = without_mask(case, kind)
    controls = (ControlInput("one", picture(rng, case), 0.9),)
    expected, latents = model.oracle(case, controls), model.alone(model.job(case, controls))
    assert np.abs(latents - expected).max() <= tolerance(expected)
    assert np.abs(latents - model.alone(model.job(case))).max() > 10 * tolerance(expected)


def test_a_control_that_never_acts_and_steps_outside_are_as_without_bit_for_bit(
    model: Model,
) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=4, strength=1.0)
    plain = model.alone(model.job(case))
    for change in ({"scale": 0.0}, {"start": 0.9}, {"end": 0.1}):
        control = ControlInput("one", picture(rng, case), **change)
        assert np.array_equal(model.alone(model.job(case, (control,))), plain), change
    late = ControlInput("one", picture(rng, case), start=0.5)
    controlled, without = model.row(model.job(case, (late,))), model.row(model.job(case))
    for step in range(controlled.steps):
        outside = step / controlled.steps < 0.5
        model.adapter.step([controlled], None)
        model.adapter.step([without], None)
        assert torch.equal(controlled.latents, without.latents) == outside, step


def test_rows_with_and_without_control_do_not_change_one_another(model: Model) -> None:
    rng = fresh_rng()
    first = large_case(rng)
    jobs = []
    for i, names in enumerate(((), ("one",), ("two", "one"), (), ("one",))):
        case = large_case(rng, num_inference_steps=int(rng.integers(4, 7)), strength=1.0)
        case = replace(case, pixels=first.pixels, mask=first.mask)
        controls = tuple(ControlInput(net, picture(rng, case), 0.7, end=0.8) for net in names)
        jobs.append(model.job(case, controls, str(i)))
    expected = [model.alone(job) for job in jobs]
    running, late = [model.row(job) for job in jobs[:3]], [model.row(job) for job in jobs[3:]]
    results = {}
    while running:
        model.adapter.step(running, None)
        rows = [row for row in running if row.step == row.steps]
        results |= {row.request_id: row.result().array() for row in rows}
        running = [row for row in running if row.step < row.steps] + late
        late = []
    for i, latents in enumerate(expected):
        assert np.abs(results[str(i)] - latents).max() <= tolerance(latents), i


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"in_channels": 9}, "in_channels"),
        ({"block_out_channels": (32, 32, 64)}, "block_out_channels"),
        ({"global_pool_conditions": True}, "global_pool_conditions"),
    ],
)
def test_a_net_of_another_base_is_refused(model: Model, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model.adapter.control_net(random_unet_net(model.adapter.model, 0, **config))


@pytest.mark.parametrize("middle", ["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"])
def test_a_net_says_what_the_real_class_says(model: Model, middle: str) -> None:
    """Two rows step at once, one guided, of other prompts' lengths, timesteps and pictures."""
    net = random_unet_net(model.adapter.model, 3, mid_block_type=middle)
    control_net = model.adapter.control_net(net)
    rng = fresh_rng()
    first, rows, expected = large_case(rng), [], []
    for guidance in (1.0, 4.0):
        case = large_case(rng, num_inference_steps=3, strength=1.0, guidance_scale=guidance)
        case = replace(case, pixels=first.pixels, mask=first.mask)
        job = model.job(case, (ControlInput("net", picture(rng, case), 0.6),))
        row = model.adapter.dense_row(job)
        model.adapter.control(row, job, {"net": control_net})
        assert row.control is not None
        sample, timestep = torch.randn(row.latents.shape), float(rng.uniform(1, 900))
        rows.append(controlled(row.control, UnetSample(sample, None), timestep, 0, row.steps))
        pixels = torch.from_numpy(job.controls[0].picture).permute(2, 0, 1)[None] / 255
        for conditioning in (job.conditioning, job.negative)[: len(row.control.passes)]:
            assert conditioning is not None
            states = [torch.from_numpy(conditioning["prompt_embeds"])[None]]
            added = None
            if model.xl:
                sizes = torch.tensor([[*pixels.shape[2:], 0, 0, *pixels.shape[2:]]])
                added = {
                    "text_embeds": torch.from_numpy(conditioning["pooled"])[None],
                    "time_ids": sizes,
                }
            with torch.inference_mode():
                downs, mid = net(
                    sample[None], timestep, *states, pixels, 0.6,
                    added_cond_kwargs=added, return_dict=False,
                )  # fmt: skip
            expected.append([x[0].numpy() for x in (*downs, mid)])
    with torch.inference_mode():
        UnetNets().run(rows)
    addeds = [part.added for row in rows for part in row.control.passes]
    assert len(addeds) == len(expected) == 3
    for added, maps in zip(addeds, expected, strict=True):
        assert len(added) == len(maps)
        for number, map in enumerate(maps):
            assert np.abs(added[number].numpy() - map).max() <= tolerance(map), number


# Cached rows.


def with_nets(model: Model, row: Any, job: EditJob, refresh: int) -> Any:
    model.adapter.control(row, job, model.nets)
    if row.control is not None:
        row.control.schedule = refreshed_every(refresh, row.steps)
    return row


def cached_row(model: Model, replay: Replay, job: EditJob, refresh: int = 3) -> UnetRow:
    row = cached(replay, job, Primed(model.adapter, model.encoder, job))
    return with_nets(model, row, job, refresh)


@pytest.fixture(scope="module", params=EACH_SORT)
def served(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Model:
    """As it is served: outside the mask the noise is the template's."""
    return Model(tiny_unets[request.param], outside_noise="template")


def controlled_jobs(
    model: Model, rng: np.random.Generator, nets: Sequence[Sequence[str]], **settings: Any
) -> list[EditJob]:
    """Edits of one size."""
    first, jobs = large_case(rng), []
    for i, names in enumerate(nets):
        case = large_case(rng, **{"num_inference_steps": 4, "strength": 1.0, **settings})
        case = replace(case, pixels=first.pixels, mask=first.mask)
        controls = tuple(ControlInput(net, picture(rng, case), 0.7) for net in names)
        jobs.append(model.job(case, controls, str(i)))
    return jobs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refresh", [1, 3])
def test_with_all_tokens_active_a_cached_row_equals_a_dense_one(
    served: Model, kind: str, refresh: int
) -> None:
    [job] = controlled_jobs(served, fresh_rng(), [("one", "two")], guidance_scale=5.0)
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    replay = Replay(served.adapter)
    row = cached_row(served, replay, job, refresh)
    latents, expected = result(replay, row, kind), served.alone(job)
    assert np.abs(latents - expected).max() <= tolerance(expected)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_active_tokens_alone_are_told_what_all_of_them_are_at_the_same_step(
    served: Model, guidance: float
) -> None:
    """Residuals that are kept at a step serve that step exactly. A net that keeps nothing has the
    same residuals for a cached row as for a dense one, bit for bit.
    """
    rng = fresh_rng()
    [job] = controlled_jobs(served, rng, [("one", "two")], guidance_scale=guidance)
    row = cached_row(served, Replay(served.adapter), job, 100)
    assert row.control is not None
    assert row.inactive is not None
    sample = PackedLatents([row]).samples()[0, : len(row.latents)]
    unet_sample = UnetSample(sample, row.inactive.active)
    now = controlled(row.control, unet_sample, row.timestep, row.step, row.steps)

    def added(of: Controlled[UnetNetInput]) -> list[dict[int, torch.Tensor]]:
        with torch.inference_mode():
            UnetNets().run([of])
        return [dict(part.added) for part in of.control.passes]

    whole = added(now)
    assert [residual.step for residual in row.control.residuals.values()] == [now.step] * 2
    alone = added(now._replace(step=now.step + 1))
    later = added(now._replace(step=now.step + 1, timesteps=(now.timesteps[0] / 2,)))
    assert [residual.step for residual in row.control.residuals.values()] == [now.step] * 2
    for mine, all_tokens, other in zip(alone, whole, later, strict=True):
        for place, expected in all_tokens.items():
            latents = expected.numpy()
            assert np.abs(mine[place].numpy() - latents).max() <= tolerance(latents), place
        assert any(not torch.equal(other[place], mine[place]) for place in mine)
    row.control.residuals.clear()
    row.control.schedule = refreshed_every(1, row.steps)
    every = added(now._replace(step=now.step + 1))
    dense = added(
        now._replace(step=now.step + 1, base_input=UnetSample(sample, None), sparse=False)
    )
    assert not row.control.residuals
    for mine, all_tokens in zip(every, dense, strict=True):
        assert all(torch.equal(mine[place], all_tokens[place]) for place in all_tokens)


def test_nets_compute_all_tokens_at_one_step_in_so_many(served: Model) -> None:
    """The last step keeps nothing, so the last anchor lies before it."""
    rng, replay = fresh_rng(), Replay(served.adapter)
    [job] = controlled_jobs(served, rng, [("one",)], guidance_scale=1.0, num_inference_steps=5)
    row = cached_row(served, replay, job, 3)
    assert row.steps in (5, 6)
    tokens, computed = served.adapter.tokens(job), []
    control = row.control
    assert control is not None
    while row.step < row.steps:
        replay.step([row], ("kv",) * served.adapter.blocks)
        computed.append(control.residuals[0].step)
    assert computed == [step - step % 3 for step in range(row.steps)]
    [source] = control.residuals[0].tokens
    keys, values = source.source(0, source.now).parts
    level = served.nets["one"].levels[0]
    counts = [len(ids) for ids in control.inputs[0].cached_ids]
    assert len(keys.data) == len(values.data) == counts[level]
    assert counts[0] == tokens.total - tokens.active


def test_step_caches_of_nets_lie_in_either_memory(
    served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, replay = fresh_rng(), Replay(served.adapter)
    guidance = float(rng.choice([1.0, 7.5]))
    [job] = controlled_jobs(
        served, rng, [("one", "two")], guidance_scale=guidance, num_inference_steps=5
    )
    primed = Primed(served.adapter, served.encoder, job)

    def row_with(caches: NetStepCaches | None) -> Any:
        row: Any = cached(replay, job, primed)
        served.adapter.control(row, job, served.nets, caches)
        row.control.schedule = RefreshSchedule(frozenset({0, 3}), "model", text=False)
        return row

    def run_steps(caches: NetStepCaches) -> Callable[[], bool]:
        row = row_with(caches)

        def step() -> bool:
            replay.step([row], ("kv",) * served.adapter.blocks)
            return bool(row.step < row.steps)

        return step

    call = int(rng.integers(1, 12))
    check_net_caches(lambda caches: result(replay, row_with(caches), "kv"), monkeypatch, call)
    check_lost_net_caches(run_steps)


@pytest.mark.parametrize("refresh", [1, 2])
def test_cached_rows_with_and_without_control_do_not_change_one_another(
    served: Model, refresh: int
) -> None:
    rng, replay = fresh_rng(), Replay(served.adapter)
    jobs = controlled_jobs(served, rng, ((), ("one",), ("two", "one"), ()))
    primed = [Primed(served.adapter, served.encoder, job) for job in jobs]

    def rows() -> list[UnetRow]:
        nets: list[Any] = [
            with_nets(served, cached(replay, job, template), job, refresh)
            for job, template in zip(jobs, primed, strict=True)
        ]
        return [*nets, served.row(jobs[1])]

    results = [result(replay, row, "kv") for row in rows()]
    together = rows()
    replay.step(together[:3], ("kv",) * served.adapter.blocks)  # the others join behind it
    run(replay, together, "kv")
    for row, expected in zip(together, results, strict=True):
        pixels = row.result().array()
        assert np.abs(pixels - expected).max() <= tolerance(expected), row.request_id


def anchored(model: Model, job: EditJob, schedule: RefreshSchedule) -> Any:
    row = model.adapter.refreshing_row(job, schedule)
    model.adapter.control(row, job, model.nets)
    return row


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_it_is_the_pipeline_whose_nets_foresee(
    tiny_unets: dict[str, Path], guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose foreseen pass is without its net is another."""
    model = Model(tiny_unets["sd-fill"])
    rng = np.random.default_rng(int(guidance))
    case = large_case(rng, num_inference_steps=8, strength=1.0, guidance_scale=guidance)
    controls = (ControlInput("one", picture(rng, case), scale=0.8),)
    job, plan = model.job(case, controls), refresh_rows.plan(0, 4, 6)
    active = model.adapter.prepare(job).prepared.active.levels

    def foreseeing(pipeline: Any) -> None:
        ahead = Ahead(pipeline.scheduler, {1: 4, 4: 6}, guidance, None)
        shape = job.moments.shape[1:]
        base = LookaheadUnet(pipeline.unet, active, {0}, 1, shape, ahead)
        LookaheadNet(pipeline.controlnet, base, active, {0}, shape)

    def refreshed() -> Any:
        row = anchored(model, job, plan)
        refresh_rows.run(model.adapter, [row], [plan])
        return row.result().array()[:, row.inactive.mask.numpy()[0]]

    inside = anchored(model, job, plan).inactive.mask.numpy()[0]
    expected = model.oracle(case, controls, foreseeing)[:, inside]
    assert np.abs(refreshed() - expected).max() <= tolerance(expected)
    honest = UnetLookahead.passes

    def without(self: UnetLookahead) -> Any:
        return [replace(net_input, residuals=None) for net_input in honest(self)]

    monkeypatch.setattr(UnetLookahead, "passes", without)
    assert np.abs(refreshed() - expected).max() > 2 * tolerance(expected)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_with_own_anchors_at_each_step_it_is_dense(served: Model, guidance: float) -> None:
    settings = {"guidance_scale": guidance, "num_inference_steps": 5}
    [job] = controlled_jobs(served, fresh_rng(), [("one", "two")], **settings)
    plan = refresh_rows.plan(*range(served.adapter.steps(job)), lookahead=False)
    row = anchored(served, job, plan)
    refresh_rows.run(served.adapter, [row], [plan])
    active = row.inactive.mask.numpy()[0]
    expected = served.alone(job)[:, active]
    assert np.abs(row.result().array()[:, active] - expected).max() <= tolerance(expected)


def test_between_own_anchors_nets_compute_the_active_tokens_alone(served: Model) -> None:
    """Whatever runs beside the row."""
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    jobs = controlled_jobs(served, rng, (("one",), (), ("two", "one")), num_inference_steps=6)
    plans = [
        refresh_rows.plan(0, 3, lookahead=False),
        refresh_rows.plan(0, 2, lookahead=False),
        refresh_rows.plan(0, 2, 4, format="int8", lookahead=False),
    ]
    together = [anchored(served, *pair) for pair in zip(jobs, plans, strict=True)]
    refresh_rows.run(served.adapter, together, plans)

    def alone(number: int, schedule: RefreshSchedule) -> Any:
        row, steps = anchored(served, jobs[number], schedule), []
        reader = StepCacheReader(row, served.adapter.entry_blocks)
        while row.step < row.steps:
            entry: Any = None if row.step in schedule.refresh_steps else reader.entry_at(row.step)
            kinds = plan_of_kinds(("kv",) * served.adapter.blocks) if entry else None
            served.adapter.step([row], kinds, [entry])
            steps.append(row.control.residuals[0].step if row.control else 0)
        if row.control:
            last = [
                max(a for a in schedule.refresh_steps if a <= step) for step in range(row.steps)
            ]
            assert steps == last
        return row.result().array()

    refresh_rows.assert_as_alone(together, plans, alone)


def test_a_step_that_failed_and_is_tried_again_does_the_same(
    served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose step fails is tried again row by row; what its nets kept half is not read."""
    rng, replay = fresh_rng(), Replay(served.adapter)
    [job] = controlled_jobs(served, rng, [("one", "two")])
    primed = Primed(served.adapter, served.encoder, job)
    row, other = (with_nets(served, cached(replay, job, primed), job, 2) for _ in range(2))
    kinds = ("kv",) * served.adapter.blocks
    for _ in range(2):
        replay.step([row], kinds)
    read, calls = PackedPasses.place, 0

    def failing(self: PackedPasses, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the base, when the nets have computed all tokens
            raise MemoryError
        read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PackedPasses, "place", failing)
        with pytest.raises(MemoryError):
            replay.step([row], kinds)
    assert row.step == 2
    assert row.control.residuals[0].step == 2
    latents, expected = result(replay, row, "kv"), result(replay, other, "kv")
    assert np.abs(latents - expected).max() <= tolerance(expected)


def test_a_cached_row_whose_control_never_acts_is_as_without_bit_for_bit(served: Model) -> None:
    rng, replay = fresh_rng(), Replay(served.adapter)
    [job] = controlled_jobs(served, rng, [("one",)])
    plain = result(replay, cached_row(served, replay, replace(job, controls=())), "kv")
    for change in ({"scale": 0.0}, {"start": 0.9}, {"end": 0.1}):
        idle = replace(job, controls=(replace(job.controls[0], **change),))
        assert np.array_equal(result(replay, cached_row(served, replay, idle), "kv"), plain), change


def test_rows_with_control_never_write_entries(served: Model) -> None:
    replay = Replay(served.adapter)
    [job] = controlled_jobs(served, fresh_rng(), [("one", "two")])
    primed = Primed(served.adapter, served.encoder, job)
    parts = [c.data for e in primed.entries for b in e.blocks for p in PARTS for c in b.part(p)]
    copies = [data.clone() for data in parts]
    run(replay, [with_nets(served, cached(replay, job, primed), job, 2)], "kv")
    assert all(torch.equal(a, b) for a, b in zip(copies, parts, strict=True))


def test_a_tile_takes_its_part_of_what_is_added(tiny_unets: dict[str, Path]) -> None:
    """With a tile over the whole picture a row is what it is without one."""
    folder, rng = tiny_unets[next(iter(VARIANTS))], fresh_rng()
    model = Model(folder, outside_noise="template", halo=2)
    [job] = controlled_jobs(model, rng, [("one",)])
    whole = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    replay = Replay(model.adapter)
    primed = Primed(model.adapter, model.encoder, whole, "kv")
    row = with_nets(model, cached(replay, whole, primed), whole, 2)
    expected = model.alone(whole)
    assert np.abs(result(replay, row, "kv") - expected).max() <= tolerance(expected)
    small = cached(replay, job, Primed(model.adapter, model.encoder, job, "kv"))
    with_nets(model, small, job, 2)
    assert np.isfinite(result(replay, small, "kv")).all()
