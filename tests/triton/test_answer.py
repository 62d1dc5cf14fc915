"""What Triton's stub makes of a response, and what an Answer does about it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from maskserve_core.backend.answer import Answer
from tests.fakes.pb_utils import FakeTriton, InferenceResponse, Sender


class PruningSender(Sender):
    """Drops a response's tensors while it sends, as the stub does with those nobody asked for."""

    def __init__(self) -> None:
        super().__init__([])
        self.freed = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert response is not None
        tensors = [weakref.ref(tensor) for tensor in response.output_tensors()]
        response._tensors = []
        gc.collect()
        self.freed += sum(tensor() is None for tensor in tensors)
        super().send(response, flags)


@pytest.mark.parametrize("send", [Answer.event, Answer.finish])
def test_no_tensor_is_freed_while_triton_sends(api: FakeTriton, send: Any) -> None:
    """There, Triton does not hold Python's lock."""
    sender = PruningSender()
    assert send(Answer(api, sender), {"META": b"{}", "LATENTS": b""})
    assert len(sender.sent) == 1
    assert sender.freed == 0
