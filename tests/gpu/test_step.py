"""Steps on a CUDA device: its kernels compute what the CPU's do, and wait for none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.steps.unet_rig import UnetBench
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.cache.entries import encode
from maskserve_engine.layers.add_norm import add_norm
from maskserve_engine.layers.attention import Segments, attention, ends, spans, uniform
from maskserve_engine.layers.fp8 import FP8, Fp8Linear, quantised_gelu
from maskserve_engine.layers.geglu import geglu
from maskserve_engine.layers.linear import PlainLinear, gelu_of, sum_of_parts, write_product
from maskserve_engine.layers.modulation import (
    Norm,
    PerRow,
    add_gated,
    modulate,
    modulate_fp8,
)
from maskserve_engine.layers.qk_norm_rope import fused as fused_heads
from maskserve_engine.layers.qk_norm_rope import rotate
from maskserve_engine.layers.scatter_kv import KvSlots, KvSource, scatter_by_kernels, scatter_kv
from tests.support.no_waits import nothing_waits

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.usefixtures("cuda")


def segments(queries: list[int], keys: list[int]) -> Segments:
    q, k = spans(queries), spans(keys)
    return Segments(q, k, ends(q).to(CUDA), ends(k).to(CUDA), uniform(queries), uniform(keys))


def test_the_variable_length_kernel_agrees_with_each_row_alone() -> None:
    queries, keys = [100, 33, 257], [300, 133, 257]
    q = torch.randn(sum(queries), 24, 128, device=CUDA, dtype=torch.bfloat16)
    k, v = (torch.randn(sum(keys), 24, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    rows = segments(queries, keys)
    together = attention(q, k, v, rows)
    for (qb, qe), (kb, ke) in zip(rows.q_spans, rows.k_spans, strict=True):
        row_output = attention(
            q[qb:qe].float(), k[kb:ke].float(), v[kb:ke].float(), segments([qe - qb], [ke - kb])
        )
        assert torch.allclose(together[qb:qe].float(), row_output, atol=2e-2)


@pytest.mark.parametrize("format", ["model", "int8", "float8", "int4"])
def test_the_placing_kernel_writes_what_the_plain_path_writes(format: str) -> None:
    pytest.importorskip("triton")
    draw = [torch.randn(64, 96).bfloat16() for _ in range(2)]
    ids = torch.randperm(64)[:40]
    at = KvSlots(((8, 48),), torch.zeros(40, dtype=torch.long), *(torch.arange(40),) * 3)
    at = KvSlots(at.spans, *(x.to(CUDA) for x in (at.row_of, at.local, at.to + 8, at.numbers)))
    coded = [encode(x, format) for x in draw]  # which rounds otherwise on a device
    keys, values = (coded_tensor.map(*[lambda t: t.to(CUDA)] * 2) for coded_tensor in coded)
    outs = [torch.zeros(48, 3, 32, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    source = KvSource((keys, values), ids.to(CUDA))
    scatter_by_kernels([source], outs[:2], at)
    plain = [out.cpu() for out in outs[2:]]
    host = KvSource((coded[0], coded[1]), ids)
    scatter_kv([host], plain, KvSlots(at.spans, at.row_of, at.local, at.to, at.numbers))
    assert torch.equal(outs[0].cpu(), plain[0])
    assert torch.equal(outs[1].cpu(), plain[1])


def test_products_with_their_activations_inside_agree_with_the_cpus() -> None:
    x, weight, bias = torch.randn(33, 256), torch.randn(512, 256) / 16, torch.randn(512)
    product = PlainLinear(weight.to(CUDA).bfloat16(), bias.to(CUDA).bfloat16())
    device_x, host = x.to(CUDA).bfloat16(), PlainLinear(weight, bias)
    out = torch.empty(33, 512, device=CUDA, dtype=torch.bfloat16)
    write_product(product, device_x, out)
    for actual, expected in (
        (gelu_of(product, device_x), gelu_of(host, x)),
        (sum_of_parts(product, device_x.split((64, 192), dim=1)), host(x)),
        (out, host(x)),
    ):
        assert torch.allclose(actual.cpu().float(), expected, atol=6e-2, rtol=2e-2)


def test_the_kernels_of_a_unets_block_agree_with_plain_operations() -> None:
    pytest.importorskip("triton")
    x, y = (torch.randn(37, 1280).bfloat16() for _ in range(2))
    norm = torch.nn.LayerNorm(1280).bfloat16().requires_grad_(False)
    plain = (*add_norm(x, y, norm), geglu(x))
    device_outputs = (*add_norm(x.to(CUDA), y.to(CUDA), norm.to(CUDA)), geglu(x.to(CUDA)))
    for expected, actual in zip(plain, device_outputs, strict=True):
        assert torch.allclose(expected.float(), actual.cpu().float(), atol=4e-2, rtol=2e-2)


@pytest.mark.parametrize("format", ["model", "int8", "float8", "int4"])
def test_the_kernel_that_reads_round_tiles_agrees_with_the_plain_path(format: str) -> None:
    pytest.importorskip("triton")
    bench = UnetBench("sd21-768", torch.bfloat16, CUDA, format, 4)
    bench.fill_entry("kv")
    around = bench.row(0.11, 0).surroundings
    assert around is not None
    around.around(0, 0, strided=False)
    assert around.read(), "the kernel was not used"
    for read, actual in around.read().items():
        plain = around._read(around.entry, read)
        torch.testing.assert_close(actual.ring, plain.ring)
        assert (actual.outside is None) == (plain.outside is None) == read.strided
        if actual.outside is not None and plain.outside is not None:
            for name in ("mean", "variance"):
                actual_part, plain_part = (
                    getattr(result.outside, name) for result in (actual, plain)
                )
                torch.testing.assert_close(actual_part, plain_part, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["kv", "project"])
def test_steady_steps_wait_for_nothing(kind: str) -> None:
    bench = Bench("flux-1024", (1, 1), torch.bfloat16, CUDA, "int8")
    bench.fill_entry(kind)
    rows = [bench.row(ratio, seed) for seed, ratio in enumerate((0.1, 0.3, None))]
    bench.step(rows, kind)
    with nothing_waits(CUDA):
        for _ in range(3):
            bench.step(rows, kind)


@pytest.mark.parametrize("streams", [0, 2])
def test_the_kernel_that_turns_heads_agrees_with_the_plain_path(streams: int) -> None:
    pytest.importorskip("triton")
    x = torch.randn(300, 7 * 3072, device=CUDA).bfloat16()[:, : 2 * 3072]
    x = x.unflatten(-1, (2, 24, 128))
    norms = torch.randn(*((streams,) if streams else ()), 2, 1, 128, device=CUDA)
    stream_of = torch.randint(streams, (300,), device=CUDA) if streams else None
    cis = torch.polar(torch.ones(300, 64), torch.randn(300, 64)).to(CUDA)
    stream_norms = norms if stream_of is None else norms[stream_of]
    normed = F.rms_norm(x, x.shape[-1:], None, 1e-6) * stream_norms
    plain = rotate(normed, cis, x.dtype)
    fused_heads(x, norms, cis, stream_of)
    torch.testing.assert_close(x, plain, rtol=2**-7, atol=2**-7)


def test_the_kernels_that_modulate_agree_with_the_plain_path() -> None:
    pytest.importorskip("triton")
    row_of = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 33, 257])).to(CUDA)
    x, y = (torch.randn(390, 3072, device=CUDA).bfloat16() for _ in range(2))
    vectors = torch.randn(3, 6 * 3072, device=CUDA).bfloat16().chunk(6, dim=1)
    shift, scale, gate, *_ = (PerRow(vector, row_of) for vector in vectors)
    together = add_gated(x, gate, y, Norm(shift, scale))
    added, _ = add_gated(x, gate.spread(), y)
    for result, plain in (
        (modulate(x, shift, scale), modulate(x, shift.spread(), scale.spread())),
        (add_gated(x, gate, y)[0], added),
        (together[0], added),
        (together[1], modulate(added, shift.spread(), scale.spread())),
    ):
        torch.testing.assert_close(result, plain, rtol=2**-7, atol=2**-5)


def assert_recorded_alike(
    bench: Bench | UnetBench, plain: Any, ratios: Sequence[float | None]
) -> None:
    """Five steps of rows of these mask ratios end alike, recorded or not; `plain` are the weights
    without recordings.
    """
    recorder, answers = Graphs.on(CUDA, torch.bfloat16), []
    assert recorder is not None
    for graphs in (None, recorder):
        bench.weights, bench.batch = replace(plain, graphs=graphs), None
        torch.manual_seed(4)
        rows: list[Any] = [bench.row(ratio, seed) for seed, ratio in enumerate(ratios)]
        for row in rows:
            if isinstance(bench, Bench):
                row.recorded = True
        for _ in range(5):
            bench.step(rows, "kv")
        answers.append([row.latents.float().cpu() for row in rows])
    assert recorder._capture is not None, "recording was turned off"
    assert any(recorder._steps.values())
    for tensor, other_tensor in zip(*answers, strict=True):
        torch.testing.assert_close(tensor, other_tensor, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ratios", [(0.1,), (0.3, None)])
def test_a_recorded_unet_step_answers_what_one_that_is_not_does(
    ratios: tuple[float | None, ...],
) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(3)
    bench = UnetBench("sd21-768", torch.bfloat16, CUDA, "int8")
    bench.fill_entry("kv")
    assert_recorded_alike(bench, bench.weights, ratios)


@pytest.mark.parametrize("ratios", [(0.11,), (0.1, 0.3)])
def test_a_recorded_flux_step_answers_what_one_that_is_not_does(
    ratios: tuple[float | None, ...],
) -> None:
    pytest.importorskip("triton")
    bench = Bench("flux-1024", (1, 1), torch.bfloat16, CUDA, "int8")
    bench.fill_entry("kv")
    assert_recorded_alike(bench, replace(bench.weights, placed_bytes=0), ratios)


def test_products_in_fp8_agree_with_their_numbers() -> None:
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        pytest.skip("this device has no float8")
    x, y = (3 * torch.randn(33, width, device=CUDA).bfloat16() for width in (256, 1024))
    weight, scale = torch.randn(512, 1280, device=CUDA).to(FP8), torch.rand(512, 1, device=CUDA)
    product = Fp8Linear(weight, scale, torch.randn(512, device=CUDA).bfloat16(), torch.bfloat16)
    tokens = quantised_gelu(y, x)
    joined = torch.cat((x, torch.nn.functional.gelu(y, approximate="tanh")), dim=1)
    numbers = tokens.data.float() * tokens.scale
    torch.testing.assert_close(numbers, joined.float(), rtol=2**-3, atol=2e-2)
    expected = numbers @ (weight.float() * scale).T + product.bias
    difference = (product(tokens).float() - expected).abs().max()
    assert difference <= 2e-2 * expected.abs().max()
    shift, gain = torch.randn(2, 256, device=CUDA).bfloat16().unbind()
    quantized = modulate_fp8(x, shift, gain)
    plain = modulate(x, shift, gain).float()
    torch.testing.assert_close(
        quantized.data.float() * quantized.scale, plain, rtol=2**-3, atol=5e-2
    )
