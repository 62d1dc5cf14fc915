"""What a row costs on a worker, as linear coefficients (FlashPS §4.4, Fig. 11).

The FLOPs and the loaded bytes of a batch are sums over its rows, and those of a row are linear in
its active tokens (FlashPS Table 1). So a worker's cost model comes down to a few coefficients that
fit into the status record, and a step of rows R takes about

    max(base + Σ compute(r), Σ load(r))        r in R

where the loads of the next steps run beside the computation of this one. The planner does better
than this for batches in which neither side hides the other; routing compares workers and does not
need to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Pricing:
    """Coefficients of one worker's model and device. All are seconds, and at least 0."""

    step: float
    """Of a step, whatever its rows."""
    dense_row: float
    """Of a dense row's computation, per step."""
    cached_row: float
    """Of a cached row's computation, per step: its text tokens and modulation."""
    active_token: float
    """Of a cached row's computation, per step and active token."""
    spare_token: float = 0.0
    """Of loading a cached row's entries from the host tier, per step and inactive token."""
    fetch: Mapping[str, float] = field(default_factory=dict)
    """Tier -> seconds to bring a template's entries from there to the host tier. A tier that is
    not named, `host` and `device` apart, cannot be used."""

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fetch"}
        for name, value in (values | dict(self.fetch)).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"pricing: {name} is {value}")

    def row(self, active: float, total: float, *, cached: bool) -> tuple[float, float]:
        """`(compute, load)` seconds per step of a row of `total` tokens of which `active` are
        computed. A row whose mask is so large that caching costs more is dense.
        """
        if cached:
            compute = self.cached_row + self.active_token * active
            load = self.spare_token * (total - active)
            if compute < self.dense_row and load < self.dense_row:
                return compute, load
        return self.dense_row, 0.0

    def fetch_s(self, tier: str) -> float:
        """Seconds until entries from `tier` can be loaded by steps; infinite if never."""
        if tier in ("host", "device"):
            return 0.0
        return self.fetch.get(tier, math.inf)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Pricing:
        """Read what `to_json` gave; keys of a later writer are skipped.

        Raises:
            ValueError: a key is missing or no number.
        """
        names = {f.name for f in fields(cls)}
        try:
            return cls(**{name: value for name, value in values.items() if name in names})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"pricing: {error}") from error
