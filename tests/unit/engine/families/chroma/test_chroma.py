"""Chroma against diffusers' own pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import WORDS, Case, config_of, encode_case, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_chroma import build_tiny_chroma
from tests.support import cached_rows, own_rows
from tests.support.cached_rows import assert_equal, result
from tests.support.lora_oracle import read
from tests.support.ranks import check_ranks

LENGTH = 64
LONG = "two cats and " * 8
"""Cut: it has no padding."""


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.folder = folder
        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        # Which it asks for, and its transformers have not.
        self.pipeline.transformer.register_to_config(guidance_embeds=False)
        self.as_it_is: Callable[..., Any] = self.pipeline._prepare_attention_mask
        self.pipeline._prepare_attention_mask = self.boolean
        config = config_of(folder, model={"max_sequence_length": LENGTH})
        self.encoder, self.adapter = load_encoder(config), load_adapter(config)
        self.replay = Replay(self.adapter)

    def boolean(self, **asked: Any) -> Any:
        """The pipeline's mask, of a form in which attention leaves out what it covers."""
        it_is = self.as_it_is(**asked)
        return None if it_is is None else it_is > 0

    def case(self, seed: int, **settings: Any) -> Case:
        """A random edit, guided every other time."""
        rng = np.random.default_rng(seed)
        scale = float(rng.uniform(1.5, 6.0)) if seed % 2 else 1.0
        away = {"negative_prompt": str(rng.choice(WORDS))} if seed % 2 else {}
        case = random_case(rng, **{"guidance_scale": scale, "cache": "off", **away, **settings})
        prompt = LONG if seed % 3 == 2 else case.prompt
        return replace(case, prompt=prompt, mask=mask_for_model(case.mask, self.adapter.spec))

    def job(self, seed: int, **settings: Any) -> Any:
        return encode_case(self.encoder, self.case(seed, **settings), f"edit-{seed}")

    def oracle(self, case: Case) -> NDArray[np.float32]:
        """[C, h, w] of the pipeline."""
        pipe = self.pipeline
        tokens = diffusers_edit(
            pipe, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            max_sequence_length=LENGTH, output_type="latent",
        )  # fmt: skip
        latents = pipe._unpack_latents(tokens, *case.mask.shape, pipe.vae_scale_factor)
        found: NDArray[np.float32] = latents[0].float().numpy()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(build_tiny_chroma(tmp_path_factory.mktemp("models") / "chroma"))


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts of any length and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    lengths = {len(job.conditioning["prompt_embeds"]) for job in jobs}
    assert min(lengths) < 20
    assert max(lengths) == LENGTH
    rows: list[Any] = [model.adapter.dense_row(job) for job in jobs]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_the_pipelines_own_mask_leaves_nothing_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds 1 where a token is seen: what it answers is not what padding left out answers."""
    case = model.case(0, num_inference_steps=3, strength=1.0)
    row = model.adapter.dense_row(encode_case(model.encoder, case, "masked"))
    found = result(model.replay, row)
    monkeypatch.setattr(model.pipeline, "_prepare_attention_mask", model.as_it_is)
    assert np.abs(found - model.oracle(case)).max() > 1e-2


@pytest.mark.parametrize("kind", cached_rows.KINDS)
def test_with_all_tokens_active_a_cached_row_is_a_dense_one(model: Model, kind: str) -> None:
    for seed in (1, 2):
        job = model.job(seed, num_inference_steps=3, strength=1.0)
        cached_rows.check_all_active(model.replay, model.encoder, job, kind)


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    jobs = [model.job(seed) for seed in range(20, 25)]
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)


def test_anchors_of_its_own_are_dense_steps(model: Model) -> None:
    job = model.job(1, num_inference_steps=6, strength=1.0, mask_ring=1)
    own_rows.check_dense_anchors(model.adapter, job)


def test_ranks_answer_what_one_does(model: Model) -> None:
    jobs = [model.job(seed, num_inference_steps=3) for seed in (4, 8)]
    for kind in ("project", "kv"):
        check_ranks(model.adapter, model.encoder, jobs, kind)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_loras_are_those_that_diffusers_loads(model: Model, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write(file, of_model(model.pipeline.transformer, 5))
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


def test_int8_weights_serve_it(model: Model) -> None:
    adapter = load_adapter(
        config_of(
            model.folder,
            model={"weights": "int8", "max_sequence_length": LENGTH},
        )
    )
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    job = model.job(4, num_inference_steps=3)
    plain = result(model.replay, model.adapter.dense_row(job))
    found = result(Replay(adapter), adapter.dense_row(job))
    assert 0 < np.abs(found - plain).mean() < 0.05 * np.abs(plain).mean()


def test_prompts_together_are_read_as_each_alone(model: Model) -> None:
    prompts = ["", "a red star", LONG]
    together = model.encoder.encode_prompts(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(found["prompt_embeds"], alone)
        used = model.encoder.text_encoders["text_encoder"].read_of(prompt).used
        assert len(alone) == min(used + 1, LENGTH)
