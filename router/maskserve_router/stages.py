"""What an edit takes at a worker beside its denoising."""

from __future__ import annotations

from collections import deque
from statistics import quantiles

_LAST, _FEWEST = 64, 4


class Stages:
    """Seconds that edits spend at a worker before and after its denoiser: on the way, read,
    encoded, decoded. Workers price denoising alone, so this is learnt from answered edits.

    It grows with the picture, so it is kept per token. What an edit took beyond its predicted
    denoising is also the time that later edits cost it; the lower quartile leaves that out.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_LAST)

    def learn(self, tokens: int, beyond_s: float) -> None:
        """An edit of `tokens` tokens took so many seconds beyond its predicted denoising."""
        self._rates.append(beyond_s / tokens)

    def seconds(self, tokens: int) -> float:
        """Of an edit of `tokens` tokens; 0 until a few edits were seen."""
        if len(self._rates) < _FEWEST:
            return 0.0
        return tokens * max(0.0, quantiles(self._rates, n=4, method="inclusive")[0])
