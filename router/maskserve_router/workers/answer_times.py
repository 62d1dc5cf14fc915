"""How long a worker takes to answer, as its last answers show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_LAST, _FEWEST = 32, 4
_ROUNDS = 8
_SMALL = 0.3
"""Relative errors up to here are what answers differ by; larger ones count less."""


class _Answer(NamedTuple):
    """All three are shares of the longer one: what was predicted or what it took."""

    denoised: float
    """Predicted when the edit was sent."""
    tokens: float
    """Of the picture."""
    answered: float
    """That it took in all."""


class AnswerTimes:
    """Seconds from sending an edit to its answer, of its predicted denoising and its size:

        slowdown · denoised + rest · tokens

    `slowdown` is what comes on top while the edit runs: edits that are sent later, other programs
    on the machine. `rest` is what workers do not price: the way, reading, encoding, preparing,
    decoding. Both follow the last answers by least squares of the relative error, large ones linear
    (Huber 1964), neither below 0: what was foretold badly, as before a worker has measured
    anything, says little.
    """

    def __init__(self) -> None:
        self.slowdown, self.rest = 1.0, 0.0
        self._last: deque[_Answer] = deque(maxlen=_LAST)

    def learn(self, tokens: int, denoised_s: float, answered_s: float) -> None:
        """An edit of `tokens` tokens was answered after `answered_s` seconds."""
        longer = max(denoised_s, answered_s)
        self._last.append(_Answer(denoised_s / longer, tokens / longer, answered_s / longer))
        if len(self._last) >= _FEWEST:
            self._fit()

    def predict(self, tokens: float, denoised_s: float) -> float:
        """Seconds until the answer of an edit sent now; its denoising alone before any is known."""
        return self.slowdown * denoised_s + self.rest * tokens

    def _fit(self) -> None:
        """Huber's estimate: least squares again and again, of what was far off in the last round
        the less.
        """
        weights = [1.0] * len(self._last)
        for _ in range(_ROUNDS):
            self._fit_squares(weights)
            weights = [
                _SMALL / max(abs(self.predict(x.tokens, x.denoised) - x.answered), _SMALL)
                for x in self._last
            ]

    def _fit_squares(self, weights: Sequence[float]) -> None:
        """Of slowdown · denoised + rest · tokens = answered."""
        dd = tt = dt = da = ta = 0.0
        for weight, (denoised, tokens, answered) in zip(weights, self._last, strict=True):
            dd += weight * denoised * denoised
            tt += weight * tokens * tokens
            dt += weight * denoised * tokens
            da += weight * denoised * answered
            ta += weight * tokens * answered
        common = dd * tt - dt * dt
        if common > 1e-6 * dd * tt:
            self.slowdown, self.rest = (tt * da - dt * ta) / common, (dd * ta - dt * da) / common
        else:  # edits all alike do not tell one from the other
            self.slowdown, self.rest = 1.0, (ta - dt) / tt
        if self.rest < 0.0:
            self.slowdown, self.rest = da / dd, 0.0
        elif self.slowdown < 0.0:
            self.slowdown, self.rest = 0.0, ta / tt
