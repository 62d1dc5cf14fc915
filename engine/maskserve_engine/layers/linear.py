"""Products of packed tokens with a layer's weights, whatever form these have.

Nothing else that computes a step of FLUX, or of the transformer blocks of a UNet, reads a layer's
weights. A batch tells each product where its rows lie (in a UNet: its passes), so that a product
may treat every row differently (`low_rank.LowRank`). Another form of weights, or one device's share
of them, is another class with the methods of `Linear`.
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
from maskserve_engine.layers.gelu import gelu


@runtime_checkable
class Linear(Protocol):
    """A product x · Wᵀ + b of tokens."""

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        """[…, N, out] of x […, N, in].

        Args:
            x: tokens; not written to.
            rows: [begin, end) of each packed row's tokens along N. May be left out where no row
                has weights of its own.
        """
        ...

    def columns(self, begin: int, end: int) -> Linear:
        """The product that computes outputs `begin` to `end` alone."""
        ...


class PlainLinear(NamedTuple):
    """Weights in the model's dtype."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None
    """[out]"""

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        return onednn.linear(x, self.weight, self.bias)

    def in_epilogue(self, device: torch.device) -> bool:
        """See `in_epilogues`."""
        return device.type == "cuda" and self.bias is not None

    def columns(self, begin: int, end: int) -> PlainLinear:
        rows = slice(begin, end)
        return PlainLinear(self.weight[rows], None if self.bias is None else self.bias[rows])


def in_epilogues(*products: Linear, device: torch.device) -> bool:
    """Whether torch's products on the device do what `gelu_of` and `sum_of_parts` need beside a
    product: cuBLAS has GELU (tanh) in its epilogue. Elsewhere, and where weights have a form of
    their own, each is an operation of its own.
    """
    return all(
        isinstance(product, PlainLinear) and product.in_epilogue(device) for product in products
    )


def gelu_of(product: Linear, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
    """[N, out] GELU (tanh) of a product of `x` [N, in]."""
    inside = isinstance(product, PlainLinear) and product.in_epilogue(x.device)
    if inside:
        assert isinstance(product, PlainLinear)
        assert product.bias is not None
        return torch._addmm_activation(product.bias, x, product.weight.t(), use_gelu=True)
    return gelu(product(x, rows))


def write_product(product: Linear, x: Tokens, out: Tensor) -> None:
    """A product of `x` [N, in], written into `out` [N, out], of weights that are `in_epilogues` or
    in FP8.
    """
    if isinstance(x, Fp8Tokens):
        assert isinstance(product, Fp8Linear)
        product.write(x, out)
        return
    assert isinstance(product, PlainLinear)
    assert product.bias is not None
    torch.addmm(product.bias, x, product.weight.t(), out=out)


def sum_of_parts(product: PlainLinear, parts: Sequence[Tensor]) -> Tensor:
    """The product of tokens whose numbers lie in several tensors [N, …], one beside the other, and
    are not joined for it.
    """
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
    """A library's layer, with weights in a form that only the library knows."""

    module: nn.Module
    out_features: int
    begin: int = 0
    """Of the module's outputs, the first one that is asked for."""

    def __call__(self, x: Tensor, rows: Sequence[Span] = ()) -> Tensor:
        if not x.shape[-2]:  # which not every library takes
            return x.new_empty((*x.shape[:-1], self.out_features))
        out: Tensor = self.module(x)
        return out[..., self.begin : self.begin + self.out_features]

    def columns(self, begin: int, end: int) -> ModuleLinear:
        return ModuleLinear(self.module, end - begin, self.begin + begin)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Several layers with the same input, one beside the other, whose weights cannot be joined."""

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
    """The product of a layer, or of several with the same input, one beside the other.

    Plain layers become one: their parameters are then parts of the joined ones, and nothing is held
    twice.

    Args:
        modules: torch's Linear, or a library's layer that has `out_features` and is called alike.
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
    """Whether its weights are numbers in the model's dtype. (Libraries quantise by another class
    of layers, or by a tensor made of tensors in torch's own.)
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
    """Weights with other products, as a batch needs them whose rows have adapters.

    Args:
        tree: dataclasses and (named) tuples, nested, with products in them; not changed.
        change: is given each product's place in the tree, such as `double_blocks.3.image.qkv`, and
            the product; answers what is to stand there.
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
