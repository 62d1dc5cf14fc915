"""From host memory to the device without waiting for it: many small arrays as one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 16
"""Bytes that each tensor's beginning is a multiple of, as kernels like it."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The same tensors on `device`.

    To another device they go packed, in one transfer from pinned memory that nobody waits for; what
    is queued on the device afterwards finds them there.

    Args:
        tensors: in host memory, of any shapes and dtypes.
        device: where they shall be.
    """
    if device.type == "cpu":
        return list(tensors)
    ends, total = [], 0
    for tensor in tensors:
        begin = -(-total // _ALIGN) * _ALIGN
        total = begin + tensor.numel() * tensor.element_size()
        ends.append((begin, total))
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, (begin, end) in zip(tensors, ends, strict=True):
        if end > begin:
            packed[begin:end].view(tensor.dtype).copy_(tensor.flatten())
    there = packed.to(device, non_blocking=True)
    return [
        there[begin:end].view(tensor.dtype).view(tensor.shape)
        for tensor, (begin, end) in zip(tensors, ends, strict=True)
    ]
