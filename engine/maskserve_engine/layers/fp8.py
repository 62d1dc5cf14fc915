"""Products in FP8: weights with a scale per output, tokens with one each (`torch._scaled_mm`).

The numbers are torchao's, which quantises the weights, and tokens by the same rule. This module
lets our kernels quantise the tokens that they compute, and joins layers with the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.kernels import has_kernels, operation, stand_in

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12
"""Lower bound for the largest absolute number of a token."""


class Fp8Tokens(NamedTuple):
    data: Tensor
    """[N, D] FP8."""
    scale: Tensor
    """[N, 1] float32 factor of the stored numbers."""


Tokens = Tensor | Fp8Tokens


class Fp8Linear(NamedTuple):
    """A `Linear` with FP8 weights."""

    weight: Tensor
    """[out, in] FP8."""
    scale: Tensor
    """[out, 1] float32."""
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tokens, rows: Sequence[Span] = ()) -> Tensor:
        if isinstance(x, Tensor) and x.dim() > 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        tokens = quantised(x) if isinstance(x, Tensor) else x
        if not len(tokens.data):
            return self.weight.new_empty((0, self.out_features), dtype=self.dtype)
        return self.write(tokens, None)

    def write(self, tokens: Fp8Tokens, out: Tensor | None) -> Tensor:
        """Multiply one token or more, into `out` [N, out] if given."""
        return torch._scaled_mm(
            tokens.data,
            self.weight.t(),
            scale_a=tokens.scale,
            scale_b=self.scale.t(),
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
            out=out,
        )

    def columns(self, begin: int, end: int) -> Fp8Linear:
        rows = slice(begin, end)
        bias = None if self.bias is None else self.bias[rows]
        return Fp8Linear(self.weight[rows], self.scale[rows], bias, self.dtype)


def in_fp8(module: nn.Module) -> bool:
    """Return whether a layer is torchao's with FP8 weights and dynamic quantisation per token."""
    weight: Any = getattr(module, "weight", None)
    return (
        type(weight).__name__ == "Float8Tensor"
        and weight.act_quant_kwargs is not None
        and weight.scale.shape == (len(weight), 1)
    )


def fp8_linear(modules: Sequence[Any]) -> Fp8Linear:
    """Join layers with the same input. Their weights become parts of the joined tensor, so nothing
    is stored twice.
    """
    if len(modules) == 1:
        weight: Any = modules[0].weight
        return Fp8Linear(weight.qdata, weight.scale, modules[0].bias, weight.dtype)
    weight = torch.cat([module.weight.data for module in modules])
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([module.bias.data for module in modules])
    begin = 0
    for module in modules:
        end = begin + len(module.weight)
        module.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return Fp8Linear(weight.qdata, weight.scale, bias, weight.dtype)


def quantised(x: Tensor) -> Fp8Tokens:
    """Quantise tokens [N, D], each by its largest number."""
    if has_kernels(x.device):
        return Fp8Tokens(*torch.ops.maskserve.quantise(x, x[:, :0]))
    return _plain(x)


def quantised_gelu(up: Tensor, gate: Tensor | None = None) -> Fp8Tokens:
    """Return GELU (tanh) of `up` [N, D] in FP8, behind the columns of `gate` [N, E] if given."""
    if has_kernels(up.device):
        prefix_tokens = up[:, :0] if gate is None else gate
        return Fp8Tokens(*torch.ops.maskserve.quantise(prefix_tokens, up))
    activated = F.gelu(up, approximate="tanh")
    return _plain(activated if gate is None else torch.cat((gate, activated), dim=1))


def _plain(x: Tensor) -> Fp8Tokens:
    wide = x.float()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp(min=LEAST) / LARGEST
    return Fp8Tokens((wide / scale).clamp(-LARGEST, LARGEST).to(FP8), scale)


@operation("quantise")
def _quantise(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    import triton

    from maskserve_engine.layers.fp8_kernels import quantise_kernel

    x, up = (item if item.stride(1) == 1 else item.contiguous() for item in (x, up))
    (tokens, width), more = x.shape, up.shape[1]
    out = torch.empty(tokens, width + more, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    blocks = [triton.next_power_of_2(max(1, item)) for item in (width, more)]
    quantise_kernel[(tokens,)](
        x, up, out, scales, x.stride(0), up.stride(0), width, more, *blocks, num_warps=8
    )
    return out, scales


@stand_in("quantise")
def _(x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(len(x), x.shape[1] + up.shape[1], dtype=FP8)
    return out, x.new_empty(len(x), 1, dtype=torch.float32)
