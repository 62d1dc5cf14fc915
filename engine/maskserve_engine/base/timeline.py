"""An edit's timeline through the engine, sent as spans when it ends (docs/adr/0008-traces.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maskserve_common.errors import MaskserveError
from maskserve_common.tracing import Stage


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When an edit reached each stage, in time.monotonic() seconds; 0.0: it never did."""

    submitted: float
    """When the prepared edit was put into the engine's inbox."""
    queued: float
    """When the scheduler got the edit: as the engine's thread took it, or once its template was
    primed or priming had failed.
    """
    admitted: float
    first_step: float
    """When its first step was done."""
    ended: float
    waited: bool
    """Whether it waited for its template."""
    about: Mapping[str, Any]
    """Span attributes that identify the edit."""
    work: Mapping[str, Any]
    """Span attributes that count the work of its steps."""


def stages(
    received: float, timeline: RequestTimeline, error: MaskserveError | None = None
) -> list[Stage]:
    """Return the edit's stages in order; the last one is where `error` ended it.

        received ─ prepare ─ submitted ─ wait_prime ─ queued ─ queue ─ admitted ─ denoise ─ ended

    Without a template to wait for, `queue` begins where `prepare` ends. `received` is the time at
    which the denoiser got the edit, on the timeline's clock.
    """
    c, offset_ns = timeline, time.time_ns() - time.monotonic_ns()

    def wall(monotonic: float) -> int:
        """A time.monotonic() time as nanoseconds since 1970."""
        return offset_ns + int(1e9 * monotonic)

    reached = [("prepare", received, c.submitted)]
    if c.waited:
        reached.append(("wait_prime", c.submitted, c.queued or c.ended))
    if c.queued or not c.waited:
        reached.append(("queue", reached[-1][2], c.admitted or c.ended))
    if c.admitted:
        reached.append(("denoise", c.admitted, c.ended))
    return [
        Stage(
            name,
            wall(start),
            wall(end),
            {**c.about, **(c.work if name == "denoise" else {})},
            [("first step", wall(c.first_step))] if name == "denoise" and c.first_step else (),
            error if (name, start, end) == reached[-1] else None,
        )
        for name, start, end in reached
    ]
