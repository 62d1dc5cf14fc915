"""Shifts, scales and gates: modulation of a row's tokens by timestep and prompt (AdaLN)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.layers.fp8 import FP8, Fp8Tokens, quantised
from maskserve_engine.layers.kernels import has_kernels, operation, stand_in

EPS = 1e-6


class PerRow(NamedTuple):
    values: Tensor
    """[R, D]; may be a slice of wider vectors."""
    row_of: Tensor
    """[N] row of each token."""

    def spread(self) -> Tensor:
        """Return [N, D], the vector of each token."""
        return self.values.index_select(0, self.row_of)


Vector = Tensor | PerRow
"""A shift, scale or gate: [D] for all tokens, a broadcastable tensor, or one per row."""


class Norm(NamedTuple):
    shift: Vector
    scale: Vector
    fp8: bool = False
    """Whether the product takes FP8 tokens."""


def modulate(x: Tensor, shift: Vector, scale: Vector, fp8: bool = False) -> Any:
    """Normalise, scale and shift tokens [N, D] or [R, n, D]; return [N, D], or `Fp8Tokens` if
    `fp8`.
    """
    if fp8:
        return modulate_fp8(x, shift, scale)
    if isinstance(shift, PerRow) and isinstance(scale, PerRow):
        if has_kernels(x.device):
            return torch.ops.maskserve.modulate(x, shift.values, *scale)
        shift, scale = shift.spread(), scale.spread()
    assert isinstance(shift, Tensor)
    assert isinstance(scale, Tensor)
    if scale.dim() == 1:
        normed = F.layer_norm(x, x.shape[-1:], scale, shift, EPS)
    else:
        normed = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), scale)
    return normed.flatten(0, -2)


def modulate_fp8(x: Tensor, shift: Vector, scale: Vector) -> Fp8Tokens:
    """Run `modulate` with FP8 output."""
    if has_kernels(x.device) and x.dim() == 2:
        (shifts, row_of), (scales, _) = _looked_up(shift), _looked_up(scale)
        return Fp8Tokens(*torch.ops.maskserve.modulate_fp8(x, shifts, scales, row_of))
    return quantised(modulate(x, shift, scale))


def add_gated(x: Tensor, gate: Vector, y: Tensor, norm: Norm | None = None) -> tuple[Tensor, Any]:
    """Return x + gate · y, and with `norm` also the modulated sum for the next product. With
    kernels it is one launch: the sum is not read again.
    """
    if has_kernels(x.device):
        if norm is not None and x.dim() == 2:
            vectors, row_of = zip(*map(_looked_up, (gate, *norm[:2])), strict=True)
            added, modulated, scales = torch.ops.maskserve.add_gated_modulate(
                x, y.view_as(x), *vectors, row_of[0], norm.fp8
            )
            return added, Fp8Tokens(modulated, scales) if norm.fp8 else modulated
        if isinstance(gate, PerRow):
            return torch.ops.maskserve.add_gated(x, y, *gate), None
    added = torch.addcmul(x, gate.spread() if isinstance(gate, PerRow) else gate, y.view_as(x))
    return added, None if norm is None else modulate(added, *norm)


def _looked_up(vector: Vector) -> tuple[Tensor, Tensor | None]:
    return vector if isinstance(vector, PerRow) else (vector.view(1, -1), None)


@operation("modulate")
def _modulate(x: Tensor, shifts: Tensor, scales: Tensor, row_of: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.modulation_kernels import modulate_kernel

    x = x.contiguous()  # as the kernels take it for granted
    shifts, scales, row_of = _by_row(shifts), _by_row(scales), row_of.contiguous()
    (tokens, width), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    strides = shifts.stride(0), scales.stride(0)
    modulate_kernel[(tokens,)](
        x, shifts, scales, row_of, out, out, *strides, EPS, width, block, False, False
    )
    return out


@operation("modulate_fp8")
def _modulate_fp8(
    x: Tensor, shifts: Tensor, scales: Tensor, row_of: Tensor | None
) -> tuple[Tensor, Tensor]:
    import triton

    from maskserve_engine.layers.modulation_kernels import modulate_kernel

    x, (tokens, width) = x.contiguous(), x.shape
    shifts, scales = _by_row(shifts), _by_row(scales)
    out, out_scales = _new_fp8(x)
    one_row = row_of is None
    row_of = x if row_of is None else row_of.contiguous()
    strides, block = (shifts.stride(0), scales.stride(0)), triton.next_power_of_2(width)
    modulate_kernel[(tokens,)](
        x, shifts, scales, row_of, out, out_scales, *strides, EPS, width, block, one_row, True
    )
    return out, out_scales


def _new_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the fields of `Fp8Tokens` for `x`."""
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(len(x), 1, dtype=torch.float32)


@stand_in("modulate_fp8")
def _(x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return _new_fp8(x)


@operation("add_gated")
def _add_gated(x: Tensor, y: Tensor, gates: Tensor, row_of: Tensor) -> Tensor:
    import triton

    from maskserve_engine.layers.modulation_kernels import add_gated_kernel

    x, y = x.contiguous(), y.contiguous()
    gates, row_of = _by_row(gates), row_of.contiguous()
    (tokens, width), out = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_gated_kernel[(tokens,)](x, y, gates, row_of, out, gates.stride(0), width, block)
    return out


@operation("add_gated_modulate")
def _add_gated_modulate(
    x: Tensor,
    y: Tensor,
    gates: Tensor,
    shifts: Tensor,
    scales: Tensor,
    row_of: Tensor | None,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    import triton

    from maskserve_engine.layers.modulation_kernels import add_gated_modulate_kernel

    x, y = x.contiguous(), y.contiguous()
    gates, shifts, scales = map(_by_row, (gates, shifts, scales))
    one_row = row_of is None
    row_of = x if row_of is None else row_of.contiguous()
    tokens, width = x.shape
    added = torch.empty_like(x)
    out, out_scales = _new_fp8(x) if fp8 else (torch.empty_like(x), x.new_empty(0))
    block = triton.next_power_of_2(width)
    strides = gates.stride(0), shifts.stride(0), scales.stride(0)
    add_gated_modulate_kernel[(tokens,)](
        x, y, gates, shifts, scales, row_of, added, out, out_scales, *strides, EPS, width, block,
        one_row, fp8,
    )  # fmt: skip
    return added, out, out_scales


@stand_in("add_gated_modulate")
def _(
    x: Tensor, y: Tensor, g: Tensor, sh: Tensor, sc: Tensor, row_of: Tensor | None, fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    quantised = _new_fp8(x) if fp8 else (x.new_empty(x.shape), x.new_empty(0))
    return x.new_empty(x.shape), *quantised


@stand_in("modulate")
@stand_in("add_gated")
def _(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _by_row(vectors: Tensor) -> Tensor:
    """Make the last axis of [R, D] contiguous."""
    return vectors if vectors.stride(1) == 1 else vectors.contiguous()
