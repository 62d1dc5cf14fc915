"""A worker for fault tests, and the calls that watch it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import psutil
from tritonclient.utils import InferenceServerException

from maskserve_benchmarks.triton_calls import Grpc
from maskserve_common.imaging.images import encode_image
from maskserve_common.liveness import signed_in
from maskserve_common.status import RowStatus, StatusReader, WorkerStatus
from maskserve_serving.worker import WorkerProcess
from tests.support.calls import WHOLE

_POLL_S = 0.01


class Site:
    """A worker of a running supervisor."""

    def __init__(self, worker: WorkerProcess, side: int, steps: int) -> None:
        self.worker = worker
        self.side, self.steps = side, steps
        self._image, self._mask = pictures(side)
        self._reader = StatusReader(self.worker.spec.files.status)

    def inputs(self, request_id: str, **settings: Any) -> dict[str, bytes]:
        """The four tensors of a long edit. Its template belongs to no other edit."""
        long = {"num_inference_steps": self.steps, "cache": "off", **WHOLE}
        settings = {"seed": 1, **long, **settings}
        return {
            "IMAGE": self._image,
            "MASK": self._mask,
            "PROMPT": b"a red star",
            "SETTINGS": json.dumps({**settings, "request_id": request_id}).encode(),
        }

    def process(self, model: str) -> psutil.Process:
        """The process that serves `model`, or tritonserver itself."""
        if model == "tritonserver":
            return psutil.Process(self.worker.pid)
        for name, pid in signed_in(self.worker.spec.files.runtime):
            if name == model:
                return psutil.Process(pid)
        raise LookupError(f"no process serves {model}")

    def status(self) -> WorkerStatus | None:
        """The engine's record, read beside Triton."""
        return self._reader.read()

    def row(self, request_id: str) -> RowStatus | None:
        """The row of an edit in the running batch; None: it has no row."""
        status = self.status()
        rows = status.running if status is not None else ()
        return next((row for row in rows if row.request_id == request_id), None)

    def serves(self) -> bool:
        """Whether an edit that is sent now succeeds."""
        inputs = self.inputs(f"probe-{time.monotonic_ns()}", num_inference_steps=1)
        try:
            with closing(Grpc(self.worker.grpc_url)) as client:
                client.edit(inputs, timeout_s=10.0)
        except InferenceServerException:
            return False
        return True


def pictures(side: int) -> tuple[bytes, bytes]:
    """A square image and a mask of its middle, encoded."""
    across = np.linspace(0, 255, side).astype(np.uint8)
    image = np.stack(np.broadcast_arrays(across[:, None], across[None], across[None, ::-1]), -1)
    mask = np.zeros((side, side), np.uint8)
    mask[side // 4 : side // 2, side // 4 : side // 2] = 255
    return encode_image(image, "png"), encode_image(mask, "png")


def until(condition: str, check: Callable[[], Any], timeout_s: float) -> float:
    """Wait until `check()` holds. Returns the time.monotonic() of that moment.

    Raises:
        TimeoutError: it did not hold within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > end:
            raise TimeoutError(f"{condition}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)
    return time.monotonic()
