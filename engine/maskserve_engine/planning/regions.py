"""The region of an edit without a mask: the tokens that it changes, found from its own predictions
(docs/adr/0091).

After some steps an edit's predicted clean picture differs from its source where the edit will
change it. Those tokens go on; the others are read from refresh steps, as outside of a mask. At each
refresh step the prediction is renewed everywhere, and more tokens may join.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


class RegionRule(NamedTuple):
    """How a family's edits find their regions."""

    after: int
    """Number of first steps that compute all tokens; the region is chosen after them."""
    threshold: float
    """Change of a token from which it belongs to the region: the root mean square over the channels
    of its packed latents, whose deviation over pictures is about 1.
    """
    refreshes: int = 2
    """Refresh steps once the region is known: the next step, and those that follow it."""
    last: int = 1
    """Number of last steps that compute all tokens."""

    def region(self, change: NDArray[Any], before: Bools | None = None) -> Bools:
        """Return the tokens of the region.

        Args:
            change: change of each token.
            before: the region so far, of the shape of `change`; None: it is chosen for the first
                time.
        """
        region: Bools = change >= self.threshold
        return region if before is None else region | before

    def count(self, steps: int) -> int:
        """Return the number of refresh steps of a row with so many steps left."""
        return min(self.refreshes, 1 + (steps - self.last) // 4)
