"""The number of first steps of a cached edit that compute all tokens."""

from __future__ import annotations

from dataclasses import dataclass

_PER_DENSE_STEP = 10
"""Steps that an edit must have for each dense one that its model needs: of the four of a distilled
model a dense one would take most of what caching saves."""


@dataclass(frozen=True, slots=True)
class DenseSteps:
    """First steps that compute all tokens (docs/adr/0028). The largest number that applies counts.

    Priming uses the template alone, without a prompt. If the model sees the picture around the mask
    as noisy as the rest, dense first steps improve cached edits with a prompt most.
    """

    every: int = 0
    """Dense steps of any edit, however few its steps."""
    prompt: int = 0
    """Dense steps of an edit with a prompt."""
    side: int = 0
    """Dense steps of an edit whose computed tokens cover a whole side of the picture."""

    def of(self, steps: int, *, prompt: bool, side: bool) -> int:
        """Return the number of dense first steps of an edit of `steps` steps."""
        needed = max(self.prompt if prompt else 0, self.side if side else 0)
        return max(self.every, min(needed, steps // _PER_DENSE_STEP))


NO_DENSE_STEPS = DenseSteps()
