"""META: what of it is spliced reads as if it had been parsed and written."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from maskserve_common.contracts.meta import (
    TIMINGS,
    event_meta,
    failed_meta,
    final_meta,
    with_timing,
)
from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import EngineFailed

NAMES = (
    st.text(st.characters(exclude_characters="!", exclude_categories=["Cs"]), max_size=40)
    | st.just('"decode":0.0')
    | st.just('x","postprocess":0.0,"y":"')
)


def request(name: str) -> EditRequest:
    return EditRequest(name, "", EditSettings(), 1, "0f" * 32, (8, 8), (8, 8), 0)


@given(name=NAMES, worker=NAMES, times=st.tuples(*[st.floats(0.0, 1e7)] * 2))
def test_a_final_event_takes_the_times_of_the_models_after_the_denoiser(
    name: str, worker: str, times: tuple[float, float]
) -> None:
    engine: dict[str, Any] = {"kinds": {"dense": 6}, "timings_ms": {"denoise": 1.5}, "steps": 4}
    meta = final_meta(request(name), worker, worker, engine, {"encode": 50.0, "prepare": 2.5})
    expected = json.loads(meta)
    for stage, elapsed_ms in zip(("decode", "postprocess"), times, strict=True):
        meta = with_timing(meta, stage, elapsed_ms)
        expected["timings_ms"][stage] = round(elapsed_ms, 3)
    assert json.loads(meta) == expected
    assert set(expected["timings_ms"]) == set(TIMINGS)
    assert (expected["timings_ms"]["encode"], expected["timings_ms"]["prepare"]) == (50.0, 2.5)


@given(name=NAMES)
def test_other_events_stay_as_they_are(name: str) -> None:
    for meta in (event_meta("preview", 1, 4, name), failed_meta(EngineFailed(name), name)):
        assert with_timing(meta, "decode", 1.0) == meta


def test_a_routers_scope_is_not_told() -> None:
    progress = json.loads(event_meta("progress", 1, 2, "k3f0!my-edit"))
    assert progress["request_id"] == "my-edit"
    for sent_as in ("my-edit", "k1!my-edit", "k1!my-edit~2", "my-edit~12"):
        assert json.loads(event_meta("progress", 1, 2, sent_as))["request_id"] == "my-edit"
