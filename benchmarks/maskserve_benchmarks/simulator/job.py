"""An edit of the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from maskserve_benchmarks.simulator.workload import Request
from maskserve_common.routing import Edit, RowLoad


@dataclass(slots=True)
class Job:
    """A request at its worker, and what became of it."""

    request: Request
    edit: Edit
    worker: str
    cached: bool
    row: RowLoad
    """As the policy counts it, but for the tokens that it computes."""
    sent: float
    left: int
    started: float = math.nan
    denoised: float = math.nan
    ended: float = math.nan
    outcome: str = ""
    """`done`, `expired`; empty on the way."""
    own: frozenset[int] = frozenset()
    """Steps at which it computes all tokens, of one that has anchors of its own."""
    predicted: float = math.nan
    """Seconds from `sent` until the denoising ends, as predicted when the worker was chosen."""
    tokens_done: int = 0

    @property
    def at_anchor(self) -> bool:
        """Whether its next step computes an anchor of its own."""
        return self.request.steps - self.left in self.own

    @property
    def begun(self) -> bool:
        """Whether it has taken a step."""
        return self.left < self.request.steps
