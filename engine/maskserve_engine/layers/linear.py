"""Linear layers over packed tokens, whatever the form of their weights, and the activations
between them.

Nothing else in a step of FLUX, or of a UNet's transformer blocks, reads a layer's weights. A batch
passes the spans of its rows (in a UNet: its passes), so that a product may differ by row
(`low_rank.LowRank`). Another form of weights, or a device's share of them, is another class with
the methods of `Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskserve_engine.layers import onednn
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.fp8 import Fp8Linear, Fp8Tokens, Tokens, fp8_linear, in_fp8


@runtime_checkable
class Linear(Protocol):
    """A product x · Wᵀ + b of tokens."""

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        """Return […, N, out] from x […, N, in], which is not written to. `rows`, [begin, end) of
        each row along N, may be omitted where no row has its own weights.
        """
        ...

    def columns(self, begin: int, end: int) -> Linear: ...


class PlainLinear(NamedTuple):
    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        weight = self.weight
        if x.numel() * weight.shape[0] >= onednn.LEAST_WORK and onednn.may_pad(x):
            return onednn.padded_linear(x, weight, self.bias)
        return F.linear(x, weight, self.bias)

    def in_epilogue(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.bias is not None

    def columns(self, begin: int, end: int) -> PlainLinear:
        rows = slice(begin, end)
        return PlainLinear(self.weight[rows], None if self.bias is None else self.bias[rows])


def in_epilogues(*products: Linear, device: torch.device) -> bool:
    """Return whether `gelu_of` and `sum_of_parts` can be fused with these products on the device:
    cuBLAS has GELU (tanh) in its epilogue. Elsewhere, and for other forms of weights, they are
    separate operations.
    """
    return all(
        isinstance(product, PlainLinear) and product.in_epilogue(device) for product in products
    )


_LINEAR = torch.tensor(2.0 * (2.0 / torch.pi) ** 0.5)
_CUBIC = 0.044715 * 2.0 * (2.0 / torch.pi) ** 0.5


def gelu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute GELU (tanh) of any shape, in `out` if given, which may be `x`; float32 on a CPU is
    within 1e-5 of torch's.

    (1 + tanh u) / 2 is the sigmoid of 2u, which torch computes in a sixth of the time of tanh; all
    of it takes half the time of torch's GELU.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        share = torch.addcmul(_LINEAR, x, x, value=_CUBIC).mul_(x).sigmoid_()
        return torch.mul(x, share, out=share if out is None else out)
    if out is None:
        return F.gelu(x, approximate="tanh")
    return torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def swiglu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return SiLU of the first half of each token times the second, [N, D] from [N, 2 · D];
    `inplace` writes it over the first half.
    """
    first, second = x.chunk(2, dim=-1)
    return F.silu(first, inplace=inplace).mul_(second)


def gelu_of(product: Linear, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
    """Return [N, out] GELU (tanh) of a product of `x` [N, in]."""
    if x.is_cuda and isinstance(product, PlainLinear) and product.in_epilogue(x.device):
        assert product.bias is not None
        return torch._addmm_activation(product.bias, x, product.weight.t(), use_gelu=True)
    return gelu(product(x, rows))


def write_product(product: Linear, x: Tokens, out: Tensor) -> None:
    """Write a product of `x` [N, in] to `out` [N, out]; the weights must be `in_epilogues` or in
    FP8.
    """
    if isinstance(x, Fp8Tokens):
        assert isinstance(product, Fp8Linear)
        product.write(x, out)
        return
    assert isinstance(product, PlainLinear)
    assert product.bias is not None
    torch.addmm(product.bias, x, product.weight.t(), out=out)


def sum_of_parts(product: PlainLinear, parts: Sequence[Tensor]) -> Tensor:
    """Multiply tokens whose columns lie in several tensors [N, …], without joining them."""
    out, bias = None, product.bias
    begin = 0
    for part in parts:
        end = begin + part.shape[1]
        weight = product.weight[:, begin:end]
        if out is None:
            out = F.linear(part, weight, bias)
        else:
            out.addmm_(part, weight.t())
        begin = end
    assert out is not None
    return out


@dataclass(frozen=True, slots=True)
class ModuleLinear:
    """A library's layer, with weights in the library's own form."""

    module: nn.Module
    out_features: int
    begin: int = 0
    """First output of the module that is returned."""

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        if not x.shape[-2]:  # which not every library takes
            return x.new_empty((*x.shape[:-1], self.out_features))
        out: Tensor = self.module(x)
        return out[..., self.begin : self.begin + self.out_features]

    def columns(self, begin: int, end: int) -> ModuleLinear:
        return ModuleLinear(self.module, end - begin, self.begin + begin)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Several layers with the same input whose weights cannot be joined."""

    parts: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        return torch.cat([part(x, rows) for part in self.parts], dim=-1)

    def columns(self, begin: int, end: int) -> JoinedLinear:
        chosen, first = [], 0
        for part in self.parts:
            last = first + part.out_features
            if begin < last and end > first:
                chosen.append(part.columns(max(begin - first, 0), min(end, last) - first))
            first = last
        return JoinedLinear(tuple(chosen))


def linear(*modules: Any) -> Linear:
    """Return the product of one layer, or of several with the same input, side by side.

    Plain layers are joined: their parameters become parts of the joined tensor, so nothing is
    stored twice.
    """
    if all(in_fp8(module) for module in modules):
        return fp8_linear(modules)
    if not all(_is_plain(module) for module in modules):
        products = tuple(
            PlainLinear(module.weight, module.bias)
            if _is_plain(module)
            else fp8_linear((module,))
            if in_fp8(module)
            else ModuleLinear(module, module.out_features)
            for module in modules
        )
        return products[0] if len(products) == 1 else JoinedLinear(products)
    if len(modules) == 1:
        return PlainLinear(modules[0].weight, modules[0].bias)
    return _joined(modules)


def _is_plain(module: nn.Module) -> bool:
    """Return whether the weights are plain numbers in the model's dtype. (Libraries quantise with
    another layer class, or with a tensor subclass.)
    """
    return type(module) is nn.Linear and not hasattr(module.weight, "__tensor_flatten__")


def _joined(modules: Sequence[nn.Linear]) -> PlainLinear:
    weight = nn.Parameter(torch.cat([m.weight for m in modules]), requires_grad=False)
    bias = None
    if modules[0].bias is not None:
        bias = nn.Parameter(torch.cat([m.bias for m in modules]), requires_grad=False)
    begin = 0
    for module in modules:
        end = begin + len(module.weight)
        module.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return PlainLinear(weight, bias)


Tree = TypeVar("Tree")


def map_linears(tree: Tree, change: Callable[[str, Linear], Linear], at: str = "") -> Tree:
    """Return weights with replaced products, for a batch whose rows have LoRAs.

    Args:
        tree: nested dataclasses and (named) tuples with products in them; not changed.
        change: maps a product's place, such as `double_blocks.3.image.qkv`, and the product to
            its replacement.
        at: place of the tree itself.
    """

    def below(name: object, x: Any) -> Any:
        return map_linears(x, change, f"{at}.{name}" if at else str(name))

    mapped: Any = tree
    if isinstance(tree, Tensor | nn.Module):
        return tree
    if isinstance(tree, Linear):
        mapped = change(at, tree)
    elif isinstance(tree, tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        parts = [below(name, x) for name, x in zip(names, tree, strict=True)]
        mapped = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    elif is_dataclass(tree):
        changed = {f.name: below(f.name, getattr(tree, f.name)) for f in fields(tree)}
        mapped = replace(mapped, **changed)
    return mapped
