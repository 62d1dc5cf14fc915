"""Low-rank updates that adapters (LoRA) add to a model's layers, each row its own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Factors(NamedTuple):
    """What one adapter adds to one layer: up(down(x)), alpha / rank folded into `up`; the scale
    that a user asks for is not in it.
    """

    down: Tensor
    """[r, in]; of a convolution [r, in, kh, kw]"""
    up: Tensor
    """[out, r]; of a convolution [out, r, 1, 1]"""
