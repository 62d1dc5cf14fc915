"""Products by oneDNN: the same numbers, few lengths, and only where they are faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maskserve_engine.layers import onednn
from maskserve_engine.layers.attention import bucket
from maskserve_engine.layers.linear import PlainLinear


class Lengths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down of how many tokens oneDNN's products were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def layer(wide: int, out: int, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(wide + out)
    weight = torch.randn(out, wide, generator=draw) / wide**0.5
    return weight, torch.randn(out, generator=draw) if bias else None


def near(one: Tensor, other: Tensor) -> bool:
    """As docs/design.md, Tolerances."""
    return float((one - other).abs().max()) <= 1e-4 * max(1.0, float(one.abs().max()))


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(12))
def test_padded_products_are_those_of_torch(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens, wide, out = (int(draw.integers(1, most)) for most in (700, 300, 300))
    weight, bias = layer(wide, out, bias=bool(seed % 3))
    x = torch.randn(tokens, wide, generator=torch.Generator().manual_seed(seed))
    padded_linear = onednn.padded_linear(x, weight, bias)
    assert padded_linear.shape == (tokens, out)
    assert near(padded_linear, F.linear(x, weight, bias))


@torch.inference_mode()
def test_passes_of_a_unet_and_parts_of_layers_are_padded_alike() -> None:
    weight, bias = layer(64, 96)
    x = torch.randn(2, 37, 128)[..., :64]  # neither joined nor contiguous
    padded_linear = onednn.padded_linear(x, weight[32:], bias[32:] if bias is not None else None)
    assert padded_linear.shape == (2, 37, 64)
    assert near(padded_linear, F.linear(x, weight, bias)[..., 32:])


@torch.inference_mode()
def test_what_a_row_gets_does_not_depend_on_its_batch() -> None:
    weight, bias = layer(256, 256)
    x = torch.randn(500, 256)
    padded_linear = onednn.padded_linear(x[:90], weight, bias)
    assert near(padded_linear, onednn.padded_linear(x, weight, bias)[:90])
    assert torch.equal(padded_linear, onednn.padded_linear(x[:90].clone(), weight, bias))


@torch.inference_mode()
def test_few_lengths_are_compiled_whatever_the_tokens() -> None:
    weight, bias = layer(16, 16)
    with Lengths() as lengths:
        for tokens in range(64, 513):
            onednn.padded_linear(torch.zeros(tokens, 16), weight, bias)
    assert len(lengths.counts) == 449
    assert len(set(lengths.counts)) == 1 + 3 * 8


def test_eight_buckets_an_octave_and_at_most_an_eighth_more() -> None:
    for low in (64, 256, 4096):
        assert len({bucket(count) for count in range(low + 1, 2 * low + 1)}) == 8
    assert all(count <= bucket(count) <= 1.125 * count + 7 for count in range(1, 5000))
    assert bucket(1000, most=1010) == 1010


@torch.inference_mode()
@pytest.mark.parametrize(
    ("faster", "dtype", "tokens", "onednn_lengths"),
    [
        (True, torch.float32, 130, [144]),
        (False, torch.float32, 130, []),
        (True, torch.float32, 8, []),  # a slower call for next to nothing
        (True, torch.bfloat16, 130, []),  # torch asks oneDNN by itself
    ],
)
def test_a_layer_asks_onednn_where_that_is_faster(
    faster: bool,
    dtype: torch.dtype,
    tokens: int,
    onednn_lengths: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: faster)
    weight, _ = layer(256, 256)
    product = PlainLinear(weight.to(dtype), None)
    x = torch.randn(tokens, 256).to(dtype)
    with Lengths() as lengths:
        result = product(x)
    assert [n for n in lengths.counts if n != tokens] == onednn_lengths
    if not onednn_lengths:
        assert torch.equal(result, F.linear(x, product.weight))


@pytest.mark.parametrize(
    ("vendor", "capability", "chosen"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),  # MKL uses all there is
        ("GenuineIntel", "AVX512", False),
        ("", "DEFAULT", False),  # such as on ARM
    ],
)
def test_onednn_is_chosen_by_the_kind_of_cpu(vendor: str, capability: str, chosen: bool) -> None:
    assert onednn.beats_mkl(vendor, capability) is chosen


def test_the_kind_of_cpu_is_what_linux_says(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    assert onednn.vendor(path) == "AuthenticAMD"
    path.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert onednn.vendor(path) == ""
    assert onednn.vendor(tmp_path / "absent") == ""
