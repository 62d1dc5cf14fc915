"""Shifts, scales and gates: what a timestep and a prompt do to the tokens of a row (AdaLN)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.layers.kernels import has_kernels

EPS = 1e-6


class PerRow(NamedTuple):
    """A vector of each row."""

    values: Tensor
    """[R, D]; parts of wider vectors, maybe."""
    row_of: Tensor
    """[N] row of each token."""

    def spread(self) -> Tensor:
        """[N, D]: each token's own."""
        return self.values.index_select(0, self.row_of)


Vector = Tensor | PerRow
"""A shift, scale or gate: [D] for all tokens, what broadcasts with them, or of each row."""


def modulate(x: Tensor, shift: Vector, scale: Vector) -> Tensor:
    """Tokens [N, D], or [R, n, D], through their norm, scaled and shifted."""
    if isinstance(shift, PerRow) and isinstance(scale, PerRow):
        if has_kernels(x):
            modulated: Tensor = torch.ops.maskserve.modulate(x, shift.values, *scale)
            return modulated
        shift, scale = shift.spread(), scale.spread()
    assert isinstance(shift, Tensor)
    assert isinstance(scale, Tensor)
    if scale.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], scale, shift, EPS)
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), scale)


def add_gated(x: Tensor, gate: Vector, y: Tensor) -> Tensor:
    """Tokens `x` and `y` as in `modulate`: x + gate · y."""
    if isinstance(gate, PerRow):
        if has_kernels(x):
            gated: Tensor = torch.ops.maskserve.add_gated(x, y, *gate)
            return gated
        gate = gate.spread()
    return torch.addcmul(x, gate, y.view_as(x))


@torch.library.custom_op("maskserve::modulate", mutates_args=())
def _modulate(x: Tensor, shifts: Tensor, scales: Tensor, row_of: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.modulation_kernels import modulate_kernel

    x = x.contiguous()  # as the kernels take it for granted
    shifts, scales, row_of = _by_row(shifts), _by_row(scales), row_of.contiguous()
    (tokens, width), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    strides = shifts.stride(0), scales.stride(0)
    modulate_kernel[(tokens,)](x, shifts, scales, row_of, out, *strides, EPS, width, block)
    return out


@torch.library.custom_op("maskserve::add_gated", mutates_args=())
def _add_gated(x: Tensor, y: Tensor, gates: Tensor, row_of: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.modulation_kernels import add_gated_kernel

    x, y = x.contiguous(), y.contiguous()
    gates, row_of = _by_row(gates), row_of.contiguous()
    (tokens, width), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_gated_kernel[(tokens,)](x, y, gates, row_of, out, gates.stride(0), width, block)
    return out


@_modulate.register_fake
@_add_gated.register_fake
def _(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _by_row(vectors: Tensor) -> Tensor:
    """[R, D] with the numbers of a row one behind the other."""
    return vectors if vectors.stride(1) == 1 else vectors.contiguous()
