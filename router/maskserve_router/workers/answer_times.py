"""Learns how long a worker takes to answer, from its last answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_LAST, _FEWEST = 32, 4
_ROUNDS = 8
_SMALL = 0.3
"""Relative error up to which answers weigh fully; answers with larger errors weigh less."""


class _Answer(NamedTuple):
    """One answered edit. All fields are divided by the longer of predicted and actual seconds."""

    denoised: float
    """Denoising seconds as predicted when the edit was sent."""
    tokens: float
    """Tokens of the picture."""
    answered: float
    """Actual seconds from sending the edit to its answer."""


class AnswerTimes:
    """Predicts the seconds from sending an edit to its answer:

        slowdown · denoised_s + remainder_s · tokens

    `denoised_s` is the predicted time of denoising, `tokens` the size of the picture. `slowdown`
    covers what delays a running edit: later edits, other programs on the machine. `remainder_s`,
    seconds per token, covers work that workers do not price: transfer, reading, encoding,
    preparing, decoding. Both are at least 0. They are fitted to the last answers by least squares
    of the relative error, in which large errors count linearly (Huber 1964): the first
    predictions, before a worker has measured anything, are poor.
    """

    def __init__(self) -> None:
        self.slowdown, self.remainder_s = 1.0, 0.0
        self._last: deque[_Answer] = deque(maxlen=_LAST)

    def learn(self, tokens: int, denoised_s: float, answered_s: float) -> None:
        """Learn from an edit of `tokens` tokens that was answered after `answered_s` seconds."""
        longer = max(denoised_s, answered_s)
        self._last.append(_Answer(denoised_s / longer, tokens / longer, answered_s / longer))
        if len(self._last) >= _FEWEST:
            self._fit()

    def predict(self, tokens: float, denoised_s: float) -> float:
        """Return the seconds until an edit's answer: `denoised_s` before anything is learned."""
        return self.slowdown * denoised_s + self.remainder_s * tokens

    def _fit(self) -> None:
        """Fit Huber's estimate: repeated least squares in which large residuals weigh less."""
        weights = [1.0] * len(self._last)
        for _ in range(_ROUNDS):
            self._fit_squares(weights)
            weights = [
                _SMALL / max(abs(self.predict(x.tokens, x.denoised) - x.answered), _SMALL)
                for x in self._last
            ]

    def _fit_squares(self, weights: Sequence[float]) -> None:
        """Fit slowdown · denoised + remainder_s · tokens to `answered`; each answer has a
        weight.
        """
        dd = tt = dt = da = ta = 0.0
        for weight, (denoised, tokens, answered) in zip(weights, self._last, strict=True):
            dd += weight * denoised * denoised
            tt += weight * tokens * tokens
            dt += weight * denoised * tokens
            da += weight * denoised * answered
            ta += weight * tokens * answered
        common = dd * tt - dt * dt
        if common > 1e-6 * dd * tt:
            self.slowdown, self.remainder_s = (
                (tt * da - dt * ta) / common,
                (dd * ta - dt * da) / common,
            )
        else:  # equal edits cannot separate the two
            self.slowdown, self.remainder_s = 1.0, (ta - dt) / tt
        if self.remainder_s < 0.0:
            self.slowdown, self.remainder_s = da / dd, 0.0
        elif self.slowdown < 0.0:
            self.slowdown, self.remainder_s = 0.0, ta / tt
