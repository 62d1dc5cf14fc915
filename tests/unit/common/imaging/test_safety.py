"""The operator's check sees each picture, and what it does not let pass is not answered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskserve_common.config import Config, ConfigError, SafetyConfig
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import EngineFailed, Refused
from maskserve_common.imaging.safety import Check, load_check
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import finish_edit
from maskserve_triton.preprocess import prepare_edit
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import blob_mask, encode, scene

SOURCE, MASK = scene(40, 56), blob_mask(40, 56)


def answer(check: Check) -> bytes:
    accepted = accept_edit(EditSettings(), b"a red star", FILL_SPEC, Config())
    prepared_edit = prepare_edit(encode(SOURCE), encode(MASK), accepted, FILL_SPEC, Config())
    return finish_edit(255 - prepared_edit.pixels, prepared_edit.context, check=check)


def test_it_sees_source_prompt_and_picture() -> None:
    calls = []

    def check(source: Image.Image, prompt: str, image: Image.Image) -> None:
        calls.append((np.asarray(source), prompt, np.asarray(image)))

    assert answer(check)
    ((source, prompt, picture),) = calls
    np.testing.assert_array_equal(source, SOURCE)
    assert prompt == "a red star"
    np.testing.assert_array_equal(picture, np.where(MASK[..., None] > 0, 255 - SOURCE, SOURCE))


def test_what_it_refuses_is_told_in_its_words() -> None:
    with pytest.raises(Refused, match="no stars") as caught:
        answer(lambda source, prompt, picture: "no stars today" if "star" in prompt else None)
    assert str(caught.value) == "[REFUSED] no stars today"


def test_what_it_cannot_judge_does_not_pass() -> None:
    def fails(source: Image.Image, prompt: str, picture: Image.Image) -> None:
        raise ValueError("secret")

    with pytest.raises(EngineFailed) as caught:
        answer(fails)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "named", ["no_such_module:check", "json:no_such_function", "json:__name__", "/no/such.py:check"]
)
def test_a_check_that_is_not_there_is_told_at_start(named: str) -> None:
    with pytest.raises(ConfigError, match=r"safety\.check: " + named):
        load_check(Config(safety=SafetyConfig(check=named)))


def test_a_check_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def check(source, prompt, made):\n    return 'no'\n")
    loaded_check = load_check(Config(safety=SafetyConfig(check=f"{tmp_path}/own.py:check")))
    assert loaded_check is not None
    with pytest.raises(Refused, match="no"):
        answer(loaded_check)


def test_a_function_and_a_model_are_not_both_asked() -> None:
    with pytest.raises(ConfigError, match=r"safety\.check: cannot be combined with safety\.model"):
        load_check(Config(safety=SafetyConfig(check="json:dumps", model="judge")))


def test_none_is_asked_for() -> None:
    assert load_check(Config()) is None
