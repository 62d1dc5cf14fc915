"""A UNet's convolutions as if they ran on tiles round the mask alone: what that would cost.

Nothing gets faster here: each 3x3 convolution runs on the whole picture, but outside the tile it
reads what it read when the template was primed (scripts/conv_tiles.py counts what would be saved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Maps = list[Tensor]
"""The inputs of all 3x3 convolutions of one forward pass, in the order they run."""


@contextmanager
def recorded(model: nn.Module) -> Iterator[Maps]:
    """What convolutions read meanwhile."""
    maps: Maps = []

    def keep(x: Tensor) -> Tensor:
        maps.append(x)
        return x

    with _reading(model, keep):
        yield maps


@contextmanager
def tiled(model: nn.Module, maps: Maps, mask: Tensor, halo: int) -> Iterator[None]:
    """Have convolutions read `maps` outside the tile.

    Args:
        model: a UNet2DConditionModel, of which one forward pass is run meanwhile.
        maps: of the template at the same timestep, one pass.
        mask: [h, w] of the finest level, whose bounding box is the tile.
        halo: positions by which the tile is wider, at each level.
    """
    left = iter(maps)

    def blend(x: Tensor) -> Tensor:
        return torch.where(_box(mask, x.shape[2:], halo), x, next(left))

    with _reading(model, blend):
        yield


@contextmanager
def _reading(model: nn.Module, read: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have each 3x3 convolution read `read(its input)`."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (read(args[0]), *args[1:])

    convs = [each for each in model.modules() if isinstance(each, nn.Conv2d)]
    handles = [conv.register_forward_pre_hook(hook) for conv in convs if conv.kernel_size == (3, 3)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _box(mask: Tensor, size: torch.Size, halo: int) -> Tensor:
    """[h, w] of a map: the mask's bounding box there and `halo` positions round it."""
    own = nn.functional.adaptive_max_pool2d(mask[None].float(), (size[0], size[1]))[0] > 0
    box = torch.zeros_like(own)
    rows, columns = (own.any(dim=axis).nonzero()[:, 0] for axis in (1, 0))
    (top, bottom), (left, right) = ((int(x[0]), int(x[-1]) + 1) for x in (rows, columns))
    box[max(0, top - halo) : bottom + halo, max(0, left - halo) : right + halo] = True
    return box
