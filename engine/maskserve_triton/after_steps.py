"""The recent time of edits from their last step to their response, as a front measures it.

Decoding waits behind other pictures; postprocess and the return follow. An edit with a due time
must end its last step earlier by this time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

_LAST = 32
_BEFORE = ("preprocess", "encode", "prepare", "queue", "denoise")


class AfterSteps:
    """Seconds per token of the picture, the median of the last answers; 0 before the first.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self.per_token_s = 0.0
        self._last: deque[float] = deque(maxlen=_LAST)

    def learn(self, meta: Mapping[str, Any], seconds: float) -> None:
        """Record an answered edit by its META and the seconds since its acceptance."""
        timings, tokens = meta.get("timings_ms"), meta.get("total_tokens")
        if not timings or not tokens:
            return
        after_s = seconds - sum(timings.get(stage, 0.0) for stage in _BEFORE) / 1e3
        self._last.append(max(after_s, 0.0) / tokens)
        self.per_token_s = median(tuple(self._last))
