"""The corpus against preprocess itself: the answer that is documented, for every case."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskserve_common.config import Config, ModelConfig
from maskserve_common.contracts.operations import OPERATIONS, parse_operation
from maskserve_common.contracts.settings import dump_settings, parse_settings
from maskserve_common.errors import InvalidRequest, MaskserveError
from maskserve_triton.accept import accept_edit
from maskserve_triton.postprocess import source_and_weights
from maskserve_triton.preprocess import PreparedEdit, prepare_edit
from tests.fakes.corpus.case import Case, Damaged, Refused, Works
from tests.fakes.corpus.collection import edit_cases, sample
from tests.fakes.corpus.settings import KEYS, good_settings
from tests.fakes.hostile import good_inputs
from tests.fakes.model_specs import FILL_SPEC
from tests.fakes.pictures import as_pillow_reads

CONFIG = Config(model=ModelConfig(path="models/demo"))
CASES = edit_cases()
SAME_EVERY_TIME = settings(derandomize=True, deadline=None)


def prepare(inputs: dict[str, bytes]) -> PreparedEdit:
    settings = parse_settings(inputs["SETTINGS"])
    accepted = accept_edit(settings, inputs["PROMPT"], FILL_SPEC, CONFIG)
    return prepare_edit(inputs["IMAGE"], inputs["MASK"], accepted, FILL_SPEC, CONFIG)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case_gets_its_documented_answer(case: Case) -> None:
    inputs = case.inputs
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            result: PreparedEdit | MaskserveError = prepare(inputs)
        except MaskserveError as error:
            result = error
    assert caught_warnings == []
    match case.expected:
        case Refused() as refused:
            assert isinstance(result, MaskserveError)
            assert str(result).startswith(refused.start), str(result)[:200]
            check_message(str(result))
        case Works(source, background):
            assert isinstance(result, PreparedEdit), result
            pasted_over, weights, *_ = source_and_weights(result.context, result.request)
            np.testing.assert_array_equal(pasted_over.convert("RGB"), source)
            if background.any():
                np.testing.assert_array_equal(np.asarray(weights) == 0, background)
        case Damaged() as damaged if isinstance(result, MaskserveError):
            assert str(result).startswith(damaged.refused.start), str(result)[:200]
            check_message(str(result))
        case Damaged():
            pasted_over, *_ = source_and_weights(result.context, result.request)
            np.testing.assert_array_equal(
                pasted_over.convert("RGB"), as_pillow_reads(inputs["IMAGE"])
            )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(KEYS), inner),
    max_leaves=8,
)
ANY_TEXT = st.binary() | JSON.map(lambda value: json.dumps(value).encode())


@SAME_EVERY_TIME
@given(ANY_TEXT)
def test_any_settings_are_parsed_or_refused(raw: bytes) -> None:
    try:
        parsed = parse_settings(raw)
    except InvalidRequest as refusal:
        check_message(str(refusal))
    else:
        assert parse_settings(dump_settings(parsed)) == parsed


@SAME_EVERY_TIME
@given(ANY_TEXT)
def test_any_operation_is_parsed_or_refused(raw: bytes) -> None:
    try:
        parsed = parse_operation(raw)
    except InvalidRequest as refusal:
        check_message(str(refusal))
    else:
        assert parsed["op"] in OPERATIONS


@SAME_EVERY_TIME
@given(good_settings())
def test_good_settings_are_taken(options: dict[str, Any]) -> None:
    parsed = parse_settings(json.dumps(options).encode())
    assert {key: getattr(parsed, key) for key, value in options.items() if value is not None} == {
        key: value for key, value in options.items() if value is not None
    }


@SAME_EVERY_TIME
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "IMAGE": st.binary(),
            "MASK": st.binary(),
            "PROMPT": st.binary(),
            "SETTINGS": ANY_TEXT,
        },
    )
)
def test_any_tensors_beside_good_ones_are_edited_or_refused(changed: dict[str, bytes]) -> None:
    try:
        prepare({**good_inputs(), **changed})
    except MaskserveError as error:
        check_message(str(error))


def test_some_damage_is_noticed_and_some_is_not() -> None:
    """Else one side of what is expected of damaged files is never looked at."""
    damaged = [case.inputs for case in CASES if isinstance(case.expected, Damaged)]
    noticed = 0
    for inputs in damaged:
        try:
            prepare(inputs)
        except MaskserveError:
            noticed += 1
    few = len(damaged) // 10
    assert few < noticed < len(damaged) - few


def check_message(text: str) -> None:
    """A message fits one line of a log and every encoding on its way."""
    assert text.isprintable()
    assert len(text.encode()) < 1000


def test_the_corpus_is_large_and_its_sample_has_some_of_everything() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names) >= 500
    short = sample()
    chosen = [case for case in CASES if str(case) in short]
    sorts = {(case.sort, type(case.expected)) for case in CASES}
    assert {(case.sort, type(case.expected)) for case in chosen} == sorts
