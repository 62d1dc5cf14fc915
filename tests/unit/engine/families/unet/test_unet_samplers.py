"""Rows moved together, against diffusers' own samplers stepped row by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from maskserve_engine.families.unet.conditioning import UnetBlend, UnetTemplate
from maskserve_engine.families.unet.latents import PackedLatents
from maskserve_engine.families.unet.rows import Guidance, UnetInactive, UnetPrompt, UnetRow
from maskserve_engine.families.unet.sampler import NoiseLevels, UnetSchedule
from maskserve_engine.stages.linear_steps import is_linear
from tests.fakes.jobs import tolerance
from tests.fakes.tiny_unet import samplers
from tests.support.draws import fresh_rng, fresh_seed

pytestmark = pytest.mark.each_value

SHAPE = 4, 6, 5
BETAS: dict[str, Any] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
}  # fmt: skip


def all_samplers() -> dict[str, Any]:
    """Those of every sort, options of theirs that change what they remember, and one that is not
    linear.
    """
    dpm, unipc = DPMSolverMultistepScheduler, UniPCMultistepScheduler
    return samplers() | {
        "dpm-order-1": dpm(**BETAS, solver_order=1),
        "dpm-order-3": dpm(**BETAS, solver_order=3),
        "dpm-order-3-eps": dpm(
            **BETAS, solver_order=3, algorithm_type="dpmsolver", final_sigmas_type="sigma_min"
        ),
        "dpm-heun-final": dpm(**BETAS, solver_type="heun", euler_at_final=True),
        "euler-continuous": EulerDiscreteScheduler(
            **BETAS, prediction_type="v_prediction", timestep_type="continuous",
            use_karras_sigmas=True, sigma_min=0.03, sigma_max=14.0,
        ),
        "unipc": unipc(**BETAS),
        "unipc-order-3": unipc(**BETAS, solver_order=3, prediction_type="v_prediction"),
        "unipc-bh1-eps": unipc(**BETAS, solver_type="bh1", predict_x0=False,
                               final_sigmas_type="sigma_min"),
        "unipc-corrects-late": unipc(**BETAS, disable_corrector=[0, 2], use_karras_sigmas=True),
        "ddim-clips": DDIMScheduler(**BETAS, clip_sample=True),
    }  # fmt: skip


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


class Edit:
    """An edit of any sort, and what diffusers' own sampler makes of it."""

    def __init__(
        self, rng: np.random.Generator, sampler: Any, *, blends: bool, number: int
    ) -> None:
        steps = int(rng.integers(1, 30))
        run = steps if rng.random() < 0.3 else int(rng.integers(1, steps + 1))
        self.reference = copy.deepcopy(sampler)
        self.reference.set_timesteps(steps)
        begin = (steps - run) * self.reference.order
        self.timesteps = self.reference.timesteps[begin:]
        if hasattr(self.reference, "set_begin_index"):
            self.reference.set_begin_index(begin)
        self.clean, self.noise = normal(rng, *SHAPE), normal(rng, *SHAPE)
        greys = [0, 255] if rng.random() < 0.5 else [0, 1, 51, 64, 85, 102, 127, 170, 254, 255]
        self.grey = torch.from_numpy(rng.choice(greys, (1, *SHAPE[1:])))
        self.mask = self.grey.float() / 255
        self.scale = float(rng.uniform(1.5, 8.0)) if rng.random() < 0.5 else 1.0
        self.blends = blends
        # So small that guidance does not make a rounding grow from step to step.
        self.weights = normal(rng, 2, len(self.timesteps), 1, 1, 1) / self.scale
        levels = NoiseLevels(sampler)
        schedule = UnetSchedule(sampler, levels, steps, min((run + 0.5) / steps, 1.0))
        assert schedule.timesteps == tuple(self.timesteps.tolist())
        assert set(map(type, schedule.timesteps)) == {float}  # as names of anchors are made of them
        self.start = schedule.start(self.clean, self.noise)
        inactive = None
        if rng.random() < 0.5:
            template = UnetTemplate(normal(rng, *SHAPE), normal(rng, *SHAPE), None, levels)
            inside = normal(rng, 1, *SHAPE[1:]) > 0
            unread: Any = None
            inactive = UnetInactive({}, inside, template, unread)
        self.inactive = inactive
        prompt = UnetPrompt(torch.zeros(1, 1), None)
        self.row = UnetRow(
            request_id=str(number),
            schedule=schedule,
            noise_levels=levels,
            prompt=prompt,
            guidance=Guidance(prompt, self.scale) if self.scale > 1 else None,
            state=schedule.state(self.start),
            condition=None if blends else normal(rng, 1, *SHAPE[1:]),
            blend=UnetBlend(self.mask, self.clean, self.noise, soft=True) if blends else None,
            inactive=inactive,
        )

    def answers(self, model_input: Tensor, step: int) -> Tensor:
        """[passes, C, h, w] of a model that looks at what it is given."""
        passes = 1 if self.scale == 1 else 2
        return torch.tanh(model_input * self.weights[:passes, step])

    def alone(self) -> Tensor:
        """[C, h, w] by diffusers' pipelines' own loop, in which a cached row's inactive tokens are
        pinned.
        """
        latents = self.start
        if len(self.timesteps) == len(self.reference.timesteps):
            assert torch.allclose(latents, self.noise * self.reference.init_noise_sigma)
        else:
            at = self.timesteps[:1]
            expected = self.reference.add_noise(self.clean[None], self.noise[None], at)[0]
            assert (latents - expected).abs().max() <= tolerance(expected.numpy())
        for step, timestep in enumerate(self.timesteps):
            model_input = self.reference.scale_model_input(latents[None], timestep)[0]
            if self.inactive is not None:
                pinned = self.inactive.template.latents_at(float(timestep))
                model_input = torch.where(self.inactive.mask, model_input, pinned)
            answer, *away = self.answers(model_input, step)
            if away:
                answer = away[0] + self.scale * (answer - away[0])
            moved = self.reference.step(answer[None], timestep, latents[None], return_dict=False)[0]
            latents = moved[0]
            if self.blends:
                source = self.clean[None]
                if step + 1 < len(self.timesteps):
                    at = self.timesteps[step + 1 : step + 2]
                    source = self.reference.add_noise(source, self.noise[None], at)
                # What the next step may change: white from the first on, black never.
                maximum = max(len(self.timesteps) - step - 1, 1)
                inside = (self.grey * len(self.timesteps) >= 255 * maximum).float()
                latents = (1 - inside) * source[0] + inside * latents
        return latents


def stepped(edits: Sequence[Edit], packed: PackedLatents) -> None:
    inputs = packed.samples()
    rows = zip(edits, inputs, strict=True)
    packed.advance([edit.answers(x[: SHAPE[0]], edit.row.step) for edit, x in rows])


def run(edits: Sequence[Edit], rng: np.random.Generator) -> None:
    """Rows join one by one, in any order, and leave when they are done."""
    waiting, running = list(edits), list[Edit]()
    packed: PackedLatents | None = None
    while waiting or running:
        if waiting and (not running or rng.random() < 0.5):
            running.insert(int(rng.integers(len(running) + 1)), waiting.pop())
            packed = None
        packed = packed or PackedLatents([edit.row for edit in running])
        stepped(running, packed)
        going = [edit for edit in running if edit.row.step < edit.row.steps]
        packed = packed if len(going) == len(running) else None
        running = going


@pytest.mark.parametrize("blends", [False, True])
@pytest.mark.parametrize("name", all_samplers())
def test_rows_moved_together_are_what_diffusers_makes_of_each(name: str, blends: bool) -> None:
    """And bit for bit what they are when each is moved by itself."""
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    sampler = all_samplers()[name]
    edits = [Edit(rng, sampler, blends=blends, number=i) for i in range(6)]
    begun = [edit.row.state for edit in edits]
    run(edits, rng)
    together = [edit.row.latents for edit in edits]
    for edit, state, moved_state in zip(edits, begun, together, strict=True):
        expected = edit.alone()
        assert (moved_state - expected).abs().max() <= tolerance(expected.numpy()), seed
        edit.row.state, edit.row.step = state, 0
        run([edit], rng)
        assert torch.equal(edit.row.latents, moved_state), seed


def test_only_a_sampler_that_clips_is_not_linear() -> None:
    names = {name for name, all_sampler in all_samplers().items() if not is_linear(all_sampler)}
    assert names == {"ddim-clips"}
    ddimscheduler = DDIMScheduler(**BETAS, clip_sample=True)
    assert UnetSchedule(ddimscheduler, NoiseLevels(ddimscheduler), 5).factors.moves is None


@pytest.mark.parametrize(
    ("name", "depth"), [("ddim", 1), ("euler", 1), ("dpm2m", 2), ("dpm-order-3", 3), ("pndm", 6)]
)
def test_a_state_holds_what_later_steps_read_and_no_more(name: str, depth: int) -> None:
    sampler = all_samplers()[name]
    schedule = UnetSchedule(sampler, NoiseLevels(sampler), 20)
    assert schedule.state(torch.zeros(SHAPE)).shape == (depth, *SHAPE)


def test_answers_of_both_kinds_have_one_velocity() -> None:
    """The error of a picture is then the same share of either."""
    rng, sampler = fresh_rng(), all_samplers()["ddim"]
    levels, timestep = NoiseLevels(sampler), float(rng.integers(1, 998))
    clean, noise = normal(rng, *SHAPE), normal(rng, *SHAPE)
    signal, share = levels.at(timestep)
    velocity = levels.velocity(levels.mixed(clean, noise, timestep), noise, timestep)
    torch.testing.assert_close(velocity, signal * noise - share * clean, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["ddim", "ddim-v-zero-snr"])
def test_inputs_of_any_timestep_are_mixed_of_image_and_noise(name: str) -> None:
    """Also where the noisiest is noise alone."""
    sampler = all_samplers()[name]
    levels, signals = NoiseLevels(sampler), sampler.alphas_cumprod.double().sqrt()
    for timestep in (0.0, 3.0, 997.5, 998.0, 998.5, 999.0):
        signal, share = levels.at(timestep)
        assert signal**2 + share**2 == pytest.approx(1.0)
        if timestep == int(timestep):
            assert signal == pytest.approx(float(signals[int(timestep)]), abs=1e-6)
