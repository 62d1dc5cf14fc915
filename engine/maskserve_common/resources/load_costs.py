"""Recent costs of loading LoRAs or ControlNets onto the device, by where they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from maskserve_common.contracts.status_record import LoadCost
from maskserve_common.line_fit import fit

_MOST_LOADS = 64
"""Latest loads of each source that costs are fitted to."""


class LoadCosts:
    """Costs by source.

    Args:
        estimates: cost of each source until two of its loads are measured.
    """

    def __init__(self, estimates: Mapping[str, LoadCost]) -> None:
        self.published: Mapping[str, LoadCost] = dict(estimates)
        self._samples: dict[str, deque[tuple[int, float]]] = {}

    def add(self, source: str, nbytes: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        samples = self._samples.setdefault(source, deque(maxlen=_MOST_LOADS))
        samples.append((nbytes, seconds))
        if len(samples) > 1:
            sizes, times = zip(*samples, strict=True)
            line = fit(sizes, times)
            self.published = {**self.published, source: LoadCost(line.fixed, line.per_unit)}
