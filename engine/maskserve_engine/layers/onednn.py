"""Products of many tokens on a CPU by oneDNN, where it is faster than torch's BLAS.

That BLAS is MKL, which uses AVX-512 on Intel's CPUs only; oneDNN uses it on AMD's, too, at twice
the rate. But it compiles and keeps about 0.6 MB for each number of tokens. So tokens are padded to
buckets (`bucket`), which costs about 2 % of a step: a layer has eight products per octave of
tokens, and oneDNN evicts the least recently used beyond 1,024.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from maskserve_engine.layers.attention import bucket

_LEAST_TOKENS = 16
LEAST_WORK = 1 << 23
"""Multiply-adds below which padding and the slower call cost more than they gain."""


def may_pad(x: Tensor) -> bool:
    """Return whether oneDNN computes a product of `x` […, in], if the product has at least
    `LEAST_WORK` multiply-adds.
    """
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    return plain and x.shape[:-1].numel() >= _LEAST_TOKENS and is_faster()


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute […, out] from x […, in] float32 by oneDNN, with a bucket's number of tokens. A
    token's result depends on the token alone and, within rounding, on the bucket.
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
    """Return whether oneDNN's products are faster on this host."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and beats_mkl(vendor(), torch.backends.cpu.get_cpu_capability())


def beats_mkl(vendor: str, capability: str) -> bool:
    """Decide by the kind of CPU, without a measurement, so that all processes of a model compute
    alike, after restarts, too. `capability` is the newest vector instruction set that torch uses,
    such as AVX2.
    """
    return vendor == "AuthenticAMD" and capability == "AVX512"


def vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's vendor from /proc/cpuinfo; empty if unknown."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")
