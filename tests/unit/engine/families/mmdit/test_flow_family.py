"""A further family of flow-matching transformers, as a contributor adds it: a toy, all here, whose
prompts have no pooled vector and whose pipeline has a rule of guidance and a shift of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from torch import Tensor, nn

from maskserve_benchmarks.edits.direct import request_of
from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.contracts.request import steps_run
from maskserve_common.contracts.semantics import INPAINT
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.families.mmdit.adapter import FlowAdapter
from maskserve_engine.families.mmdit.batch import FlowBatch
from maskserve_engine.families.mmdit.preparation import Grid
from maskserve_engine.stages.encoded import NO_MOMENTS
from tests.fakes.model_specs import FILL_SPEC
from tests.support.cached_rows import assert_equal
from tests.support.draws import fresh_rng

WIDTH, HEADS, BLOCKS, TEXT_IN, SHIFT = 16, 2, 3, 6, 0.7
SPEC = replace(FILL_SPEC, family="toy", semantics=INPAINT, guidance="none", true_cfg=True)
CHANNELS = SPEC.latent_channels


class Toy(nn.Module):
    """Text and image in edit stream through blocks of attention, scaled by the timestep."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(TEXT_IN, WIDTH), nn.Linear(4 * CHANNELS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(BLOCKS))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 4 * CHANNELS)

    def forward(self, tokens: Tensor, embeds: Tensor, t: float, cis: Tensor) -> Tensor:
        x = torch.cat((self.text(embeds), self.image(tokens)))
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (e.unflatten(1, (HEADS, -1)) for e in qkv(x * (1 + t / 1000)).chunk(3, 1))
            by_head = (x.transpose(0, 1) for x in (turned(q, cis), turned(k, cis), v))
            x = x + out(F.scaled_dot_product_attention(*by_head).transpose(0, 1).flatten(1))
        return self.last(x[len(embeds) :])


def turned(x: Tensor, cis: Tensor) -> Tensor:
    """[N, heads, head_dim] by [N, head_dim / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * cis[:, None]).flatten(-2)


def positions(height: int, width: int, text: int) -> Tensor:
    at = torch.cat((-torch.arange(1, text + 1), torch.arange(height * width))).float()
    return torch.polar(torch.ones(len(at), 4), at[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1]))


# The family, as an engine would have it.


@dataclass(frozen=True)
class ToyWeights:
    model: Toy
    width, head_dim, graphs = WIDTH, WIDTH // HEADS, None

    @property
    def blocks(self) -> Sequence[Any]:
        return self.model.qkv

    def with_adapters(self, rows: Any) -> ToyWeights:
        return self


@dataclass(frozen=True)
class ToyStep:
    model: Toy
    scale: Tensor
    """[R]"""
    block_count, two_streams, alone, mode_blocks, placed_bytes = BLOCKS, 0, 0, 0, 0
    writes = (False,) * BLOCKS
    updates = None

    def take(self, rows: Sequence[int]) -> ToyStep:
        return ToyStep(self.model, self.scale[list(rows)])

    def copied(self) -> ToyStep:
        raise NotImplementedError

    def follow(self, other: ToyStep) -> None:
        raise NotImplementedError

    def embed(self, tokens: Tensor, stream: Any) -> Tensor:
        return self.model.image(tokens)

    def _qkv(self, number: int, x: Tensor, stream: Any, cis: Tensor) -> list[Tensor]:
        qkv = self.model.qkv[number](x * self.scale[stream.row_of][:, None])
        q, k, v = (x.unflatten(1, (HEADS, -1)) for x in qkv.chunk(3, 1))
        return [turned(q, cis), turned(k, cis), v]

    def pre(
        self, number: int, text: Tensor, image: Tensor, packing: Any, cis: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Any]:
        q, k, v = self._qkv(number, image, packing.row_stream, cis)
        return torch.stack((q, k), 1), v, None

    def post(
        self, number: int, text: Tensor, image: Tensor, attended: Tensor, post_inputs: Any,
        packing: Any, *, continues: bool, image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
        image_out = image + self.model.out[number](attended)
        return text, image_out[packing.text[0] :] if image_alone else image_out, None

    def project(
        self, number: int, hidden: Tensor, stream: Any, cis: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, k, v = self._qkv(number, hidden, stream, cis)
        return k, v

    def last(self, image: Tensor, stream: Any) -> Tensor:
        return self.model.last(image)


class ToyBatch(FlowBatch[ToyWeights]):
    def vectors(self, weights: ToyWeights, steps: slice) -> Sequence[Tensor]:
        return (1 + self.timesteps[steps] / 1000).unbind()

    def at_step(self, weights: ToyWeights, vectors: Tensor) -> ToyStep:
        return ToyStep(weights.model, vectors)

    @staticmethod
    def guide(positive: Tensor, away: Tensor, scale: float) -> None:
        """As ZImagePipeline."""
        positive.add_(positive - away, alpha=scale)


class ToyAdapter(FlowAdapter[ToyWeights]):
    batches = ToyBatch
    text_places = ("text",)

    def weights_of(self, model: Any, *_: Any, **__: Any) -> ToyWeights:
        return ToyWeights(model)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Any]:
        return {}

    @staticmethod
    def shift(config: Mapping[str, Any], tokens: int, steps: int) -> float:
        return SHIFT

    def blank_prompt(self, tokens: int) -> Conditioning:
        return {"prompt_embeds": np.zeros((tokens, TEXT_IN), np.float32)}

    def text(self, embeds: Tensor, grid: Any, adapters: Any = ()) -> Tensor:
        return self.model.text(embeds)

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        return positions(height, width, text)


# Beside what a pipeline of it would do.


def packed(x: Tensor) -> Tensor:
    """[C, h, w] → [h/2 · w/2, 4C]."""
    return x.unfold(1, 2, 2).unfold(2, 2, 2).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def pipeline(model: Toy, sampler: FlowMatchEulerDiscreteScheduler, job: EditJob) -> Tensor:
    """[n, 4C] the edit's latents, by FluxInpaintPipeline's rule of blending; under grey by that of
    differential diffusion, for each threshold by itself.
    """
    settings, generator = job.request.settings, torch.Generator().manual_seed(job.request.seed)
    steps, (_, height, width) = settings.num_inference_steps or 0, job.moments.shape
    sampler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=SHIFT)
    begin = steps - steps_run(steps, settings.strength)
    sampler.set_begin_index(begin)
    mean, logvar = torch.from_numpy(job.moments).chunk(2)
    first, second = (torch.randn((1, *mean.shape), generator=generator)[0] for _ in range(2))
    clean, noise = packed(mean + first * torch.exp(0.5 * logvar)), packed(second)
    grey = packed(torch.from_numpy(job.edit_mask[::4, ::4]).int().expand_as(mean).contiguous())
    sigmas = sampler.sigmas[begin:]
    latents = sigmas[0] * noise + (1 - sigmas[0]) * clean
    prompts = [job.conditioning] + ([job.negative] if job.negative else [])
    run = steps - begin
    for step, (t, sigma) in enumerate(zip(sampler.timesteps[begin:], sigmas[1:], strict=True)):
        models = [
            model(
                latents,
                torch.from_numpy(prompt["prompt_embeds"]),
                float(t),
                positions(height // 2, width // 2, len(prompt["prompt_embeds"])),
            )
            for prompt in prompts
        ]
        velocity = models[0]
        if job.negative:
            velocity = velocity + settings.true_cfg_scale * (velocity - models[1])
        latents = sampler.step(velocity, t, latents, return_dict=False)[0]
        # What the next step may change: white from the first on, black never.
        inside = (grey * run >= 255 * max(run - step - 1, 1)).float()
        latents = (1 - inside) * (sigma * noise + (1 - sigma) * clean) + inside * latents
    return latents


def sampler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


@pytest.fixture
def adapter() -> ToyAdapter:
    torch.manual_seed(0)
    model = Toy().eval().requires_grad_(False)
    return ToyAdapter(SPEC, model, sampler(), outside_noise="edit")


SOFT = np.array([1, 42, 51, 64, 85, 102, 127, 128, 170, 204, 254, 255], np.uint8)
"""Greys at, below and above the thresholds of few steps."""


def job(
    rng: np.random.Generator, number: int, *, whole: bool = False, soft: bool = False
) -> EditJob:
    """An edit of random size; every other edit is guided."""
    h, w = (int(2 * rng.integers(2, 6)) for _ in range(2))
    mask = np.zeros((4 * h, 4 * w), np.uint8)
    under = mask[: 4 * h if whole else 4 * h - 8]
    under[:] = 255
    if soft:  # latents of 4 x 4 pixels
        cells = rng.choice(SOFT, (len(under) // 4, w))
        under[:] = np.repeat(np.repeat(cells, 4, 0), 4, 1)
    more = {"negative_prompt": "", "true_cfg_scale": 2.5} if number % 2 else {}
    settings = EditSettings(
        num_inference_steps=int(rng.integers(2, 6)), strength=float(rng.choice([1.0, 0.6])),
        mask_ring=0, **more,
    )  # fmt: skip
    pixels = rng.integers(0, 256, (*mask.shape, 3), dtype=np.uint8)
    request = request_of(pixels, "", settings, int(rng.integers(2**31)), f"r{number}")

    def prompt() -> dict[str, NDArray[np.float32]]:
        size = int(rng.integers(1, 7)), TEXT_IN
        return {"prompt_embeds": rng.standard_normal(size, dtype=np.float32)}

    moments = rng.standard_normal((2 * CHANNELS, h, w), dtype=np.float32)
    return EditJob(request, mask, moments, NO_MOMENTS, prompt(), prompt() if more else None)


def run(replay: Replay, rows: Sequence[Any], kinds: Sequence[str] = ()) -> None:
    while live := [row for row in rows if row.step < row.steps]:
        replay.step(live, kinds)


def test_rows_of_any_mix_are_the_pipelines(adapter: ToyAdapter) -> None:
    rng = fresh_rng()
    jobs = [job(rng, number, soft=number > 1) for number in range(4)]
    rows = [adapter.dense_row(edit) for edit in jobs]
    run(Replay(adapter), rows)
    for edit, row in zip(jobs, rows, strict=True):
        expected = pipeline(adapter.model, sampler(), edit)
        assert_equal(packed(torch.from_numpy(row.result().array())).numpy(), expected.numpy())


@pytest.mark.parametrize("kinds", [("kv",) * 3, ("project",) * 3, ("dense", "project", "kv")])
def test_with_every_token_active_cached_rows_are_dense(
    adapter: ToyAdapter, kinds: Sequence[str]
) -> None:
    rng, replay = fresh_rng(), Replay(adapter)
    jobs = [job(rng, number, whole=number < 2, soft=number % 2 == 1) for number in range(4)]
    rows: list[Any] = []
    for edit in jobs:
        anchors = adapter.anchors(adapter.tokens(edit).total, 4, 1)
        prompt, blocks = adapter.blank_prompt(3), [frozenset(("h", "kv"))] * BLOCKS
        priming: Any = adapter.priming_row(edit, anchors, prompt, 7, blocks, "model")
        run(replay, [priming])
        row: Any = adapter.cached_row(edit, 7)
        replay.reads(row, [priming.done[0]] * row.steps)
        rows.append(row)
    run(replay, rows, kinds)
    for edit, row in zip(jobs[:2], rows, strict=False):
        dense = adapter.dense_row(edit)
        run(replay, [dense])
        assert_equal(row.result().array(), dense.result().array())
    for row in rows[2:]:
        outside = packed(torch.from_numpy(row.result().array()))[row.image.unmasked.ids]
        assert len(outside)
        assert torch.equal(outside, row.image.unmasked.latents.clean)
