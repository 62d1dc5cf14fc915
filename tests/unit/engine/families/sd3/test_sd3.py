"""Stable Diffusion 3.5 against diffusers' pipeline, and cached rows of it against dense ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import WORDS, Case, config_of, encode_case, random_case
from tests.fakes.loras import of_model, write
from tests.fakes.pipelines import diffusers_edit
from tests.fakes.tiny_sd3 import build_tiny_sd3
from tests.support import cached_rows, own_rows
from tests.support.cached_rows import assert_equal, result
from tests.support.lora_oracle import read
from tests.support.ranks import check_ranks

LENGTH = 16
LONG = "two cats and " * 8
KINDS = {"large": cached_rows.KINDS, "medium": ("dense",)}
"""Of cached rows whose tokens are all active, by the model."""


class Model:
    """Diffusers' pipeline and our parts over the same folder."""

    def __init__(self, folder: Path) -> None:
        from diffusers import DiffusionPipeline

        self.folder = folder
        self.pipeline: Any = DiffusionPipeline.from_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        self.encoder, self.adapter = load_encoder(self.config()), load_adapter(self.config())
        self.replay = Replay(self.adapter)

    def config(self, **model: Any) -> Any:
        own = {"max_sequence_length": LENGTH, **model}
        return config_of(self.folder, model=own, cache={"enabled": self.folder.name == "large"})

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
        [latents] = diffusers_edit(
            self.pipeline, case.pixels, case.mask, case.prompt, case.settings, case.seed,
            max_sequence_length=LENGTH, output_type="latent",
        )  # fmt: skip
        found: NDArray[np.float32] = latents.float().numpy()
        return found


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models") / request.param
    return Model(build_tiny_sd3(folder, medium=request.param == "medium"))


def test_a_prompt_is_counted_with_its_clip_tokens(model: Model) -> None:
    conditioning = model.job(0).conditioning["prompt_embeds"]
    assert model.adapter.spec.text_tokens(LENGTH) == len(conditioning)


def test_dense_rows_of_any_mix_are_the_pipelines(model: Model) -> None:
    """Sizes, strengths, prompts and guidance of their own, in one batch."""
    cases = [model.case(seed) for seed in range(6)]
    rows: list[Any] = [
        model.adapter.dense_row(encode_case(model.encoder, case, str(i)))
        for i, case in enumerate(cases)
    ]
    cached_rows.run(model.replay, rows, "dense")
    for case, row in zip(cases, rows, strict=True):
        assert_equal(row.result().array(), model.oracle(case))


def test_with_all_tokens_active_a_cached_row_is_a_dense_one(model: Model) -> None:
    for seed in (1, 2):
        job = model.job(seed, num_inference_steps=3, strength=1.0)
        for kind in KINDS[model.folder.name]:
            cached_rows.check_all_active(model.replay, model.encoder, job, kind)


def test_cached_rows_change_nothing_of_one_another(model: Model) -> None:
    if not model.adapter.spec.caches:
        return
    jobs = [model.job(seed) for seed in range(20, 25)]
    for kind in ("project", "kv"):
        cached_rows.check_mixed_batch(model.replay, model.encoder, jobs, kind)


def test_anchors_of_its_own_are_dense_steps(model: Model) -> None:
    if not model.adapter.spec.caches:
        return
    job = model.job(1, num_inference_steps=6, strength=1.0, mask_ring=1)
    own_rows.check_dense_anchors(model.adapter, job)


def test_ranks_answer_what_one_does(model: Model) -> None:
    jobs = [model.job(seed, num_inference_steps=3) for seed in (4, 8)]
    if not model.adapter.spec.caches:  # a rank has no second attention over the others' tokens
        guided = replace(jobs[0], negative=jobs[0].conditioning)
        assert [model.adapter.most_ranks(job) for job in (jobs[0], guided)] == [1, 2]
        return
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
    adapter = load_adapter(model.config(weights="int8"))
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    job = model.job(4, num_inference_steps=3)
    plain = result(model.replay, model.adapter.dense_row(job))
    found = result(Replay(adapter), adapter.dense_row(job))
    assert 0 < np.abs(found - plain).mean() < 0.05 * np.abs(plain).mean()


def test_a_picture_longer_than_the_model_knows_is_refused(model: Model) -> None:
    case = model.case(0)
    long = replace(
        case, pixels=np.zeros((16, 136, 3), np.uint8), mask=np.zeros((16, 136), np.uint8)
    )
    with pytest.raises(InvalidRequest, match=r"IMAGE: is longer than 128 pixels"):
        model.adapter.prepare(encode_case(model.encoder, long, "long"))


def test_a_cache_that_a_model_does_not_have_is_refused_in_a_sentence(model: Model) -> None:
    asked = config_of(model.folder)
    if model.adapter.spec.caches:
        load_adapter(asked)
        return
    with pytest.raises(ConfigError, match=r"\[cache\] enabled: this model is served dense only"):
        load_adapter(asked)
