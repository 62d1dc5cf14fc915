"""FLUX.2 klein against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from maskserve_benchmarks.steps.replay import Replay, plan_of_kinds
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.families.flux2.adapter import Flux2Adapter
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.spec.control_nets import check_config
from maskserve_engine.spec.model_spec import anchor_stride
from maskserve_engine.stages.latents import to_model
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import blended_edit
from tests.fakes.tiny_flux2 import build_tiny_flux2
from tests.support import cached_rows
from tests.support.cached_rows import Primed, assert_equal, cached, result
from tests.support.lora_oracle import read
from tests.support.ranks import check_ranks

pytestmark = pytest.mark.spread("model")


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.folder = folder
        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        if hasattr(
            self.pipeline.image_processor, "check_image_input"
        ):  # it refuses pictures as small as these
            self.pipeline.image_processor.check_image_input = lambda image: None
        config = config_of(folder, model={"max_sequence_length": 48})
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit; a base model's is guided every other time."""
        rng = np.random.default_rng(seed)
        if self.adapter.spec.guidance == "none":
            settings = {"guidance_scale": None, **settings}
        elif seed % 2:
            scale = float(rng.uniform(1.5, 6.0))
            settings = {"guidance_scale": scale, "negative_prompt": "", **settings}
        else:
            settings = {"guidance_scale": 1.0, **settings}
        case = random_case(rng, **{"cache": "off", **settings})
        return replace(case, mask=mask_for_model(case.mask, self.adapter.spec))

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    @property
    def exact(self) -> bool:
        return self.adapter.spec.semantics.exact

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline, as the transformer has them."""
        if self.exact:
            latents = blended_edit(
                self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
                max_sequence_length=48, output_type="latent",
            )  # fmt: skip
            return to_model(latents, self.adapter.spec.latents)[0].numpy()
        latents = self.pipeline(
            prompt=case.prompt,
            image=Image.fromarray(case.pixels),
            mask_image=Image.fromarray(case.mask),
            num_inference_steps=case.settings.num_inference_steps,
            strength=case.settings.strength,
            guidance_scale=case.settings.guidance_scale or 4.0,
            generator=torch.Generator("cpu").manual_seed(case.seed),
            max_sequence_length=48,
            output_type="latent",
        ).images
        return to_model(latents, self.adapter.spec.latents)[0].numpy()


@pytest.fixture(scope="module", params=["distilled", "base", "exact"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, exact = tmp_path_factory.mktemp("models") / request.param, request.param == "exact"
    return Model(build_tiny_flux2(folder, distilled=request.param == "distilled", exact=exact))


@pytest.mark.each_value
def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths and guidance of their own, in one batch that rows leave."""
    cases = [model.case(seed) for seed in range(6)]
    rows: list[Any] = [
        model.adapter.dense_row(encode_case(model.encoder, case, str(i)))
        for i, case in enumerate(cases)
    ]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


@pytest.mark.parametrize("steps", [1, 4, 28, 50])
@pytest.mark.parametrize("tokens", [16, 1024, 4096, 4300, 4301, 9000])
def test_schedules_are_shifted_as_the_pipelines_are(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    shift = Flux2Adapter.shift({}, tokens, steps)
    assert shift == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


def test_a_distilled_model_has_an_anchor_for_each_of_its_four_steps(tmp_path: Path) -> None:
    """Where its own schedule has them."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    folder = build_tiny_flux2(tmp_path / "klein")
    adapter: Any = load_adapter(config_of(folder))
    sampler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    steps = adapter.spec.steps_default(0)
    anchors = adapter.anchors(4096, steps, anchor_stride(0, adapter.spec))
    sampler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(4096, steps)
    )
    sigmas = [anchor.sigma for anchor in anchors]
    assert sigmas == pytest.approx(sampler.sigmas[:4].tolist(), abs=1e-6)
    assert sigmas == pytest.approx([1.0, 0.967, 0.908, 0.767], abs=1e-3)


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)
    cached_rows.check_step_without_anchor(model.replay, model.encoder, jobs[0])


def test_a_context_that_is_computed_makes_a_cached_row_dense(model: Model) -> None:
    """References that are exact need not be computed for that."""
    job = model.job(1, num_inference_steps=3, strength=1.0)
    for kind in cached_rows.KINDS if model.exact else ("dense",):
        cached_rows.check_all_active(model.replay, model.encoder, job, kind)
    if model.exact:
        return
    job = replace(job, edit_mask=np.full_like(job.edit_mask, 255))
    row: Any = cached(model.replay, job, Primed(model.adapter, model.encoder, job))
    dense = result(model.replay, model.adapter.dense_row(job))
    assert np.abs(result(model.replay, row, "kv") - dense).max() > 1e-3


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_loras_of_a_batch_are_those_that_diffusers_loads(model: Model, tmp_path: Path) -> None:
    rows, expected = [], []
    for seed in range(3):
        case, file = (
            model.case(seed, num_inference_steps=3, strength=1.0),
            tmp_path / f"{seed}.safetensors",
        )
        row: Any = model.adapter.dense_row(encode_case(model.encoder, case, str(seed)))
        if seed:
            write(file, of_model(model.pipeline.transformer, seed))
            parts = read(file, model.folder)
            adapters = ((model.adapter.low_rank(parts["denoiser"]), 0.7),)
            model.adapter.attach(row, encode_case(model.encoder, case, str(seed)), adapters)
            model.pipeline.load_lora_weights(str(file), adapter_name="x")
            model.pipeline.set_adapters("x", 0.7)
        expected.append(model.oracle(case))
        if seed:
            model.pipeline.delete_adapters("x")
        rows.append(row)
    cached_rows.run(model.replay, rows, "dense")
    for row, wanted in zip(rows, expected, strict=True):
        assert_equal(row.result().array(), wanted)


def test_what_klein_does_not_take_is_refused_in_a_sentence(model: Model) -> None:
    facts, config = model.adapter.spec, config_of(model.folder)
    edit_settings = EditSettings(negative_prompt="x", guidance_scale=None)
    with pytest.raises(InvalidRequest, match=r"negative_prompt.*cannot be used by this model"):
        accept_edit(edit_settings, b"a", facts, config, None)
    if facts.guidance == "none":
        with pytest.raises(InvalidRequest, match=r"guidance_scale.*is not an input of this model"):
            accept_edit(EditSettings(guidance_scale=4.0), b"a", facts, config, None)
    with pytest.raises(ValueError, match="takes no ControlNets"):
        check_config({"_class_name": "FluxControlNetModel"}, facts)


def test_a_mask_keeps_no_share_of_the_source_in_a_thin_stroke(model: Model) -> None:
    """The pipeline samples it between four pixels of a cell; grown to latents alone it would be
    left at a part.
    """
    facts = model.adapter.spec
    stroke = np.zeros((64, 64), np.uint8)
    stroke[9:11] = 255
    adapter: Any = model.adapter
    sample = adapter._preparation.sampled

    def sampled(mask: NDArray[np.uint8]) -> set[float]:
        given = torch.from_numpy(mask > 127).float()[None, None]
        return set(sample(given, (16, 16)).flatten().tolist())

    assert sampled(mask_for_model(stroke, facts)) == {0.0, 1.0}
    assert sampled(mask_for_model(stroke, replace(facts, mask_latents=1))) - {0.0, 1.0}


@pytest.mark.parametrize("kind", ["dense", "project", "kv"])
def test_ranks_answer_what_one_does(model: Model, kind: str) -> None:
    jobs = [model.job(seed, num_inference_steps=3) for seed in (3, 4)]
    check_ranks(model.adapter, model.encoder, jobs, kind)


def test_anchors_of_its_own_hold_the_context_too(model: Model) -> None:
    """At each step an anchor: dense. Between anchors the context is foretold with the rest."""
    job = model.job(3, num_inference_steps=6, strength=1.0, mask_ring=1)
    dense = result(model.replay, model.adapter.dense_row(job))

    def own(*steps: int) -> tuple[Any, NDArray[np.float32]]:
        plan = RefreshSchedule(frozenset(steps), "model", True)
        row: Any = model.adapter.anchored_row(job, plan)
        reader, kinds = StepCacheReader(row, model.adapter.blocks), ("kv",) * model.adapter.blocks
        while row.step < row.steps:
            read: Any = None if row.step in steps else reader.turn_to(row.step)
            model.adapter.step([row], plan_of_kinds(kinds) if read else None, [read])
        return row, row.result().array()

    row, found = own(*range(6))
    gh, gw = row.grid
    active = np.zeros(gh * gw, bool)
    active[row.inactive.active] = True
    at = active.reshape(gh, gw).repeat(2, 0).repeat(2, 1)
    assert_equal(found[:, at], dense[:, at])
    row, near = own(0, 3)
    tokens = len(row.prompt.text) + (1 + (not model.exact)) * gh * gw - int(active.sum())
    assert (
        row.step_cache.nbytes == model.adapter.blocks * tokens * 4 * 4 * model.adapter.weights.width
    )
    assert 0 < np.abs(near[:, at] - dense[:, at]).max() < np.abs(dense).max()


def test_int8_weights_serve_it(model: Model) -> None:
    """Near to the plain ones, and cached rows beside dense ones of the same weights."""
    adapter = load_adapter(
        config_of(
            model.folder,
            model={"weights": "int8", "max_sequence_length": 48},
        )
    )
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    replay = Replay(adapter)
    jobs = [model.job(seed, num_inference_steps=3) for seed in range(20, 24)]
    cached_rows.check_mixed_batch(replay, model.encoder, jobs, "kv")
    job = jobs[0]
    plain = result(model.replay, model.adapter.dense_row(job))
    found = result(replay, adapter.dense_row(job))
    assert 0 < np.abs(found - plain).max() < 0.1 * np.abs(plain).max()
