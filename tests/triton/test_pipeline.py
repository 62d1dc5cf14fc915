"""Calls into the ensemble: what is left of an edit when it is over."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator

import pytest

from maskserve_core.backend.pipeline import run_edit
from maskserve_core.errors import MaskserveError
from tests.fakes.pb_utils import Call, FakeTriton, InferenceResponse, failure, reply


def event(**values: object) -> InferenceResponse:
    return reply(EDITED=b"", META=json.dumps({"step": 0, **values}).encode())


def refused(call: Call) -> Iterator[InferenceResponse]:
    yield failure("in ensemble 'edit_pipeline', [CANCELLED] the edit was cancelled")


def failed(call: Call) -> Iterator[InferenceResponse]:
    yield event(event="progress")
    yield event(event="failed", error="[CANCELLED] the edit was cancelled")


@pytest.mark.parametrize("pipeline", [refused, failed])
def test_an_edit_that_failed_is_freed_at_once(api: FakeTriton, pipeline: object) -> None:
    """Its pictures would else stay until Python happens to look for cycles."""
    api.models["edit_pipeline"] = pipeline  # type: ignore[assignment]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MaskserveError, match="the edit was cancelled"):
            list(run_edit(api, {"IMAGE": b"image"}, {}, "mine"))
        call = weakref.ref(api.calls.pop())
        assert call() is None
    finally:
        gc.enable()


def test_events_nobody_wants_any_more_are_taken_all_the_same(api: FakeTriton) -> None:
    """The denoiser holds further ones back until they are."""
    taken: list[int] = []

    def events(call: Call) -> Iterator[InferenceResponse]:
        for number in range(4):
            assert len(taken) == number
            yield event(event="progress")

    api.models["edit_pipeline"] = events
    run = run_edit(api, {"IMAGE": b"image"}, {}, "mine", lambda: taken.append(1))
    next(run)
    run.close()
    assert len(taken) == 4
