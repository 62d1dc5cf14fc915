"""An edit of the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskserve_benchmarks.simulator.workload import Request
from maskserve_common.routing import Edit, RowLoad


@dataclass(slots=True)
class Job:
    """A request at its worker, and its outcome."""

    request: Request
    edit: Edit
    worker: str
    cached: bool
    row: RowLoad
    """The row as the policy counts it, except for its computed tokens."""
    sent: float
    left: int
    started: float = math.nan
    denoised: float = math.nan
    ended: float = math.nan
    outcome: str = ""
    """`done` or `expired`; empty until the edit ends."""
    refresh_steps: frozenset[int] = frozenset()
    """Refresh steps of the edit, if it has any: it computes all tokens there."""
    predicted: float = math.nan
    """Predicted seconds from `sent` until the denoising ends, at the time of the choice of
    worker."""
    tokens_done: int = 0

    @property
    def at_refresh_step(self) -> bool:
        """Return whether its next step is a refresh step."""
        return self.request.steps - self.left in self.refresh_steps

    @property
    def begun(self) -> bool:
        """Return whether it has taken a step."""
        return self.left < self.request.steps
