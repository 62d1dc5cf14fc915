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

from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers.low_rank import Factors, LowRankSet, Update
from maskserve_engine.layers.shrink_expand import Part
from maskserve_harness.benchmarks.replay import Replay
from tests.fakes.jobs import Case, config_of, encode_case, random_case, tolerance, unet_case
from tests.fakes.pipelines import diffusers_edit, diffusers_latents
from tests.fakes.tiny_unet import VARIANTS
from tests.support import cached_rows
from tests.support.cached_rows import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
LORAS = 3
Asked = Sequence[tuple[int, float]]
"""Numbers of LoRAs, and their scales."""


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
        torch.seed()
        rank, alpha = int(torch.randint(1, 5, ())), int(torch.randint(1, 5, ()))
        places: Any = self.adapter
        self.net.add_adapter(
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(places._places)), name
        )
        self.net.requires_grad_(False)
        factors = {}
        for path, layer in self.net.named_modules():
            if hasattr(layer, "lora_A") and name in layer.lora_A:
                down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
                for own in (down, up):
                    own.copy_(torch.randn_like(own) * 0.3 / own[0].numel() ** 0.5)
                factors[path] = Factors(down.clone(), up * (alpha / rank))
        assert len(factors) == len(places._places)
        return self.adapter.low_rank(factors)

    def case(self, rng: np.random.Generator, **asked: Any) -> Case:
        """An edit of more than a few pixels."""
        asked = {"num_inference_steps": 3, "strength": 1.0, **asked}
        while True:
            case = random_case(rng, **asked) if self.flux else unet_case(rng, **asked)
            if case.mask.mean() > 40:
                return case

    def oracle(self, case: Case, loras: Asked) -> NDArray[np.float32]:
        """[C, h, w] latents of the pipeline with these LoRAs."""
        if loras:
            self.net.enable_adapters()
            names, scales = zip(*((str(number), scale) for number, scale in loras), strict=True)
            self.net.set_adapters(list(names), list(scales))
        else:
            self.net.disable_adapters()
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


@pytest.fixture(scope="module", params=["fill", "inpaint", *VARIANTS])
def model(
    request: pytest.FixtureRequest, tiny_fill: Path, tiny_inpaint: Path, tiny_unets: dict[str, Path]
) -> Model:
    from diffusers import (
        FluxFillPipeline,
        FluxInpaintPipeline,
        StableDiffusionInpaintPipeline,
        StableDiffusionXLInpaintPipeline,
    )

    flux = {"fill": (FluxFillPipeline, tiny_fill), "inpaint": (FluxInpaintPipeline, tiny_inpaint)}
    if request.param in flux:
        cls, folder = flux[request.param]
        return Model(folder, cls.from_pretrained(folder), "transformer")
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


@pytest.mark.parametrize("loras", MIXES, ids=str)
def test_a_row_equals_the_pipeline_with_its_loras(model: Model, loras: Asked) -> None:
    case = model.case(np.random.default_rng())
    expected = model.oracle(case, loras)
    assert np.abs(model.alone(case, loras) - expected).max() <= tolerance(expected)
    if loras:
        assert np.abs(model.oracle(case, []) - expected).max() > 100 * tolerance(expected)


def test_rows_with_other_loras_share_a_batch(model: Model) -> None:
    """Each is as it is by itself, and one without any is bit for bit what it is among its like."""
    rng = np.random.default_rng()
    mixes = (*MIXES, [(0, 1.0)], [(0, 1.0)], [(1, 0.3), (0, 2.0)])
    cases = [model.case(rng) for _ in mixes]
    if not model.flux:  # rows of a UNet share a batch at equal size
        cases = [cases[0]] * len(mixes)
    rows = [
        model.row(case, loras, str(n))
        for n, (case, loras) in enumerate(zip(cases, mixes, strict=True))
    ]
    plain = [model.row(case, [], str(n)) for n, case in enumerate(cases)]
    found, without = model.ran(rows), model.ran(plain)
    for number, (case, loras) in enumerate(zip(cases, mixes, strict=True)):
        expected = model.oracle(case, loras)
        # Another batch shape rounds otherwise, and the LoRAs drawn here enlarge it.
        assert np.abs(found[number] - expected).max() <= 3 * tolerance(expected)
        if not loras:
            assert np.array_equal(found[number], without[number])


def test_a_scale_of_nothing_is_no_lora_bit_for_bit(model: Model) -> None:
    case = model.case(np.random.default_rng())
    assert np.array_equal(model.alone(case, [(0, 0.0)]), model.alone(case, []))


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_tokens_active_a_cached_row_with_loras_equals_a_dense_one(
    model: Model, kind: str
) -> None:
    """The template was primed without any: nothing of it is read."""
    job = encode_case(model.encoder, model.case(np.random.default_rng()), "r")
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    loras = ((model.sets[0], 0.7), (model.sets[2], -0.4))
    replay = Replay(model.adapter)
    row = cached_rows.cached(replay, job, cached_rows.Primed(model.adapter, model.encoder, job))
    dense = model.adapter.dense_row(job)
    for each in (row, dense):
        model.adapter.attach(each, job, loras)
    found, expected = (cached_rows.result(replay, each, kind) for each in (row, dense))
    cached_rows.assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_cached_rows_with_other_loras_share_a_batch(model: Model, kind: str) -> None:
    """Cached and dense rows, with one LoRA, two, the same one, and none: each as by itself."""
    case = model.case(np.random.default_rng())
    jobs = [encode_case(model.encoder, replace(case, seed=n), str(n)) for n in range(6)]
    mixes = ([(0, 1.0)], [(1, -0.6)], [], [(0, 0.4), (2, 0.5)], [(0, 1.0)], [(2, 1.0)])
    template = cached_rows.Primed(model.adapter, model.encoder, jobs[0])
    replay = Replay(model.adapter)

    def rows() -> list[Any]:
        made: list[Any] = []
        for number, (job, loras) in enumerate(zip(jobs, mixes, strict=True)):
            dense = number % 3 == 1
            row = model.adapter.dense_row(job) if dense else cached_rows.cached(
                replay, job, template
            )  # fmt: skip
            model.adapter.attach(row, job, tuple([(model.sets[n], s) for n, s in loras]))
            made.append(row)
        return made

    alone, together = rows(), rows()
    for row in alone:
        cached_rows.run(replay, [row], kind)
    cached_rows.run(replay, together, kind)
    for one, other in zip(alone, together, strict=True):
        cached_rows.assert_equal(other.result().array(), one.result().array())


def test_inactive_tokens_are_never_given_to_a_lora(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks that read keys and values: no product of theirs sees more rows than are active."""
    if not model.flux:
        return  # what leads into a UNet's stack and out of it is computed of the whole picture
    rng, text, job = np.random.default_rng(), 0, None
    while job is None or model.adapter.tokens(job).total <= 1 + text:  # too small a picture to tell
        job = encode_case(model.encoder, model.case(rng), "r")
        text = len(job.conditioning["prompt_embeds"])
    job = replace(job, edit_mask=np.zeros_like(job.edit_mask))
    job.edit_mask[:5, :5] = 255
    replay = Replay(model.adapter)
    row: Any = cached_rows.cached(
        replay, job, cached_rows.Primed(model.adapter, model.encoder, job)
    )
    model.adapter.attach(row, job, ((model.sets[0], 1.0),))
    counts = model.adapter.tokens(job)
    seen: list[int] = []
    add_to = Update.add_to

    def watched(update: Update, out: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        seen.append(x.shape[-2])
        add_to(update, out, x, scale)

    monkeypatch.setattr(Update, "add_to", watched)
    replay.step([row], ("kv",) * model.adapter.blocks)
    assert counts.active < max(seen) <= counts.active + text < counts.total


def test_a_row_takes_its_loras_between_two_steps(model: Model) -> None:
    """Oracle: all steps without, and then all with, each as the pipelines have them."""
    case = model.case(np.random.default_rng())
    job = encode_case(model.encoder, case, "r")
    row = model.adapter.dense_row(job)
    model.adapter.step([row], None)
    model.adapter.attach(row, job, ((model.sets[0], 1.0),))
    late = model.ran([row])[0]
    never, always = model.alone(case, []), model.alone(case, [(0, 1.0)])
    assert np.abs(late - never).max() > 1e-3
    assert np.abs(late - always).max() > 1e-3
    again = model.adapter.dense_row(job)
    model.adapter.attach(again, job, ((model.sets[0], 1.0),))
    model.adapter.attach(again, job, ())
    assert np.array_equal(model.ran([again])[0], never)


def test_what_does_not_fit_the_model_is_refused_in_a_sentence(model: Model) -> None:
    name = next(iter(model.adapter._places))  # type: ignore[attr-defined]
    fits = Factors(torch.zeros(2, 8), torch.zeros(8, 2))
    with pytest.raises(ValueError, match="no layer that an adapter may change"):
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
        own, found = Update(down, parts).columns(begin, end), torch.zeros(7, end - begin)
        own.add_to(found, x, 0.5)
        assert torch.allclose(found, whole[:, begin:end], atol=1e-6)
        assert own.down.shape == (ranks, 5)
