"""Rows with ControlNets against diffusers' own pipeline and classes, alone and in any mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxControlNetImg2ImgPipeline,
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxMultiControlNetModel,
    FluxTransformer2DModel,
)
from numpy.typing import NDArray
from PIL import Image

from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.families.mmdit.control import FluxControlNet
from maskserve_engine.families.mmdit.rows import pass_inputs
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.control_nets import CHANNELS, random_net
from tests.fakes.jobs import (
    Case,
    config_of,
    encode_case,
    random_case,
    tolerance,
    without_mask,
)
from tests.fakes.pipelines import diffusers_latents, whole_picture
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.spread("folder")

NETS: dict[str, FluxControlNetModel] = {
    "plain": random_net(1, 1, 1),
    "guided": random_net(2, 1, 2, guidance_embeds=True),
    "doubles": random_net(3, 1, 0),
    "union": random_net(4, 1, 2, num_mode=3),
}
ALL_NETS = {**NETS, "deep": random_net(5, 1, 2)}


def large_case(rng: np.random.Generator, **settings: Any) -> Case:
    """A random edit whose mask is seen by some latents."""
    case = random_case(rng, **settings)
    mask = case.mask.copy()
    mask[8:24, 8:24] = 255
    return replace(case, mask=mask)


class Model:
    def __init__(self, folder: Path) -> None:
        config = config_of(folder, model={"outside_noise": "edit"})
        self.folder, self.encoder, self.adapter = folder, load_encoder(config), load_adapter(config)
        self.nets = {name: self.adapter.control_net(net) for name, net in ALL_NETS.items()}

    def control(
        self, rng: np.random.Generator, case: Case, net: str, **changes: Any
    ) -> ControlInput:
        """With a random picture, encoded."""
        picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
        moments = self.encoder.encode(picture, case.mask, "").moments
        return ControlInput(net, picture, moments=moments, **changes)

    def job(self, case: Case, controls: tuple[ControlInput, ...] = (), name: str = "r") -> EditJob:
        return replace(encode_case(self.encoder, case, name), controls=controls)

    def row(self, job: EditJob) -> Any:
        row = self.adapter.dense_row(job)
        self.adapter.control(row, job, self.nets)
        return row

    def alone(self, job: EditJob) -> NDArray[np.float32]:
        return self.finish(self.row(job))

    def finish(self, row: Any) -> NDArray[np.float32]:
        while row.step < row.steps:
            self.adapter.step([row], None)
        return np.asarray(row.result().array())

    def oracle(self, case: Case, controls: tuple[ControlInput, ...]) -> NDArray[np.float32]:
        """[C, h, w] of the ControlNet pipeline of the edit's kind."""
        nets = [ALL_NETS[control.net] for control in controls]
        pictures = [Image.fromarray(control.picture) for control in controls]
        modes = [-1 if control.mode is None else control.mode for control in controls]
        starts, ends = (
            [control.start for control in controls],
            [control.end for control in controls],
        )
        scales = [control.scale for control in controls]
        is_match = len(nets) == 1
        pipeline = _PIPELINES[case.kind].from_pretrained(
            self.folder, controlnet=nets[0] if is_match else FluxMultiControlNetModel(nets)
        )
        pipeline.set_progress_bar_config(disable=True)
        inputs = {
            "control_image": pictures[0] if is_match else pictures,
            "control_mode": modes[0] if is_match else modes,
            "controlnet_conditioning_scale": scales[0] if is_match else scales,
            "control_guidance_start": starts[0] if is_match else starts,
            "control_guidance_end": ends[0] if is_match else ends,
        }
        if case.kind == "inpaint":
            return diffusers_latents(pipeline, case, **inputs)
        tokens = whole_picture(pipeline, case, max_sequence_length=16, **inputs)
        [latents] = pipeline._unpack_latents(tokens, *case.mask.shape, pipeline.vae_scale_factor)
        return np.asarray(latents.float().numpy())


_PIPELINES: dict[EditKind, Any] = {
    "inpaint": FluxControlNetInpaintPipeline,
    "edit": FluxControlNetImg2ImgPipeline,
    "generate": FluxControlNetPipeline,
}


@pytest.fixture(scope="module")
def inpaint(tiny_inpaint: Path) -> Model:
    return Model(tiny_inpaint)


@pytest.fixture(scope="module")
def fill(tiny_fill: Path) -> Model:
    return Model(tiny_fill)


def asked_of(net: str, rng: np.random.Generator) -> dict[str, Any]:
    start, end = sorted(rng.uniform(0, 1, 2)) if rng.random() < 0.5 else (0.0, 1.0)
    mode = {"mode": int(rng.integers(3))} if net == "union" else {}
    return {"scale": float(rng.uniform(0.3, 1.5)), "start": start, "end": end, **mode}


@pytest.mark.parametrize("net", list(NETS))
@pytest.mark.parametrize("whole", [True, False])
def test_a_dense_row_equals_the_pipeline(inpaint: Model, net: str, whole: bool) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=6, strength=float(rng.choice([1.0, 0.7])))
    changes = asked_of(net, rng)
    changes |= {"start": 0.0, "end": 1.0} if whole else {"start": 0.2, "end": 0.7}
    controls = (inpaint.control(rng, case, net, **changes),)
    expected, latents = inpaint.oracle(case, controls), inpaint.alone(inpaint.job(case, controls))
    assert np.abs(latents - expected).max() <= tolerance(expected)
    assert np.abs(latents - inpaint.alone(inpaint.job(case))).max() > 100 * tolerance(expected)


@pytest.mark.parametrize("kind", ["edit", "generate"])
def test_nets_without_a_mask_equal_the_pipeline(inpaint: Model, kind: EditKind) -> None:
    """They draw their pictures' samples first. Beside them runs a row of the other kind."""
    rng = fresh_rng()
    strength = 0.7 if kind == "edit" else 1.0
    case = without_mask(large_case(rng, num_inference_steps=6, strength=strength), kind)
    controls = (inpaint.control(rng, case, "plain", scale=0.8),)
    expected = inpaint.oracle(case, controls)
    row = inpaint.row(inpaint.job(case, controls))
    other = without_mask(large_case(rng, num_inference_steps=8, strength=1.0), "generate")
    mate = inpaint.row(inpaint.job(other, name="other"))
    while row.step < row.steps:
        inpaint.adapter.step([mate, row], None)
    assert np.abs(row.result().array() - expected).max() <= tolerance(expected)
    assert np.abs(expected - inpaint.alone(inpaint.job(case))).max() > 100 * tolerance(expected)


def test_several_nets_sum_as_in_the_pipeline(inpaint: Model) -> None:
    """The nets have equal depths; nets of unequal depth are below."""
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=5, strength=1.0)
    controls = (
        inpaint.control(rng, case, "plain", scale=0.8),
        inpaint.control(rng, case, "plain", scale=0.5, start=0.3),
    )
    expected = inpaint.oracle(case, controls)
    actual = inpaint.alone(inpaint.job(case, controls))
    assert np.abs(actual - expected).max() <= tolerance(expected)


UNEQUAL = [("deep", "plain"), ("plain", "deep"), ("doubles", "plain"), ("doubles", "deep", "plain")]


@pytest.mark.parametrize("names", UNEQUAL, ids="-".join)
def test_nets_of_unequal_depth_sum_as_in_the_pipeline_where_that_is_asked_for(
    inpaint: Model, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each net's outputs go where they go alone, which diffusers does not do: it adds up as
    many outputs as the shallowest net has, and drops the others'.
    """
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=3, strength=1.0)
    controls = tuple(
        [inpaint.control(rng, case, name, scale=float(rng.uniform(0.5, 1.0))) for name in names]
    )
    expected, job = inpaint.oracle(case, controls), inpaint.job(case, controls)
    assert np.abs(inpaint.alone(job) - expected).max() > 20 * tolerance(expected)
    config = config_of(inpaint.folder, controls={"unequal_depths": "shallowest"})
    adapter: Any = load_adapter(config)
    monkeypatch.setattr(inpaint.adapter, "shallowest", adapter.shallowest)
    assert np.abs(inpaint.alone(job) - expected).max() <= tolerance(expected)
    one = inpaint.job(case, controls[:1])
    monkeypatch.setattr(inpaint.adapter, "shallowest", False)
    plain = inpaint.alone(one)
    monkeypatch.setattr(inpaint.adapter, "shallowest", True)
    np.testing.assert_array_equal(inpaint.alone(one), plain)


def by_hand(model: Model, job: EditJob, net_of: dict[str, Any]) -> NDArray[np.float32]:
    """One step of the real classes, of a row that has taken none: the model's velocity [n, 4C]."""
    row = model.adapter.dense_row(job)
    ready = model.adapter.prepare(job).prepared
    assert isinstance(model.adapter.model, FluxTransformer2DModel)
    model_input, *_ = pass_inputs(row)
    n, inputs = len(model_input.tokens), ready.inputs
    grid_h, grid_w = row.image.grid
    ids = torch.zeros(n, 3)
    ids[:, 1] = torch.arange(grid_h).repeat_interleave(grid_w)
    ids[:, 2] = torch.arange(grid_w).repeat(grid_h)
    text = inputs.prompt.embeds
    time = torch.tensor([row.walk(0)[0].timestep / 1000])
    shared: dict[str, Any] = {
        "encoder_hidden_states": text[None],
        "pooled_projections": inputs.prompt.pooled[None],
        "timestep": time,
        "img_ids": ids,
        "txt_ids": torch.zeros(len(text), 3),
        "return_dict": False,
    }
    guidance = torch.tensor([job.request.settings.guidance_scale])
    base = model.adapter.model
    doubles, singles = len(base.transformer_blocks), len(base.single_transformer_blocks)
    sums: tuple[list[Any], list[Any]] = [0] * doubles, [0] * singles
    for control, tokens in ready.controls:
        net = net_of[control.net]
        actual = net(
            hidden_states=model_input.tokens[None, :, :CHANNELS],
            controlnet_cond=tokens[None],
            controlnet_mode=None if control.mode is None else torch.tensor([[control.mode]]),
            conditioning_scale=control.scale,
            guidance=guidance if net.config.guidance_embeds else None,
            **shared,
        )
        for samples, into in zip(actual, sums, strict=True):
            for i in range(len(into) if samples else 0):
                into[i] = into[i] + samples[i // -(-len(into) // len(samples))]
    [velocity] = base(
        hidden_states=model_input.tokens[None],
        guidance=guidance,
        controlnet_block_samples=sums[0],
        controlnet_single_block_samples=sums[1],
        **shared,
    )
    return np.asarray(velocity[0].numpy())


@pytest.mark.parametrize("names", [("plain",), ("doubles", "guided"), ("union", "plain", "union")])
def test_fill_and_nets_of_unequal_depth_equal_the_classes_called_by_hand(
    fill: Model, names: tuple[str, ...]
) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=3, strength=1.0)
    controls = tuple(
        fill.control(rng, case, net, scale=0.7, mode=1 if net == "union" else None) for net in names
    )
    job = fill.job(case, controls)
    with torch.inference_mode():
        velocity = by_hand(fill, job, dict(NETS))
    row = fill.row(job)
    copy, change = row.latents.clone(), row.walk(0)[0].change
    fill.adapter.step([row], None)
    actual = ((row.latents - copy) / change).numpy()
    assert np.abs(actual - velocity).max() <= 10 * tolerance(velocity)


def test_a_control_that_never_acts_is_as_none_bit_for_bit(inpaint: Model) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=4, strength=1.0)
    plain = inpaint.alone(inpaint.job(case))
    for change in ({"scale": 0.0}, {"start": 0.9}, {"end": 0.1}):
        control = inpaint.control(rng, case, "plain", **change)
        assert np.array_equal(inpaint.alone(inpaint.job(case, (control,))), plain), change


def test_steps_outside_start_and_end_are_as_without_bit_for_bit(inpaint: Model) -> None:
    rng = fresh_rng()
    case = large_case(rng, num_inference_steps=4, strength=1.0)
    job = inpaint.job(case, (inpaint.control(rng, case, "plain", start=0.5),))
    controlled, without = inpaint.row(job), inpaint.adapter.dense_row(job)
    for step in range(3):
        assert torch.equal(controlled.latents, without.latents) == (step <= 2), step
        inpaint.adapter.step([controlled], None)
        inpaint.adapter.step([without], None)
    assert not torch.equal(controlled.latents, without.latents)


def test_rows_with_and_without_control_do_not_change_one_another(fill: Model) -> None:
    rng = fresh_rng()
    texts: tuple[tuple[str, ...], ...] = ((), ("plain",), ("union", "plain"), (), ("union",))
    jobs = []
    for i, names in enumerate(texts):
        case = large_case(rng, num_inference_steps=int(rng.integers(2, 6)), strength=1.0)
        controls = tuple(fill.control(rng, case, net, **asked_of(net, rng)) for net in names)
        jobs.append(fill.job(case, controls, str(i)))
    expected = [fill.alone(job) for job in jobs]
    running, results = [fill.row(job) for job in jobs[:3]], {}
    late = [fill.row(job) for job in jobs[3:]]
    while running:
        fill.adapter.step(running, None)
        results |= {
            row.request_id: row.result().array() for row in running if row.step == row.steps
        }
        running = [row for row in running if row.step < row.steps] + late
        late = []
    for i, latents in enumerate(expected):
        assert np.abs(results[str(i)] - latents).max() <= tolerance(latents), i


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"joint_attention_dim": 16}, "joint_attention_dim"),
        ({"num_attention_heads": 1}, "num_attention_heads"),
        ({"in_channels": 8}, "in_channels"),
        ({"conditioning_embedding_channels": 16}, "conditioning_embedding_channels"),
    ],
)
def test_a_net_of_another_base_is_refused(
    inpaint: Model, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        inpaint.adapter.control_net(random_net(0, 1, 1, **config))


def test_outputs_go_where_diffusers_adds_them(inpaint: Model) -> None:
    """The base has one double block and two single ones."""
    net: FluxControlNet = inpaint.nets["plain"]
    assert net.places == ((0,), (1, 2))
    assert inpaint.nets["guided"].places == ((0,), (1,), (2,))
