"""Rows with LoRAs against diffusers' pipelines with the same ones set by PEFT (design §8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.forward import forward as flux_forward
from maskserve_engine.batch.packing import Packed
from maskserve_engine.families.mmdit.blocks import FluxStep, embed, vectors
from maskserve_engine.families.mmdit.rows import pass_inputs
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.forward import PackedPasses
from maskserve_engine.families.unet.forward import forward as unet_forward
from maskserve_engine.families.unet.latents import PackedLatents
from maskserve_engine.families.unet.spec import level_sizes
from maskserve_engine.layers.low_rank import Factors, LowRankSet, Update
from maskserve_engine.layers.shrink_expand import Part
from tests.fakes.jobs import Case, config_of, encode_case, random_case, tolerance, unet_case
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_unet import EACH_SORT
from tests.support import cached_rows
from tests.support.cached_rows import KINDS
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng
from tests.support.frozen_tokens import Frozen, Recorded, first_blocks, flux_hooks, unet_hooks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.spread("model", sort=is_unet),
]
LORAS = 3
Asked = Sequence[tuple[int, float]]
"""Numbers of LoRAs, and their scales."""


MODELS = ("fill", "inpaint", *EACH_SORT)


def each_with(values: Sequence[Any]) -> list[Any]:
    """Each model with each value, slow where the model is."""
    return [
        pytest.param(*getattr(model, "values", (model,)), value, marks=getattr(model, "marks", ()))
        for model in MODELS
        for value in values
    ]


class Model:
    """A tiny model and random LoRAs of every layer that one may change: in diffusers, and here."""

    def __init__(self, folder: Path, pipeline: Any, net: str) -> None:
        self.pipeline, self.flux = pipeline, net == "transformer"
        pipeline.set_progress_bar_config(disable=True)
        config = config_of(folder, model={"outside_noise": "edit"})
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.net = getattr(pipeline, net)
        self.sets = [self._lora(str(number)) for number in range(LORAS)]
        self.net.disable_adapters()

    def _lora(self, name: str) -> LowRankSet:
        rank, alpha = int(torch.randint(1, 5, ())), int(torch.randint(1, 5, ()))
        places: Any = self.adapter
        self.net.add_adapter(
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(places.places)), name
        )
        self.net.requires_grad_(False)
        factors = {}
        for path, layer in self.net.named_modules():
            if hasattr(layer, "lora_A") and name in layer.lora_A:
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                for weight in (down, up):
                    weight.copy_(torch.randn_like(weight) * 0.3 / weight[0].numel() ** 0.5)
                factors[path] = Factors(down.clone(), up * (alpha / rank))
        assert len(factors) == len(places.places)
        return self.adapter.low_rank(factors)

    def case(self, rng: np.random.Generator, **options: Any) -> Case:
        """An edit of more than a few pixels."""
        options = {"num_inference_steps": 3, "strength": 1.0, **options}
        while True:
            case = random_case(rng, **options) if self.flux else unet_case(rng, **options)
            if case.mask.mean() > 40:
                return case

    def set(self, loras: Asked) -> None:
        """Have diffusers' net add these LoRAs, and no other."""
        if loras:
            self.net.enable_adapters()
            names, scales = zip(*((str(number), scale) for number, scale in loras), strict=True)
            self.net.set_adapters(list(names), list(scales))
        else:
            self.net.disable_adapters()

    def oracle(self, case: Case, loras: Asked) -> NDArray[np.float32]:
        """[C, h, w] latents of the pipeline with these LoRAs."""
        self.set(loras)
        if self.flux:
            return diffusers_latents(self.pipeline, case)
        latents: Any = diffusers_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            output_type="latent",
        )  # fmt: skip
        answer: NDArray[np.float32] = latents[0].numpy()
        return answer

    def row(self, case: Case, loras: Asked, name: str = "r") -> Any:
        job = encode_case(self.encoder, case, name)
        row = self.adapter.dense_row(job)
        self.adapter.attach(row, job, tuple([(self.sets[n], s) for n, s in loras if s]))
        return row

    def ran(self, rows: Sequence[Any]) -> list[NDArray[np.float32]]:
        """Results of rows that share every step."""
        while rows[0].step < rows[0].steps:
            self.adapter.step(rows, None)
        return [row.result().array() for row in rows]

    def alone(self, case: Case, loras: Asked) -> NDArray[np.float32]:
        return self.ran([self.row(case, loras)])[0]


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tiny_flux: dict[str, Path], tiny_unets: dict[str, Path]
) -> Model:
    from diffusers import (
        DiffusionPipeline,
        StableDiffusionInpaintPipeline,
        StableDiffusionXLInpaintPipeline,
    )

    if request.param in tiny_flux:
        folder = tiny_flux[request.param]
        return Model(folder, DiffusionPipeline.from_pretrained(folder), "transformer")
    folder = tiny_unets[request.param]
    if request.param.startswith("sdxl"):
        return Model(folder, StableDiffusionXLInpaintPipeline.from_pretrained(folder), "unet")
    pipeline = StableDiffusionInpaintPipeline.from_pretrained(folder, safety_checker=None)
    return Model(folder, pipeline, "unet")


MIXES: tuple[Asked, ...] = (
    [(0, 1.0)],
    [(1, 0.6)],
    [(2, -0.8)],
    [(0, 0.7), (1, -0.4), (2, 1.2)],
    [],
)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("model", "loras"),
    [
        *each_with(MIXES),
        ("reference", MIXES[3]),
    ],
    ids=str,
    indirect=["model"],
)
def test_a_row_equals_the_pipeline_with_its_loras(model: Model, loras: Asked) -> None:
    case = model.case(fresh_rng())
    expected = model.oracle(case, loras)
    assert np.abs(model.alone(case, loras) - expected).max() <= tolerance(expected)
    if loras:
        assert np.abs(model.oracle(case, []) - expected).max() > 100 * tolerance(expected)


@pytest.mark.parametrize("model", [*MODELS, "reference"], indirect=True)
def test_rows_with_other_loras_share_a_batch(model: Model) -> None:
    """Each is as it is by itself, and one without any is bit for bit what it is among its like."""
    rng = fresh_rng()
    mixes = (*MIXES, [(0, 1.0)], [(0, 1.0)], [(1, 0.3), (0, 2.0)])
    cases = [model.case(rng) for _ in mixes]
    if not model.flux:  # rows of a UNet share a batch at equal size
        cases = [cases[0]] * len(mixes)
    rows = [
        model.row(case, loras, str(n))
        for n, (case, loras) in enumerate(zip(cases, mixes, strict=True))
    ]
    plain = [model.row(case, [], str(n)) for n, case in enumerate(cases)]
    results, without = model.ran(rows), model.ran(plain)
    for number, (case, loras) in enumerate(zip(cases, mixes, strict=True)):
        expected = model.oracle(case, loras)
        # Another batch shape rounds otherwise, and the LoRAs drawn here enlarge it.
        assert np.abs(results[number] - expected).max() <= 3 * tolerance(expected)
        if not loras:
            assert np.array_equal(results[number], without[number])


def test_a_scale_of_nothing_is_no_lora_bit_for_bit(model: Model) -> None:
    case = model.case(fresh_rng())
    assert np.array_equal(model.alone(case, [(0, 0.0)]), model.alone(case, []))


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_active_a_cached_row_with_loras_equals_a_dense_one(
    model: Model, kind: str
) -> None:
    """The template was primed without any: nothing of it is read."""
    job = encode_case(model.encoder, model.case(fresh_rng()), "r")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    loras = ((model.sets[0], 0.7), (model.sets[2], -0.4))
    replay = Replay(model.adapter)
    row = cached_rows.cached(replay, job, cached_rows.Primed(model.adapter, model.encoder, job))
    dense = model.adapter.dense_row(job)
    for tested_row in (row, dense):
        model.adapter.attach(tested_row, job, loras)
    result, expected = (cached_rows.result(replay, tested_row, kind) for tested_row in (row, dense))
    cached_rows.assert_equal(result, expected)


@pytest.mark.parametrize(
    ("model", "kind"),
    [*each_with(KINDS), ("reference", "kv")],
    indirect=["model"],
)
def test_cached_rows_with_other_loras_share_a_batch(model: Model, kind: str) -> None:
    """Cached and dense rows, with one LoRA, two, the same one, and none: each as by itself."""
    case = model.case(fresh_rng())
    jobs = [encode_case(model.encoder, replace(case, seed=n), str(n)) for n in range(6)]
    mixes = ([(0, 1.0)], [(1, -0.6)], [], [(0, 0.4), (2, 0.5)], [(0, 1.0)], [(2, 1.0)])
    template = cached_rows.Primed(model.adapter, model.encoder, jobs[0])
    replay = Replay(model.adapter)

    def rows() -> list[Any]:
        batch_rows: list[Any] = []
        for number, (job, loras) in enumerate(zip(jobs, mixes, strict=True)):
            dense = number % 3 == 1
            row = model.adapter.dense_row(job) if dense else cached_rows.cached(
                replay, job, template
            )  # fmt: skip
            model.adapter.attach(row, job, tuple([(model.sets[n], s) for n, s in loras]))
            batch_rows.append(row)
        return batch_rows

    alone, together = rows(), rows()
    for row in alone:
        cached_rows.run(replay, [row], kind)
    cached_rows.run(replay, together, kind)
    for one, other in zip(alone, together, strict=True):
        cached_rows.assert_equal(other.result().array(), one.result().array())


def answered(model: Model, row: Any, kinds: Sequence[str]) -> torch.Tensor:
    """[1, …] what the net answers to a row's next step; of FLUX for the computed tokens."""
    weights = model.adapter.weights  # type: ignore[attr-defined]
    with torch.inference_mode():
        if model.flux:
            weights, packed = weights.with_adapters([row.adapters]), Packed(pass_inputs(row)[:1])
            timesteps = torch.tensor([[row.walk(row.step)[0].timestep]])
            [step] = vectors(weights, embed(weights, timesteps, packed.pooled, packed.guidance))
            return flux_forward(FluxStep(weights, step), packed, kinds)[None]
        [sample], depth = PackedLatents([row]).samples(), len(model.net.down_blocks)
        passes = PackedPasses(row.passes(), sample.shape[1:], depth, sample.device)
        timesteps = torch.tensor([row.timestep])
        weights = weights.with_adapters([row.adapters])
        return unet_forward(weights, passes, sample[None], timesteps, kinds)


def net_output(
    model: Model, x: torch.Tensor, timestep: float, job: EditJob, prompt: Conditioning
) -> torch.Tensor:
    """Diffusers' net, as it is set, on all tokens [N, in] or a whole sample [in_channels, h, w]."""
    embeddings = {name: torch.from_numpy(array)[None] for name, array in prompt.items()}
    with torch.inference_mode():
        if model.flux:
            _, height, width = job.moments.shape
            grid = height // 2, width // 2
            ids = model.pipeline._prepare_latent_image_ids(1, *grid, x.device, x.dtype)
            scale, text = job.request.settings.guidance_scale, embeddings["prompt_embeds"]
            guidance = torch.tensor([scale]) if model.net.config.guidance_embeds else None
            answer: torch.Tensor = model.net(
                x[None], text, embeddings["pooled"], torch.tensor([timestep / 1000]), ids,
                torch.zeros(text.shape[1], 3), guidance,
            )[0]  # fmt: skip
            return answer
        height, width = job.edit_mask.shape
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32)
        added = {"text_embeds": embeddings.get("pooled"), "time_ids": sizes}
        of_unet: torch.Tensor = model.net(
            x[None], torch.tensor([timestep]), embeddings["prompt_embeds"],
            added_cond_kwargs=added if "pooled" in embeddings else None,
        )[0]  # fmt: skip
        return of_unet


@pytest.mark.parametrize("kind", KINDS)
def test_inactive_tokens_are_the_template_s_whatever_loras_the_row_has(
    model: Model, kind: str
) -> None:
    """Oracle: diffusers' net with the LoRAs set by PEFT, all tokens in it, whose inactive ones
    hooks keep as the same net without LoRAs has made them of the template. Where nothing keeps
    them, as where LoRAs change what stands for them, the answer is another one.
    """
    rng = fresh_rng()
    while True:  # until the picture has more tokens than the mask
        job = encode_case(model.encoder, model.case(rng, guidance_scale=1.0), "r")
        job = replace(job, edit_mask=np.zeros_like(job.edit_mask))
        job.edit_mask[:5, :5] = 255
        counts = model.adapter.tokens(job)
        if 0 < counts.active < counts.total:
            break
    primed = cached_rows.Primed(model.adapter, model.encoder, job)
    replay = Replay(model.adapter)
    row: Any = cached_rows.cached(replay, job, primed)
    loras: Asked = [(0, 0.7), (2, -0.4)]
    model.adapter.attach(row, job, tuple([(model.sets[n], scale) for n, scale in loras]))
    template, empty = primed.row.template, model.encoder.encode_prompt("")
    for step in range(2):
        row.entry = replay.next_read(row)
        anchor, timestep = row.entry.anchor, model.adapter.sigmas(job)[step][1]
        if model.flux:
            model_input, index = pass_inputs(row)[0], row.image.unmasked.ids
            active, [template_tokens] = row.image.masked.ids, model_input.cached
            entered = torch.empty(counts.total, model_input.tokens.shape[1])
            entered[active], entered[index] = model_input.tokens, template_tokens.tokens()
            primed_on = template.at(torch.tensor(anchor.sigma))
            hooks, inactive, at_hand = flux_hooks, {counts.total: index}, frozenset({0})
        else:
            [entered] = PackedLatents([row]).samples()
            primed_on = template.at(anchor.timestep)
            active, (_, height, width) = row.inactive.active, entered.shape
            sizes = level_sizes(height, width, len(model.net.down_blocks))
            inactive = {
                h * w: torch.from_numpy(np.setdiff1d(np.arange(h * w), active[level]))
                for level, (h, w) in enumerate(sizes)
            }
            hooks, at_hand = unet_hooks, first_blocks(model.net)
        recorded = Recorded()
        model.set(())
        with hooks(model.net, recorded):
            net_output(model, primed_on, anchor.timestep, job, empty)
        model.set(loras)
        moving = net_output(model, entered, timestep, job, job.conditioning)
        with hooks(model.net, Frozen(recorded, inactive, kind, at_hand)):
            frozen = net_output(model, entered, timestep, job, job.conditioning)
        result = answered(model, row, (kind,) * model.adapter.blocks)
        if model.flux:
            frozen, moving = frozen[:, active], moving[:, active]
        cached_rows.assert_equal(result.numpy(), frozen.numpy())
        if kind != "dense":
            assert (result - moving).abs().max() > 2 * tolerance(frozen.numpy())
        replay.step([row], (kind,) * model.adapter.blocks)


def test_a_row_takes_its_loras_between_two_steps(model: Model) -> None:
    """Oracle: all steps without, and then all with, each as the pipelines have them."""
    case = model.case(fresh_rng())
    job = encode_case(model.encoder, case, "r")
    row = model.adapter.dense_row(job)
    model.adapter.step([row], None)
    model.adapter.attach(row, job, ((model.sets[0], 1.0),))
    late = model.ran([row])[0]
    never, always = model.alone(case, []), model.alone(case, [(0, 1.0)])
    assert np.abs(late - never).max() > 1e-3
    assert np.abs(late - always).max() > 1e-3
    dense_row = model.adapter.dense_row(job)
    model.adapter.attach(dense_row, job, ((model.sets[0], 1.0),))
    model.adapter.attach(dense_row, job, ())
    assert np.array_equal(model.ran([dense_row])[0], never)


def test_what_does_not_fit_the_model_is_refused_in_a_sentence(model: Model) -> None:
    name = next(iter(model.adapter.places))  # type: ignore[attr-defined]
    fits = Factors(torch.zeros(2, 8), torch.zeros(8, 2))
    with pytest.raises(ValueError, match="not a layer that an adapter may change"):
        model.adapter.low_rank({"no.such.layer": fits})
    with pytest.raises(ValueError, match="has factors of 2x9999"):
        model.adapter.low_rank({name: Factors(torch.zeros(2, 9999), torch.zeros(8, 2))})


def test_columns_of_an_update_compute_the_ranks_that_they_need() -> None:
    """Oracle: those columns of the whole update."""
    down = torch.randn(9, 5)
    parts = tuple([Part(torch.randn(4, 3), 4 * n, 3 * n) for n in range(3)])
    x, whole = torch.randn(7, 5), torch.zeros(7, 12)
    Update(down, parts).add_to(whole, x, 0.5)
    for begin, end, ranks in ((4, 8, 3), (2, 6, 6), (0, 12, 9), (9, 11, 3)):
        columns, tensor = Update(down, parts).columns(begin, end), torch.zeros(7, end - begin)
        columns.add_to(tensor, x, 0.5)
        assert torch.allclose(tensor, whole[:, begin:end], atol=1e-6)
        assert columns.down.shape == (ranks, 5)
