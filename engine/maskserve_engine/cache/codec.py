"""Storage formats of cached activations.

`model` keeps the tensor as it is; `int8` and `float8` keep one scale per channel; `int4` keeps one
scale per channel and one per token and group of 32 channels. Scales per channel cost nothing
beside the tokens, and keep a few large channels from drowning the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FORMATS = ("model", "int8", "float8", "int4")
GROUP = 32
_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Coded:
    """A [tokens, channels] tensor in a storage format."""

    format: str
    data: Tensor
    """[tokens, channels], or [tokens, channels / 2] bytes for int4."""
    scale: Tensor | None = None
    """[channels] float32."""
    groups: Tensor | None = None
    """[tokens, channels / 32] float16, int4 only."""

    @property
    def nbytes(self) -> int:
        tensors = (self.data, self.scale, self.groups)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def take(self, index: Tensor) -> Coded:
        """The tokens at `index`, as a copy."""
        # float8 has no index_select on every backend: bytes have.
        raw = self.data.view(torch.uint8) if self.format == "float8" else self.data
        data = raw.index_select(0, index)
        return replace(
            self,
            data=data.view(_FLOAT8) if self.format == "float8" else data,
            groups=None if self.groups is None else self.groups.index_select(0, index),
        )

    def into(self, out: Tensor) -> None:
        """Decode into `out`, [tokens, channels] of any float dtype."""
        if self.format == "model":
            out.copy_(self.data)
        elif self.format == "int4":
            assert self.scale is not None
            assert self.groups is not None
            pairs = torch.stack((self.data & 0xF, self.data >> 4), dim=-1).flatten(1)
            grouped = (pairs.to(out.dtype) - 8).unflatten(1, (-1, GROUP))
            grouped.mul_(self.groups.to(out.dtype)[:, :, None])
            torch.mul(grouped.flatten(1), self.scale.to(out.dtype), out=out)
        else:
            assert self.scale is not None
            torch.mul(self.data.to(out.dtype), self.scale.to(out.dtype), out=out)


def encode(x: Tensor, format: str) -> Coded:
    """Store x [tokens, channels].

    Raises:
        ValueError: unknown format, or int4 with channels not divisible by 32.
    """
    if format == "model":
        return Coded(format, x.clone())
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    wide = x.float()
    scale = wide.abs().amax(dim=0).clamp_min(1e-12)
    if format == "int8":
        scale = scale / 127.0
        return Coded(format, (wide / scale).round_().to(torch.int8), scale)
    if format == "float8":
        scale = scale / _FLOAT8_MAX
        return Coded(format, (wide / scale).to(_FLOAT8), scale)
    if x.shape[1] % GROUP:
        raise ValueError(f"int4 needs channels divisible by {GROUP}, not {x.shape[1]}")
    grouped = (wide / scale).unflatten(1, (-1, GROUP))
    groups = (grouped.abs().amax(dim=2) / 7.0).clamp_min(1e-7).half()
    steps = (grouped / groups.float()[:, :, None]).round_().clamp_(-7, 7).add_(8).flatten(1)
    low, high = steps.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return Coded(format, low | (high << 4), scale, groups)
