"""The particulars of Chroma: prompts without padding, and the mask of its pipeline."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cached_rows import assert_equal, result
from tests.support.family_cases import FamilyModel

LENGTH = 64


@pytest.fixture
def model(family_model: Callable[[str], FamilyModel]) -> FamilyModel:
    return family_model("chroma")


def test_the_contract_has_short_prompts_and_one_that_is_cut(model: FamilyModel) -> None:
    lengths = [len(model.job(seed).conditioning["prompt_embeds"]) for seed in range(6)]
    assert min(lengths) < 20
    assert max(lengths) == LENGTH


def test_the_pipelines_own_mask_leaves_nothing_out(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds 1 where a token is seen. So the pipeline's answer is not the one without padding."""
    edit = model.edit(0, num_inference_steps=3, strength=1.0)
    latents = result(model.replay, model.adapter.dense_row(model.encoded(edit)))
    monkeypatch.delattr(model.pipeline, "_prepare_attention_mask")  # the class has its own
    assert np.abs(latents - model.oracle(edit)).max() > 1e-2


def test_prompts_together_are_read_as_each_alone(model: FamilyModel) -> None:
    prompts = ["", "a red star", model.case.long_prompt]
    together = model.encoder.encode_prompts(prompts)
    for prompt, conditioning in zip(prompts, together, strict=True):
        alone = model.encoder.encode_prompt(prompt)["prompt_embeds"]
        assert_equal(conditioning["prompt_embeds"], alone)
        used = model.encoder.text_encoders["text_encoder"].read_of(prompt).used
        assert len(alone) == min(used + 1, LENGTH)
