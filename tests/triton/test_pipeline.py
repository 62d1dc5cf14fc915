"""Calls into the ensemble: what is left of an edit when it is over."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from maskserve_common.errors import MaskserveError
from maskserve_triton.pipeline import encode_edit, run_edit
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


class Said:
    """AckSender, as a front gives them."""

    key = "key"

    def __init__(self) -> None:
        self.messages: list[str] = []

    def acknowledge(self) -> None:
        self.messages.append("taken")

    def over(self) -> None:
        self.messages.append("over")


@pytest.mark.parametrize("event_count", [1, 3])
def test_a_receipt_for_each_event_and_a_word_at_the_end(api: FakeTriton, event_count: int) -> None:
    """Also when nobody wants the rest: the denoiser holds it back until it is told."""
    acks = Said()

    def events(call: Call) -> Iterator[InferenceResponse]:
        assert call.parameters == {"acks": "key"}
        for number in range(3):
            assert acks.messages == ["taken"] * number
            yield event(event="progress")

    api.models["edit_pipeline"] = events
    run = run_edit(api, {"IMAGE": b"image"}, {}, "mine", acks)  # type: ignore[arg-type]
    for _ in range(event_count):
        next(run)
    if event_count == 3:
        assert next(run, None) is None
    run.close()
    assert acks.messages == ["taken"] * event_count + ["over"]


def test_an_encoding_alone_runs_two_models_and_gives_their_times(api: FakeTriton) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)

    def preprocess(call: Call) -> Iterator[InferenceResponse]:
        assert call.parameters == {"run": "mine"}
        request = json.dumps({"template_id": "t", "timings_ms": {"preprocess": 1.5}}).encode()
        mask, controls = pixels[..., 0], np.zeros((0, 0, 0, 3), np.uint8)
        arrays = {"EDIT_MASK": mask, "CONTROLS": controls, "REFERENCES": np.zeros(0, np.uint8)}
        yield reply(PIXELS=pixels, REQUEST=request, **arrays)

    def encoder(call: Call) -> Iterator[InferenceResponse]:
        assert call.parameters == {"run": "mine"}
        assert call.tensors["PIXELS"].as_numpy().shape == (1, 8, 8, 3)
        yield reply(ENCODED=json.dumps({"ms": 2.5, "template": "made"}).encode())

    api.models |= {"preprocess": preprocess, "encoder": encoder}
    assert encode_edit(api, {"IMAGE": [b"image"]}, {"run": "mine"}, "me") == {
        "event": "final",
        "encoded": {"template": "made"},
        "template_id": "t",
        "timings_ms": {"preprocess": 1.5, "encode": 2.5},
    }
    report = {"ms": 2.5, "template": "kept", "prompt": "kept", "references": None, "batch": 1}
    api.models["encoder"] = lambda call: iter([reply(ENCODED=json.dumps(report).encode())])
    for name, how in (("me", "kept"), ("k1!me", "made")):  # another key may have sent the picture
        meta = encode_edit(api, {"IMAGE": [b"image"]}, {"run": "mine"}, name)
        expected = {"template": how, "prompt": how, "references": None, "batch": 1}
        assert meta["encoded"] == expected
    api.models["encoder"] = refused
    with pytest.raises(MaskserveError, match="the edit was cancelled"):
        encode_edit(api, {"IMAGE": [b"image"]}, {"run": "mine"}, "me")
