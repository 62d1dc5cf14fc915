"""A UNet whose convolutions read the template outside a tile, implemented the slow way. All of
every map is computed. The part outside the box is replaced before a norm or a strided convolution
reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Maps = list[Tensor]
"""Inputs of norms and strided convolutions in one forward pass, in running order."""


@contextmanager
def recorded(model: nn.Module) -> Iterator[Maps]:
    """Record the maps that are read inside the context."""
    maps: Maps = []

    def keep(x: Tensor) -> Tensor:
        maps.append(x)
        return x

    with _reading(model, keep):
        yield maps


@contextmanager
def mixed(
    model: nn.Module, maps: Maps, active: Mapping[int, NDArray[np.int64]], halo: int
) -> Iterator[None]:
    """Make convolutions read the template's maps outside the box round the computed tokens.

    Args:
        model: a UNet2DConditionModel; one forward pass runs inside the context.
        maps: of the template.
        active: level → ids of the computed tokens.
        halo: positions by which the box is wider.
    """
    left = iter(maps)

    def blend(x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        level = next(n for n in active if _of_level(n, (height, width), maps[0].shape[2:]))
        box = torch.zeros(height, width, dtype=torch.bool)
        rows, columns = np.divmod(active[level], width)
        top, first = max(0, rows.min() - halo), max(0, columns.min() - halo)
        box[top : rows.max() + 1 + halo, first : columns.max() + 1 + halo] = True
        return torch.where(box, x, next(left))

    with _reading(model, blend):
        yield


def _of_level(level: int, size: tuple[int, int], finest: Any) -> bool:
    return size == tuple(-(-int(n) // 2**level) for n in finest)


@contextmanager
def _reading(model: nn.Module, read: Callable[[Tensor], Tensor]) -> Iterator[None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (read(args[0]), *args[1:])

    readers = [
        module
        for module in model.modules()
        if isinstance(module, nn.GroupNorm)
        or (isinstance(module, nn.Conv2d) and module.stride == (2, 2))
    ]
    handles = [module.register_forward_pre_hook(hook) for module in readers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
