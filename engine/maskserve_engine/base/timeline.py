"""An edit's timeline through the engine, sent as spans when it ends (docs/operate.md#traces)."""

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
    offset_ns = time.time_ns() - time.monotonic_ns()

    def wall(monotonic: float) -> int:
        """Return a time.monotonic() time as nanoseconds since 1970."""
        return offset_ns + int(1e9 * monotonic)

    reached = [("prepare", received, timeline.submitted)]
    if timeline.waited:
        primed = timeline.queued or timeline.ended
        reached.append(("wait_prime", timeline.submitted, primed))
    if timeline.queued or not timeline.waited:
        reached.append(("queue", reached[-1][2], timeline.admitted or timeline.ended))
    if timeline.admitted:
        reached.append(("denoise", timeline.admitted, timeline.ended))
    first_step = [("first step", wall(timeline.first_step))] if timeline.first_step else ()
    return [
        Stage(
            name,
            wall(start),
            wall(end),
            {**timeline.about, **(timeline.work if name == "denoise" else {})},
            first_step if name == "denoise" else (),
            error if (name, start, end) == reached[-1] else None,
        )
        for name, start, end in reached
    ]
