"""Rows of Qwen-Image, Stable Diffusion 3.5 and Z-Image with ControlNets against diffusers' own
pipelines and classes, alone and in any mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.families.mmdit.control import spread_in_runs
from maskserve_engine.families.mmdit.preparation import pack_latents
from maskserve_engine.families.mmdit.rows import pass_inputs
from maskserve_engine.families.sd3.adapter import spread_evenly
from maskserve_engine.spec.control_nets import check_config
from tests.fakes.control_nets import (
    PICTURE_ONLY,
    random_qwen_net,
    random_sd3_net,
    random_z_image_net,
)
from tests.fakes.jobs import Case, tolerance
from tests.support.cached_rows import KINDS, Primed, assert_equal, cached, result, run
from tests.support.draws import fresh_rng
from tests.support.family_cases import FamilyModel
from tests.support.net_rows import NetCase, NetModel, encoded_to_the_mean
from tests.support.refresh_rows import FirstEdits, plan
from tests.support.replayed import Replayed, attend_on_a_cpu

_SD3 = "StableDiffusion3ControlNetPipeline"
_NORMED = {"qk_norm": "rms_norm", "force_zeros_for_pooled_projection": False}
CASES = {
    case.model: case
    for case in (
        NetCase(
            "qwen-image",
            {
                "plain": random_qwen_net(1, 1),
                "deep": random_qwen_net(2, 2),
                "filling": random_qwen_net(3, 2, extra_condition_channels=4),
            },
            "QwenImageControlNetPipeline",
            {"max_sequence_length": 320},
        ),
        NetCase(
            "sd3-large",
            {"plain": random_sd3_net(1, 2, **PICTURE_ONLY), "deep": random_sd3_net(2, 3)},
            _SD3,
            {"max_sequence_length": 16},
        ),
        NetCase(
            "sd3-medium",
            {
                "plain": random_sd3_net(3, 1, **_NORMED),
                "deep": random_sd3_net(4, 2, dual_attention_layers=(0,), **_NORMED),
            },
            _SD3,
            {"max_sequence_length": 16},
        ),
        NetCase(
            "z-image",
            {
                "plain": random_z_image_net(1, control_layers_places=(0,)),
                "deep": random_z_image_net(
                    2,
                    control_in_dim=9,
                    add_control_noise_refiner="control_layers",
                    control_refiner_layers_places=(0,),
                ),
            },
            "ZImageControlNetPipeline",
            {"max_sequence_length": 320},
            spans=False,
        ),
    )
}
WITH_CACHE = pytest.mark.parametrize("model", ["qwen-image", "sd3-large", "z-image"], indirect=True)
EACH = pytest.mark.parametrize("model", CASES, indirect=True)
SD3 = pytest.mark.parametrize("model", ["sd3-large", "sd3-medium"], indirect=True)
QWEN = pytest.mark.parametrize("model", ["qwen-image"], indirect=True)


EXTREMES = ((0.02, 1), (0.02, 50), (1.0, 1), (1.0, 50))
"""Ratios of the mask and numbers of steps; the quick case between them holds the same code."""


@pytest.fixture(scope="module")
def models() -> dict[str, NetModel]:
    return {}


@pytest.fixture
def model(
    request: pytest.FixtureRequest,
    models: dict[str, NetModel],
    family_model: Callable[[str], FamilyModel],
) -> NetModel:
    name = request.param
    if name not in models:
        models[name] = NetModel(CASES[name], family_model(name))
    return models[name]


def distance(model: NetModel, job: EditJob, expected: NDArray[np.float32], **changes: Any) -> float:
    """How far a dense row is from the pipeline, in tolerances, if its nets are changed so."""
    nets = {name: replace(net, **changes) for name, net in model.nets.items()}
    row = model.adapter.dense_row(job)
    model.adapter.control(row, job, nets)
    return float(np.abs(result(model.replay, row) - expected).max() / tolerance(expected))


def placed_by_the_other_rule(model: NetModel, name: str) -> tuple[tuple[int, ...], ...]:
    """A net's outputs at the blocks where the other family's pipeline adds them."""
    net = model.nets[name]
    if model.case.model == "z-image":
        return tuple((place - 1,) for (place,) in net.places)
    rule = spread_in_runs if net.spread is spread_evenly else spread_evenly
    return tuple(rule(net.depth[0], 0, net.base[0]))


@EACH
@pytest.mark.parametrize("net", ["plain", "deep"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_row_without_a_mask_equals_the_pipeline(model: NetModel, net: str, passes: int) -> None:
    rng = fresh_rng()
    case = model.edit(rng, "generate", **(model.guided(rng) if passes == 2 else {}))
    span = {"start": 0.2, "end": 0.8} if model.case.spans and rng.random() < 0.5 else {}
    job = model.job(rng, case, net, **span)
    [control] = job.controls
    expected = model.oracle(case, control)
    assert_equal(result(model.replay, model.dense(job)), expected)
    unscaled = replace(job, controls=(replace(control, scale=1.0),))
    assert distance(model, replace(job, controls=()), expected) > 100
    assert distance(model, unscaled, expected) > 10
    elsewhere = placed_by_the_other_rule(model, net)
    assert elsewhere != model.nets[net].places
    assert distance(model, job, expected, places=elsewhere) > 10


@QWEN
def test_a_net_of_qwen_image_normalises_the_prompt(model: NetModel) -> None:
    rng = fresh_rng()
    case = model.edit(rng, "generate")
    job = model.job(rng, case, "deep")
    expected = model.oracle(case, job.controls[0])
    assert distance(model, job, expected, text_norm=None) > 10


@SD3
def test_the_negative_prompts_pass_has_residuals_of_its_own(model: NetModel) -> None:
    """As in the pipeline; those of the prompt for both passes are others."""
    rng = fresh_rng()
    case = model.edit(rng, "generate", **model.guided(rng))
    job = model.job(rng, case, "deep")
    expected = model.oracle(case, job.controls[0])
    row = model.dense(job)
    prompt, _ = row.residuals.passes
    row.residuals.passes = (prompt,)
    row.residuals.inputs = tuple(
        one._replace(prompts=one.prompts[:1]) for one in row.residuals.inputs
    )
    assert np.abs(result(model.replay, row) - expected).max() > 10 * tolerance(expected)


_NET_INPUTS = (
    "hidden_states", "timestep", "img_shapes", "encoder_hidden_states",
    "encoder_hidden_states_mask",
)  # fmt: skip
_Z_IMAGE_INPUTS = "x", "t", "cap_feats"
Adds = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns further arguments of a call of the transformer."""


def adds_of_sd3(model: NetModel, job: EditJob) -> Adds:
    [control] = job.controls
    net, vae = model.case.nets[control.net], model.plain.pipeline.vae
    zeros = net.config.force_zeros_for_pooled_projection
    assert control.moments is not None
    mean = torch.from_numpy(control.moments)[None].chunk(2, dim=1)[0]
    picture = (mean - (0 if zeros else vae.config.shift_factor)) * vae.config.scaling_factor

    def adds(inputs: dict[str, Any]) -> dict[str, Any]:
        pooled, words = inputs["pooled_projections"], inputs["encoder_hidden_states"]
        with model.positions(control.net):
            [residuals] = net(
                hidden_states=inputs["hidden_states"],
                timestep=inputs["timestep"],
                encoder_hidden_states=None if net.config.joint_attention_dim is None else words,
                pooled_projections=torch.zeros_like(pooled) if zeros else pooled,
                controlnet_cond=picture.expand(len(pooled), -1, -1, -1),
                conditioning_scale=control.scale,
                return_dict=False,
            )
        return {"block_controlnet_hidden_states": residuals}

    return adds


def adds_of_qwen(model: NetModel, job: EditJob) -> Adds:
    """The second pass adds what the net makes of the prompt."""
    prepared: Any = model.adapter.prepare(job).prepared
    [(control, picture)], calls = prepared.controls, list[Any]()
    net, passes = model.case.nets[control.net], 1 if job.negative is None else 2

    def adds(inputs: dict[str, Any]) -> dict[str, Any]:
        if len(calls) % passes == 0:
            residuals = net(
                controlnet_cond=picture[None],
                conditioning_scale=control.scale,
                return_dict=False,
                **{name: inputs[name] for name in _NET_INPUTS},
            )
        else:
            residuals = calls[-1]
        calls.append(residuals)
        return {"controlnet_block_samples": residuals}

    return adds


def adds_of_z_image(model: NetModel, job: EditJob) -> Adds:
    [control] = job.controls
    base, vae = model.plain.pipeline.transformer, model.plain.pipeline.vae
    net = model.case.nets[control.net]
    net = type(net).from_transformer(net, base)
    assert control.moments is not None
    mean = torch.from_numpy(control.moments)[None].chunk(2, dim=1)[0]
    picture = (mean[0] - vae.config.shift_factor) * vae.config.scaling_factor
    further = picture.new_zeros(net.config.control_in_dim - len(picture), *picture.shape[1:])
    context = torch.cat((picture, further))[:, None]

    def adds(inputs: dict[str, Any]) -> dict[str, Any]:
        x, time, words = inputs["x"], inputs["t"], inputs["cap_feats"]
        return {"controlnet_block_samples": net(x, time, words, [context] * len(x), control.scale)}

    return adds


def masked_oracle(model: NetModel, case: Case, job: EditJob) -> NDArray[np.float32]:
    """The inpainting pipeline, of which each call of the transformer adds the net's residuals."""
    pipeline = model.plain.pipeline
    is_qwen = model.case.model == "qwen-image"
    adds = _ADDS[model.case.model](model, job)
    forward, prepare_latents = pipeline.transformer.forward, pipeline.prepare_latents

    def controlled(*inputs: Any, **named: Any) -> Any:
        named |= zip(_Z_IMAGE_INPUTS, inputs, strict=False)
        return forward(**named, **adds(named))

    def prepared(*inputs: Any, **more: Any) -> Any:
        """Control pictures are drawn first."""
        [generator] = [x for x in (*inputs, *more.values()) if isinstance(x, torch.Generator)]
        for control in job.controls:
            assert control.moments is not None
            torch.randn(control.moments[: len(control.moments) // 2].shape, generator=generator)
        return prepare_latents(*inputs, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline.transformer, "forward", controlled)
        if is_qwen:
            patched.setattr(pipeline, "prepare_latents", prepared)
        return model.plain.oracle(case)


_ADDS = {
    "qwen-image": adds_of_qwen,
    "sd3-large": adds_of_sd3,
    "sd3-medium": adds_of_sd3,
    "z-image": adds_of_z_image,
}


def masked(case: Case, ratio: float) -> Case:
    """The same edit with a mask of about this ratio, of one token at least."""
    mask = np.full_like(case.mask, 255)
    if ratio < 1:
        mask[:] = 0
        mask[8 : 8 + max(1, round(ratio * mask.size / 8)), 8:16] = 255
    return replace(case, mask=mask)


@EACH
@pytest.mark.parametrize("net", ["plain", "deep"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("ratio", "steps"),
    [(0.3, 5), *(pytest.param(*one, marks=pytest.mark.slow) for one in EXTREMES)],
)
def test_a_masked_row_equals_the_inpainting_pipeline_with_the_net(
    model: NetModel, net: str, passes: int, ratio: float, steps: int
) -> None:
    rng = fresh_rng()
    steps = max(steps, model.adapter.spec.least_steps)
    settings = {"num_inference_steps": steps, "strength": 0.7 if steps == 5 else 1.0}
    case = model.edit(rng, **settings, **(model.guided(rng) if passes == 2 else {}))
    case = masked(case, ratio)
    job = model.job(rng, case, net)
    expected = masked_oracle(model, case, job)
    assert_equal(result(model.replay, model.dense(job)), expected)
    assert distance(model, replace(job, controls=()), expected) > 10


@QWEN
def test_a_net_that_fills_the_mask_sees_what_its_pipeline_shows_it(model: NetModel) -> None:
    """The picture, black inside the mask, and where the mask is not."""
    from diffusers import QwenImageControlNetInpaintPipeline

    rng = fresh_rng()
    case = masked(model.edit(rng), 0.3)
    picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
    pipeline: Any = QwenImageControlNetInpaintPipeline(
        **model.parts, controlnet=model.case.nets["filling"]
    )
    height, width = case.mask.shape
    with encoded_to_the_mean(), torch.inference_mode():
        expected = pipeline.prepare_image_with_mask(
            Image.fromarray(picture), Image.fromarray(case.mask), width, height, 1, 1,
            torch.device("cpu"), torch.float32,
        )  # fmt: skip
        picture[case.mask > 127] = 0
        moments = model.plain.encoder.moments(picture)
        control = ControlInput("filling", picture, moments=moments, fills=True)
        job = replace(model.plain.encoded(case), controls=(control,))
        prepared: Any = model.adapter.prepare(job).prepared
    [(_, tokens)] = prepared.controls
    latents = pack_latents(model.adapter._preparation._posterior(moments).mode())
    assert_equal(latents.numpy(), expected[0, :, :-4].numpy())
    assert torch.equal(tokens[:, -4:], expected[0, :, -4:])
    assert 0 < float(tokens[:, -4:].mean()) < 1


@QWEN
def test_a_masked_row_with_a_net_that_fills_the_mask_equals_the_classes(model: NetModel) -> None:
    rng = fresh_rng()
    case = masked(model.edit(rng), 0.3)
    job = model.job(rng, case, "filling")
    expected = masked_oracle(model, case, job)
    assert_equal(result(model.replay, model.dense(job)), expected)
    whole = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    assert torch.all(model.adapter.prepare(whole).prepared.controls[0][1][:, -4:] == 0)


def by_hand(model: NetModel, job: EditJob) -> NDArray[np.float32]:
    """Qwen-Image's velocity [n, 4C] in the first step of a row, from the real classes."""
    row: Any = model.adapter.dense_row(job)
    ready: Any = model.adapter.prepare(job).prepared
    base: Any = model.plain.pipeline.transformer
    row_input, *_ = pass_inputs(row)
    shared: dict[str, Any] = {
        "hidden_states": row_input.tokens[None],
        "encoder_hidden_states": ready.inputs.prompt.embeds[None],
        "encoder_hidden_states_mask": torch.ones(1, len(ready.inputs.prompt.embeds)),
        "timestep": torch.tensor([row.walk(0)[0].timestep / 1000]),
        "img_shapes": [[(1, *row.image.grid)]],
        "return_dict": False,
    }
    sums: list[Any] = [0] * len(base.transformer_blocks)
    for control, tokens in ready.controls:
        samples = model.case.nets[control.net](
            controlnet_cond=tokens[None], conditioning_scale=control.scale, **shared
        )
        for place in range(len(sums)):
            sums[place] = sums[place] + samples[place // -(-len(sums) // len(samples))]
    [velocity] = base(controlnet_block_samples=sums, **shared)
    return np.asarray(velocity[0].numpy())


@QWEN
def test_a_masked_row_with_nets_of_unequal_depth_equals_the_classes_called_by_hand(
    model: NetModel,
) -> None:
    rng = fresh_rng()
    job = model.job(rng, model.edit(rng), "deep", "plain")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))  # nothing is blended
    with torch.inference_mode():
        velocity = by_hand(model, job)
    row = model.dense(job)
    before, change = row.latents.clone(), row.walk(0)[0].change
    model.replay.step([row], ("dense",) * model.adapter.blocks)
    actual = ((row.latents - before) / change).numpy()
    assert np.abs(actual - velocity).max() <= 10 * tolerance(velocity)


@WITH_CACHE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refresh", [1, 3])
def test_a_cached_row_that_computes_all_tokens_equals_the_dense_row(
    model: NetModel, kind: str, refresh: int
) -> None:
    rng = fresh_rng()
    job = model.job(rng, model.edit(rng, **model.guided(rng)), "plain", "deep")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = cached(model.replay, job, Primed(model.adapter, model.plain.encoder, job))
    row = model.controlled(row, job, refresh)
    assert_equal(result(model.replay, row, kind), result(model.replay, model.dense(job)))


@EACH
def test_a_mixed_batch_is_as_each_row_alone(model: NetModel) -> None:
    rng, caches = fresh_rng(), model.adapter.spec.caches
    names: tuple[tuple[str, ...], ...] = ((), ("plain",), ("deep", "plain"), ("plain",), ())
    spans: tuple[dict[str, float], ...] = ({}, {"start": 0.3}, {"end": 0.6})
    jobs = [
        model.job(
            rng,
            model.edit(rng, **(model.guided(rng) if number % 2 else {})),
            *nets,
            **spans[number % 3],
        )
        for number, nets in enumerate(names)
    ]
    primed = [Primed(model.adapter, model.plain.encoder, job) for job in jobs] if caches else jobs

    def rows() -> list[Any]:
        return [
            model.controlled(
                model.adapter.dense_row(job)
                if number == 3 or not isinstance(one, Primed)
                else cached(model.replay, job, one),
                job,
                2,
            )
            for number, (job, one) in enumerate(zip(jobs, primed, strict=True))
        ]

    kind = "kv" if caches else "dense"
    expected = [result(model.replay, row, kind) for row in rows()]
    together = rows()
    run(model.replay, together[:2], kind)  # the others join when these have left
    run(model.replay, together[2:], kind)
    for row, latents in zip(together, expected, strict=True):
        assert_equal(row.result().array(), latents)


@WITH_CACHE
def test_recorded_steps_add_the_residuals_of_every_pass(
    model: NetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits and a first edit with nets, guided and not, alone and beside a dense row without any. In
    the second round most steps were recorded in the first.
    """
    attend_on_a_cpu(monkeypatch)
    rng, adapter, capture = fresh_rng(), model.adapter, Replayed()
    monkeypatch.setattr(adapter._preparation, "_buckets", True)
    first = {**model.guided(rng), "num_inference_steps": 6, "strength": 1.0}
    edits = [
        model.edit(rng, **settings)
        for settings in (model.guided(rng), {}, model.guided(rng), first)
    ]
    jobs = [
        model.job(rng, edit, *nets)
        for edit, nets in zip(edits, (("plain",), ("deep",), (), ("deep",)), strict=True)
    ]
    schedule = plan(0, 3, text=adapter.spec.refresh.leaves_text)
    primed = [Primed(adapter, model.plain.encoder, job) for job in jobs[:2]]

    def latents() -> list[NDArray[np.float32]]:
        arrays = []
        for batch in ([0], [0, 1, 2], [2, 1], [3], [2, 3, 1]):
            replay, rows = FirstEdits(adapter), list[Any]()
            for i in batch:
                if i == 3:
                    rows.append(replay.first_edit(jobs[i], schedule))
                    adapter.control(rows[-1], jobs[i], model.nets)
                    continue
                row = cached(replay, jobs[i], primed[i]) if i < 2 else adapter.dense_row(jobs[i])
                rows.append(model.controlled(row, jobs[i], 2))
            run(replay, rows, "kv")
            arrays += [row.result().array() for row in rows]
        return arrays

    expected = latents()
    graphs = Graphs(capture, rows=16)
    recording = replace(adapter.weights, graphs=graphs, placed_bytes=0)
    monkeypatch.setattr(adapter, "stepped", recording)
    for _ in range(2):
        for actual, plain in zip(latents(), expected, strict=True):
            assert_equal(actual, plain)
    assert graphs.records, "recording was turned off"
    assert any("residuals" in str(key) for key, step in graphs._steps.items() if step)


@EACH
@pytest.mark.parametrize("passes", [1, 2])
def test_a_service_gets_all_that_the_nets_read(model: NetModel, passes: int) -> None:
    rng = fresh_rng()
    case = model.edit(rng, **(model.guided(rng) if passes == 2 else {}))
    job = model.job(rng, case, "deep")
    opening = model.adapter.opening(model.adapter.dense_row(job), job)
    assert opening is not None
    sent = Opening.unpacked(*opening.packed())
    assert sent.spec == opening.spec
    [net_input] = model.adapter.net_row(sent, model.nets).control.inputs
    [local_input] = model.dense(job).residuals.inputs
    assert torch.equal(net_input.hint, local_input.hint)
    assert net_input.control.scale == local_input.control.scale
    for prompt, local in zip(net_input.prompts, local_input.prompts, strict=True):
        assert torch.equal(prompt.text, local.text)
        assert prompt.pooled is local.pooled or torch.equal(prompt.pooled, local.pooled)


_UNFIT = {
    "qwen-image": ("extra_condition_channels", "joint_attention_dim", "num_attention_heads"),
    "sd3-large": (
        "extra_conditioning_channels", "pooled_projection_dim", "num_attention_heads",
        "pos_embed_max_size",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "key"),
    [(name, key) for name, keys in _UNFIT.items() for key in keys],
    indirect=["model"],
)
def test_a_net_of_another_base_is_refused(model: NetModel, key: str) -> None:
    """By the folder's config.json and, if that is silent, where it is loaded."""
    draw = random_qwen_net if model.case.model == "qwen-image" else random_sd3_net
    net = draw(0, 1, **{key: 1 if "heads" in key or "extra" in key else 8})
    with pytest.raises(ValueError, match=f"it.* {key} "):
        model.adapter.control_net(net)
    config_json = {"_class_name": type(net).__name__, **net.config}
    with pytest.raises(ValueError, match=f"{key} "):
        check_config(config_json, model.adapter.spec)


@pytest.mark.parametrize(("count", "of"), [(1, 3), (2, 3), (3, 3), (12, 24), (19, 38), (5, 38)])
def test_outputs_lie_where_diffusers_adds_them(count: int, of: int) -> None:
    """None after the last block, which drops its text."""
    from diffusers import SD3Transformer2DModel

    width = 4
    base = SD3Transformer2DModel(
        sample_size=4, num_layers=of, attention_head_dim=width, num_attention_heads=1,
        joint_attention_dim=width, caption_projection_dim=width, pooled_projection_dim=width,
        pos_embed_max_size=4,
    )  # fmt: skip
    read: list[int] = []

    class Residuals(list[torch.Tensor]):
        def __getitem__(self, number: Any) -> Any:
            read.append(number)
            return super().__getitem__(number)

    base(
        torch.zeros(1, 16, 4, 4),
        torch.zeros(1, 3, width),
        torch.zeros(1, width),
        torch.zeros(1),
        block_controlnet_hidden_states=Residuals([torch.zeros(1, 4, width)] * count),
    )
    expected = [tuple(block for block, n in enumerate(read) if n == net) for net in range(count)]
    assert len(read) == of - 1
    assert spread_evenly(count, 0, of) == expected
