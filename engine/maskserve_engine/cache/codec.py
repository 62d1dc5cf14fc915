"""Storage formats of cached activations.

`model` keeps the tensor as it is; `int8` and `float8` keep one scale per channel; `int4` keeps one
scale per channel and one per token and group of 32 channels. Scales per channel cost nothing
beside the tokens, and keep a few large channels from drowning the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskserve_core.config_tables import ENTRY_FORMATS

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
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def nbytes_of(self, tokens: int) -> int:
        """Bytes of so many of its tokens."""
        fixed = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return fixed + (self.nbytes - fixed) * tokens // max(1, len(self.data))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.data, self.scale, self.groups) if t is not None)

    def map(
        self, tokens: Callable[[Tensor], Tensor], channels: Callable[[Tensor], Tensor] | None = None
    ) -> Coded:
        """`tokens` applied to what has a row per token, `channels` to the scale per channel."""
        scale = self.scale if self.scale is None or channels is None else channels(self.scale)
        groups = None if self.groups is None else tokens(self.groups)
        return replace(self, data=tokens(self.data), scale=scale, groups=groups)

    def take(self, index: Tensor) -> Coded:
        """The tokens at `index`, as a copy."""

        def taken(t: Tensor) -> Tensor:
            # float8 has no index_select on every backend: bytes have.
            raw = t.view(torch.uint8) if t.dtype == _FLOAT8 else t
            return raw.index_select(0, index).view(t.dtype)

        return self.map(taken)

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
            scale = self.scale.to(out.dtype)
            # Integers are promoted on the way; float8 is not.
            data = self.data if self.format == "int8" else self.data.to(out.dtype)
            torch.mul(data, scale, out=out)


def encode(x: Tensor, format: str) -> Coded:
    """Store x [tokens, channels], token by token however it lies in memory.

    Raises:
        ValueError: unknown format, or int4 with channels not divisible by 32.
    """
    if format == "model":
        return Coded(format, x.clone(memory_format=torch.contiguous_format))
    if format not in ENTRY_FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(ENTRY_FORMATS)}")
    wide = x.float().contiguous()
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
