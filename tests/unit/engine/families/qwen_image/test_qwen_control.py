"""Qwen-Image rows with ControlNets against diffusers' own pipeline and classes, alone and in any
mix.
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

from maskserve_benchmarks.steps.replay import refreshed_every
from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import ControlInput, EditJob
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.mmdit.rows import pass_inputs
from maskserve_engine.spec.control_nets import check_config
from tests.fakes.control_nets import random_qwen_net
from tests.fakes.jobs import Case, guided, tolerance
from tests.fakes.pipelines import whole_picture
from tests.support.cached_rows import KINDS, Primed, assert_equal, cached, result, run
from tests.support.draws import fresh_rng
from tests.support.family_cases import FamilyModel

NETS = {"plain": random_qwen_net(1, 1), "deep": random_qwen_net(2, 2)}


class Model:
    def __init__(self, model: FamilyModel) -> None:
        self.plain, self.adapter, self.replay = model, model.adapter, model.replay
        self.nets = {name: self.adapter.control_net(net) for name, net in NETS.items()}

    def edit(self, rng: np.random.Generator, kind: EditKind = "inpaint", **settings: Any) -> Case:
        seed = 2 * int(rng.integers(100))  # of one pass
        steps = {"num_inference_steps": 5, "strength": 1.0, "mask_ring": 0}
        return self.plain.edit(seed, kind, **{**steps, **settings})

    def job(self, rng: np.random.Generator, case: Case, *names: str, **changes: Any) -> EditJob:
        """With a random picture for each net."""
        controls = []
        for name in names:
            picture = rng.integers(0, 256, case.pixels.shape, dtype=np.uint8)
            moments = self.plain.encoder.moments(picture)
            scale = float(rng.uniform(0.4, 1.2))
            control = ControlInput(name, picture, scale=scale, moments=moments)
            controls.append(replace(control, **changes))
        return replace(self.plain.encoded(case), controls=tuple(controls))

    def controlled(self, row: Any, job: EditJob, refresh: int = 1) -> Any:
        self.adapter.control(row, job, self.nets)
        if isinstance(row.residuals, RowControl):
            row.residuals.schedule = refreshed_every(refresh, row.steps)
        return row

    def dense(self, job: EditJob) -> Any:
        return self.controlled(self.adapter.dense_row(job), job)

    def oracle(self, case: Case, control: ControlInput) -> NDArray[np.float32]:
        """[C, h, w] of QwenImageControlNetPipeline."""
        from diffusers import QwenImageControlNetPipeline

        parts = self.plain.pipeline.components
        parts = {name: parts[name] for name in parts if name in _PARTS}
        pipeline = QwenImageControlNetPipeline(**parts, controlnet=NETS[control.net])
        pipeline.set_progress_bar_config(disable=True)
        tokens = whole_picture(
            pipeline,
            case,
            control_image=Image.fromarray(control.picture),
            controlnet_conditioning_scale=control.scale,
            control_guidance_start=control.start,
            control_guidance_end=control.end,
            max_sequence_length=320,
        )
        factor = self.plain.pipeline.vae_scale_factor
        [latents] = self.plain.pipeline._unpack_latents(tokens, *case.mask.shape, factor)
        return np.asarray(latents[:, 0].float().numpy())


_PARTS = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")


@pytest.fixture(scope="module")
def model(family_model: Callable[[str], FamilyModel]) -> Model:
    return Model(family_model("qwen-image"))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_row_without_a_mask_equals_the_pipeline(model: Model, net: str, passes: int) -> None:
    """Both passes add what the net makes of the prompt."""
    rng = fresh_rng()
    case = model.edit(rng, "generate", **(guided(rng) if passes == 2 else {}))
    span = {"start": 0.2, "end": 0.8} if rng.random() < 0.5 else {}
    job = model.job(rng, case, net, **span)
    expected = model.oracle(case, job.controls[0])
    assert_equal(result(model.replay, model.dense(job)), expected)
    without = result(model.replay, model.adapter.dense_row(job))
    assert np.abs(without - expected).max() > 100 * tolerance(expected)
    unnormed = {name: replace(one, text_norm=None) for name, one in model.nets.items()}
    rival = model.adapter.dense_row(job)
    model.adapter.control(rival, job, unnormed)
    assert np.abs(result(model.replay, rival) - expected).max() > 10 * tolerance(expected)


def by_hand(model: Model, job: EditJob) -> NDArray[np.float32]:
    """The model's velocity [n, 4C] in the first step of a row, from the real classes."""
    row: Any = model.adapter.dense_row(job)
    ready: Any = model.adapter.prepare(job).prepared
    base: Any = model.adapter.model
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
        samples = NETS[control.net](
            controlnet_cond=tokens[None], conditioning_scale=control.scale, **shared
        )
        for place in range(len(sums)):
            sums[place] = sums[place] + samples[place // -(-len(sums) // len(samples))]
    [velocity] = base(controlnet_block_samples=sums, **shared)
    return np.asarray(velocity[0].numpy())


def test_a_masked_row_with_nets_of_unequal_depth_equals_the_classes_called_by_hand(
    model: Model,
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refresh", [1, 3])
def test_a_cached_row_that_computes_all_tokens_equals_the_dense_row(
    model: Model, kind: str, refresh: int
) -> None:
    rng = fresh_rng()
    job = model.job(rng, model.edit(rng, **guided(rng)), "plain", "deep")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row = cached(model.replay, job, Primed(model.adapter, model.plain.encoder, job))
    row = model.controlled(row, job, refresh)
    assert_equal(result(model.replay, row, kind), result(model.replay, model.dense(job)))


def test_a_mixed_batch_is_as_each_row_alone(model: Model) -> None:
    rng = fresh_rng()
    names: tuple[tuple[str, ...], ...] = ((), ("plain",), ("deep", "plain"), ("plain",), ())
    jobs = [
        model.job(rng, model.edit(rng, **(guided(rng) if number % 2 else {})), *nets)
        for number, nets in enumerate(names)
    ]
    primed = [Primed(model.adapter, model.plain.encoder, job) for job in jobs]

    def rows() -> list[Any]:
        return [
            model.controlled(
                model.adapter.dense_row(job) if number == 3 else cached(model.replay, job, one),
                job,
                2,
            )
            for number, (job, one) in enumerate(zip(jobs, primed, strict=True))
        ]

    expected = [result(model.replay, row, "kv") for row in rows()]
    together = rows()
    run(model.replay, together[:2], "kv")  # the others join when these have left
    run(model.replay, together[2:], "kv")
    for row, latents in zip(together, expected, strict=True):
        assert_equal(row.result().array(), latents)


def test_a_service_gets_all_that_the_nets_read(model: Model) -> None:
    rng = fresh_rng()
    job = model.job(rng, model.edit(rng), "plain")
    opening = model.adapter.opening(model.adapter.dense_row(job), job)
    assert opening is not None
    sent = Opening.unpacked(*opening.packed())
    assert sent.spec == opening.spec
    [net_input] = model.adapter.net_row(sent, model.nets).control.inputs
    [local_input] = model.dense(job).residuals.inputs
    assert torch.equal(net_input.text, local_input.text)
    assert torch.equal(net_input.hint, local_input.hint)


@pytest.mark.parametrize(
    "config",
    [{"extra_condition_channels": 1}, {"joint_attention_dim": 8}, {"num_attention_heads": 1}],
    ids=lambda config: next(iter(config)),
)
def test_a_net_of_another_base_is_refused(model: Model, config: dict[str, Any]) -> None:
    net, [named] = random_qwen_net(0, 1, **config), config
    with pytest.raises(ValueError, match=f"it.* {named} "):
        model.adapter.control_net(net)
    config_json = {"_class_name": "QwenImageControlNetModel", **net.config}
    with pytest.raises(ValueError, match=f"{named} "):
        check_config(config_json, model.adapter.spec)
