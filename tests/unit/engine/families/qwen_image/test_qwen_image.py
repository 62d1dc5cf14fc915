"""Qwen-Image against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_triton.accept import accept_edit
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import Case, config_of, encode_case, guided, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_qwen_image import build_tiny_qwen_image
from tests.support import cached_rows, own_rows
from tests.support.cached_rows import assert_equal, result
from tests.support.lora_oracle import read
from tests.support.ranks import check_ranks

LONG = "two cats and " * 24


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.folder = folder
        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        config = config_of(folder)
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit, with a negative prompt every other time."""
        rng = np.random.default_rng(seed)
        away = guided(rng) if seed % 2 else {}
        steps = int(rng.integers(2, 8))
        asked = {"guidance_scale": None, "num_inference_steps": steps, **away, **settings}
        case = random_case(rng, **{"cache": "off", **asked})
        prompt = LONG if seed % 3 == 2 else case.prompt
        return replace(case, prompt=prompt, mask=mask_for_model(case.mask, self.adapter.spec))

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline."""
        pipe = self.pipeline
        tokens = diffusers_edit(
            pipe, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            max_sequence_length=320, output_type="latent",
        )  # fmt: skip
        latents = pipe._unpack_latents(tokens, *case.mask.shape, pipe.vae_scale_factor)
        found: NDArray[np.float32] = latents[0, :, 0].float().numpy()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build_tiny_qwen_image(tmp_path_factory.mktemp("models") / "qwen-image"))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts of any length and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    lengths = {len(job.conditioning["prompt_embeds"]) for job in jobs}
    assert min(lengths) < 20
    assert max(lengths) > 150
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_prompts_together_are_read_as_each_alone(model: Model) -> None:
    prompts = ["", "a red star", LONG]
    together = model.encoder.encode_prompts(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(found["prompt_embeds"], alone)
        read = model.encoder.text_encoders["text_encoder"].read_of(prompt)
        assert (read.used, read.cut) == (len(alone), 0)


@pytest.mark.parametrize("kind", cached_rows.KINDS)
def test_with_all_tokens_active_a_cached_row_is_a_dense_one(model: Model, kind: str) -> None:
    for seed in (1, 2):
        job = model.job(seed, num_inference_steps=3, strength=1.0)
        cached_rows.check_all_active(model.replay, model.encoder, job, kind)


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)
    cached_rows.check_step_without_anchor(model.replay, model.encoder, jobs[0])


def test_entries_do_not_depend_on_how_long_a_prompt_is(model: Model) -> None:
    """A picture's tokens lie where they do for any prompt: so the key does not say its length."""
    assert model.adapter.spec.key_text(300, 24) == 0
    for text in (1, 300):
        found = model.adapter.positions(4, 6, text)[text:]
        assert_equal(found.real.numpy(), model.adapter.positions(4, 6, 5)[5:].real.numpy())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize(
    "form",
    ["transformer.{}.lora_A.weight", "{}.lora_down.weight", "diffusion_model.{}.lora_A.weight"],
)
def test_loras_are_those_that_diffusers_loads(model: Model, form: str, tmp_path: Path) -> None:
    """Of every layer, in diffusers' form, that of Lightning's files and ComfyUI's."""
    file = tmp_path / "a.safetensors"
    write(file, of_model(model.pipeline.transformer, 5, form))
    case = model.case(4, num_inference_steps=3, strength=1.0)
    job = encode_case(model.encoder, case, "lora")
    row: Any = model.adapter.dense_row(job)
    lora = model.adapter.low_rank(read(file, model.folder)["denoiser"])
    model.adapter.attach(row, job, ((lora, 0.7),))
    model.pipeline.load_lora_weights(str(file), adapter_name="x")
    model.pipeline.set_adapters("x", 0.7)
    try:
        expected = model.oracle(case)
    finally:
        model.pipeline.delete_adapters("x")
    assert np.abs(expected - model.oracle(case)).max() > 1e-2
    assert_equal(result(model.replay, row), expected)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("steps", [4, 8])
def test_lightning_goes_by_a_sampler_of_its_own(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Its shift is 3 at all sizes and its end is not stretched, as its publisher samples it."""
    folder, file = tmp_path / "lightning", tmp_path / "a.safetensors"
    path = Path(shutil.copytree(model.folder, folder)) / "scheduler" / "scheduler_config.json"
    own = {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | own), "utf-8")
    adapter = load_adapter(config_of(folder))
    write(file, of_model(model.pipeline.transformer, 5, "{}.lora_down.weight"))
    case = model.case(4, num_inference_steps=steps, strength=1.0)
    job = encode_case(model.encoder, case, "lora")
    row: Any = adapter.dense_row(job)
    adapter.attach(row, job, ((adapter.low_rank(read(file, folder)["denoiser"]), 1.0),))
    sampler = type(model.pipeline.scheduler).from_pretrained(path.parent)
    model.pipeline.load_lora_weights(str(file), adapter_name="x")
    try:
        otherwise = model.oracle(case)
        monkeypatch.setattr(model.pipeline, "scheduler", sampler)
        expected = model.oracle(case)
    finally:
        model.pipeline.delete_adapters("x")
    assert np.abs(expected - otherwise).max() > 1e-2
    assert_equal(result(Replay(adapter), row), expected)


@pytest.mark.parametrize("kind", cached_rows.KINDS)
def test_ranks_answer_what_one_does(model: Model, kind: str) -> None:
    jobs = [model.job(seed, num_inference_steps=3) for seed in (4, 8)]
    check_ranks(model.adapter, model.encoder, jobs, kind)


def test_anchors_of_its_own_are_dense_steps(model: Model) -> None:
    job = model.job(1, num_inference_steps=6, strength=1.0, mask_ring=1)
    own_rows.check_dense_anchors(model.adapter, job)


def test_int8_weights_serve_it(model: Model) -> None:
    adapter = load_adapter(config_of(model.folder, model={"weights": "int8"}))
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    job = model.job(4, num_inference_steps=3)
    plain = result(model.replay, model.adapter.dense_row(job))
    found = result(Replay(adapter), adapter.dense_row(job))
    assert 0 < np.abs(found - plain).mean() < 0.05 * np.abs(plain).mean()


def test_guidance_that_it_does_not_have_is_refused(model: Model) -> None:
    with pytest.raises(InvalidRequest, match=r"guidance_scale.*is not an input of this model"):
        accept_edit(
            EditSettings(guidance_scale=4.0),
            b"a",
            model.adapter.spec,
            config_of(model.folder),
            None,
        )
