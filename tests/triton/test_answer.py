"""How Triton's stub treats a response, and what an Answer does about it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from maskserve_common.errors import EngineFailed, MaskserveError
from maskserve_triton.answer import Answer
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


def event(answer: Answer, outputs: dict[str, Any]) -> bool:
    return answer.event("progress", outputs)


@pytest.mark.parametrize("send", [event, Answer.finish])
def test_no_tensor_is_freed_while_triton_sends(api: FakeTriton, send: Any) -> None:
    """There, Triton does not hold Python's lock."""
    sender = PruningSender()
    assert send(Answer(api, sender), {"META": b"{}", "LATENTS": b""})
    assert len(sender.sent) == 1
    assert sender.freed == 0


class BrokenSender(Sender):
    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        raise RuntimeError("the stub has lost its pipe")


def test_an_answer_that_could_not_be_sent_did_not_succeed(api: FakeTriton) -> None:
    ends: list[MaskserveError | None] = []
    answer = Answer(api, BrokenSender([]), lambda error, outputs: ends.append(error))
    assert answer.finish({"META": b"{}"})
    assert answer.done
    assert [type(error) for error in ends] == [EngineFailed]


def test_an_answer_that_cannot_be_made_is_an_error(api: FakeTriton) -> None:
    """A thread that answers late has nobody behind it who would answer for it."""
    sender = Sender(api.violations)
    assert Answer(api, sender).finish({"IMAGE": None})
    error = sender.wait(1.0).error()
    assert error is not None
    assert "[ENGINE_FAILED]" in error.message()


def test_who_looks_for_cancels_does_not_wait_for_the_log(api: FakeTriton) -> None:
    """The work at the end of an edit may take as long as a disk does."""
    looked: list[bool] = []

    def at_end(error: MaskserveError | None, outputs: dict[str, Any]) -> None:
        watcher = threading.Thread(target=lambda: looked.append(answer.cancelled()), daemon=True)
        watcher.start()
        watcher.join(5)

    answer = Answer(api, Sender(api.violations), at_end)
    assert answer.finish({"META": b"{}"})
    assert looked == [False]
