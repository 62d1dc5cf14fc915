"""FLOPs as torch counts them, for comparison with counted work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted(run: Callable[[], Any]) -> int:
    """Torch's count. It uses the math kernel, because torch's registry lacks the CPU's fused
    kernel. In-place products are added for the same reason.
    """
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product})
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        run()
    return counter.get_total_flops()


def _product(into: tuple[int, int], a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """FLOPs of a product, from the shapes of its factors."""
    return 2 * a[0] * a[1] * b[1]
