"""An engine that a test drives by hand, and an edit in the form that the denoiser receives."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.base.job import EditJob, Sink
from maskserve_engine.stages.encoded import EncodeReport, pack_conditioning

EDIT = EditRequest(
    request_id="mine",
    prompt="a red star",
    settings=EditSettings(),
    seed=7,
    template_id="f" * 32,
    source_size=(64, 48),
    model_size=(64, 48),
    accepted_ns=1,
    timings_ms={"preprocess": 1.5},
)


class ScriptedEngine:
    """Keeps the submitted edits; the test sends the events."""

    def __init__(self) -> None:
        self.jobs: list[tuple[EditJob, Sink]] = []

    def submit(self, job: EditJob, sink: Sink) -> None:
        self.jobs.append((job, sink))

    def cancel(self, request_id: str) -> None:
        """The test sends the end."""

    def heartbeat(self) -> Future[dict[str, Any]]:
        return _done({"state": "ready"})

    def templates(self) -> Future[list[dict[str, object]]]:
        return _done([{"template_id": "f" * 32}])

    def evict(self, template_id: str) -> Future[int]:
        answer: Future[int] = Future()
        answer.set_exception(ValueError(template_id))
        return answer


def _done(value: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


def tensors() -> dict[str, Any]:
    """EDIT as the models before the denoiser send it."""
    return {
        "REQUEST": EDIT.to_json(),
        "EDIT_MASK": np.full((64, 48), 255, np.uint8),
        "MOMENTS": np.ones((8, 16, 12), np.float32),
        "MASKED_MOMENTS": np.zeros((0, 0, 0), np.float32),
        "CONDITIONING": pack_conditioning({"prompt_embeds": np.ones((4, 32), np.float32)}, None),
        "ENCODED": EncodeReport(2.5, prompt="kept", template="made").to_json(),
        "CONTEXT": np.arange(5, dtype=np.uint8),
    }
