"""The particulars of Stable Diffusion 3.5: sizes that it knows, and models without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_engine.families.registry import load_adapter
from tests.fakes.jobs import config_of
from tests.support.family_cases import FamilyModel

LENGTH = 16


@pytest.fixture(params=["sd3-large", "sd3-medium"])
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    return family_model(request.param)


def test_a_prompt_is_counted_with_its_clip_tokens(model: FamilyModel) -> None:
    conditioning = model.job(0).conditioning["prompt_embeds"]
    assert model.adapter.spec.text_tokens(LENGTH) == len(conditioning)


def test_ranks_of_a_model_without_a_cache_have_a_pass_each(model: FamilyModel) -> None:
    """A rank has no second attention over the tokens of the others."""
    job = model.job(4)
    guided = replace(job, negative=job.conditioning)
    ranks = [model.adapter.most_ranks(one) for one in (job, guided)]
    assert (ranks == [1, 2]) is not model.adapter.spec.caches


def test_a_picture_longer_than_the_model_knows_is_refused(model: FamilyModel) -> None:
    long = replace(
        model.edit(0), pixels=np.zeros((16, 136, 3), np.uint8), mask=np.zeros((16, 136), np.uint8)
    )
    with pytest.raises(InvalidRequest, match=r"IMAGE: is longer than 128 pixels"):
        model.adapter.prepare(model.encoded(long))


def test_a_cache_that_a_model_does_not_have_is_refused_in_a_sentence(model: FamilyModel) -> None:
    config = config_of(model.folder)
    if model.adapter.spec.caches:
        load_adapter(config)
        return
    with pytest.raises(ConfigError, match=r"\[cache\] enabled: this model is served dense only"):
        load_adapter(config)
