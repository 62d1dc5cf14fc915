"""FLOPs as torch counts them: what counted work is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted(run: Callable[[], Any]) -> int:
    """What torch counts; the math kernel, because the CPU's fused one is not in its registry, nor
    are products that are added in place.
    """
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product})
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


def _product(into: tuple[int, int], a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """Of the shapes of what is multiplied."""
    return 2 * a[0] * a[1] * b[1]
