"""Products of many tokens on a CPU by oneDNN, where that is faster than the BLAS of torch.

That BLAS is MKL, which leaves AVX-512 to Intel's CPUs; oneDNN uses it wherever it is, and AMD's
compute with it at twice the rate. But it compiles a product for each number of tokens and keeps
it, some 0.6 MB. So tokens are padded to few numbers (`bucket`), which costs a step some 2 %: a
layer has eight products for each octave of tokens, and oneDNN drops those that were not used for
the longest time behind 1,024 in all.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.base.buckets import bucket

_LEAST_TOKENS = 16
_LEAST_WORK = 1 << 23
"""Multiply-adds; below them padding and a slower call cost as much as the rate gives."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[…, out] of x […, in]: `F.linear`, by what is faster on this CPU."""
    if x.numel() * weight.shape[0] >= _LEAST_WORK and _may_pad(x):
        return padded_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _may_pad(x: Tensor) -> bool:
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    return plain and x.shape[:-1].numel() >= _LEAST_TOKENS and is_faster()


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same by oneDNN, of a bucket's tokens. Each token's numbers depend on it alone, and
    within rounding on the bucket.

    Args:
        x: […, in] float32, with one token or more.
        weight: [out, in]
        bias: [out]
    """
    tokens, width = x.shape[:-1].numel(), x.shape[-1]
    length = bucket(tokens)
    flat = x.reshape(tokens, width)
    if length > tokens:
        padded = x.new_empty(length, width)
        padded[:tokens] = flat
        padded[tokens:] = 0
        flat = padded
    out = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return out[:tokens].view(*x.shape[:-1], len(weight))


@cache
def is_faster() -> bool:
    """Whether oneDNN's products are faster on this host."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and beats_mkl(vendor(), torch.backends.cpu.get_cpu_capability())


def beats_mkl(vendor: str, capability: str) -> bool:
    """Told by the kind of CPU and not measured: all processes that serve a model compute alike, and
    do so again when they are started anew.

    Args:
        vendor: as of `vendor`.
        capability: the newest vector instructions that torch uses, such as AVX2.
    """
    return vendor == "AuthenticAMD" and capability == "AVX512"


def vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the CPU, as Linux says; empty where it does not."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in named if name.strip() == "vendor_id"), "")
