"""Time on the device's own clock, read without waiting for the device."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

Mark = float | torch.cuda.Event
"""A point in the device's work: on CUDA an event, otherwise seconds of this process's clock."""


def mark(device: torch.device) -> Mark:
    """Return a mark of now; on CUDA, an event after the work that is queued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Span(NamedTuple):
    begin: Mark
    end: Mark

    def seconds(self) -> float | None:
        """Return the seconds between the marks; None: the device has not passed both yet."""
        if isinstance(self.begin, float) or isinstance(self.end, float):
            assert isinstance(self.begin, float)
            assert isinstance(self.end, float)
            return self.end - self.begin
        return self.begin.elapsed_time(self.end) / 1e3 if self.end.query() else None

    def wait(self) -> None:
        """Wait until the device has passed both marks."""
        if not isinstance(self.end, float):
            self.end.synchronize()
