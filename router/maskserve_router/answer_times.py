"""How long a worker takes to answer, as its last answers show."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_LAST, _FEWEST = 32, 4


class _Answer(NamedTuple):
    denoised: float
    """Predicted when the edit was sent, over what it took in all."""
    tokens: float
    """Of the picture, over the same."""


class AnswerTimes:
    """Seconds from sending an edit to its answer, of its predicted denoising and its size:

        slowdown · denoised + rest · tokens

    `slowdown` is what comes on top while the edit runs: edits that are sent later, other programs
    on the machine. `rest` is what workers do not price: the way, reading, encoding, preparing,
    decoding. Both follow the last answers by least squares of the relative error, neither below 0.
    """

    def __init__(self) -> None:
        self.slowdown, self.rest = 1.0, 0.0
        self._last: deque[_Answer] = deque(maxlen=_LAST)

    def learn(self, tokens: int, denoised_s: float, answered_s: float) -> None:
        """An edit of `tokens` tokens was answered after `answered_s` seconds."""
        self._last.append(_Answer(denoised_s / answered_s, tokens / answered_s))
        if len(self._last) >= _FEWEST:
            self._fit()

    def predict(self, tokens: int, denoised_s: float) -> float:
        """Seconds until the answer of an edit sent now; its denoising alone before any is known."""
        return self.slowdown * denoised_s + self.rest * tokens

    def _fit(self) -> None:
        """Least squares of slowdown · denoised + rest · tokens = 1."""
        dd = sum(each.denoised**2 for each in self._last)
        tt = sum(each.tokens**2 for each in self._last)
        dt = sum(each.denoised * each.tokens for each in self._last)
        d = sum(each.denoised for each in self._last)
        t = sum(each.tokens for each in self._last)
        common = dd * tt - dt * dt
        if common > 1e-6 * dd * tt:
            self.slowdown, self.rest = (tt * d - dt * t) / common, (dd * t - dt * d) / common
        else:  # edits all alike do not tell one from the other
            self.slowdown, self.rest = 1.0, (t - dt) / tt
        if self.rest < 0.0:
            self.slowdown, self.rest = d / dd, 0.0
        elif self.slowdown < 0.0:
            self.slowdown, self.rest = 0.0, t / tt
