"""What a step adds to a row's hidden states from outside of the model, as a ControlNet does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Residuals(Protocol):
    """Of one row, for as long as it is in the batch; asked anew at every step."""

    def after(self, number: int) -> Tensor | None:
        """What is added at a place of the model; None: nothing, which costs nothing.

        FLUX: to the image tokens that the row computes, [n, width], behind block `number`, double
        blocks first.

        UNets: to a feature map of the whole picture, [C, h, w] of its level: to what the skip
        connection `number` carries to the way up, in the order these begin; behind the last one's
        number, to what leaves the middle block.
        """
        ...
