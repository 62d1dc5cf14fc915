"""Products in FP8: layers against the library's numbers, kernels against plain operations, dense
rows against diffusers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.steps.replay import Replay
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_engine.batch.forward import forward
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers.fp8 import Fp8Linear, in_fp8, quantised, quantised_gelu
from maskserve_engine.layers.linear import JoinedLinear, linear
from maskserve_engine.layers.modulation import modulate, modulate_fp8
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.fakes.pipelines import diffusers_latents
from tests.support import cached_rows
from tests.support.examples import WHOLE
from tests.support.interpreted import run_interpreted

pytest.importorskip("torchao")


def in_fp8_by_torchao(layer: nn.Linear) -> nn.Linear:
    """As its `quantize_` does on a GPU that multiplies FP8, each token quantised, too."""
    from torchao.quantization import Float8Tensor, PerRow
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import (
        QuantizeTensorToFloat8Kwargs,
    )

    tokens = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
    weight = Float8Tensor.from_hp(layer.weight.data, granularity=PerRow(), act_quant_kwargs=tokens)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer.requires_grad_(False)


def emulated(x: Tensor, layer: Any) -> Tensor:
    """The answer of such a layer: products of rounded numbers, in float32."""
    from torchao.quantization import Float8Tensor, PerRow

    tokens = Float8Tensor.from_hp(x, granularity=PerRow())
    numbers = tokens.qdata.float() * tokens.scale
    out = numbers @ (layer.weight.qdata.float() * layer.weight.scale).T
    return out if layer.bias is None else out + layer.bias


@torch.inference_mode()
def test_a_layer_answers_what_the_librarys_numbers_do() -> None:
    layers = [in_fp8_by_torchao(nn.Linear(64, out)) for out in (32, 48)]
    x = 3 * torch.randn(7, 64)
    expected = torch.cat([emulated(x, layer) for layer in layers], dim=1)
    assert in_fp8(layers[0])
    assert not in_fp8(nn.Linear(4, 4))
    joined = linear(*layers)
    assert isinstance(joined, Fp8Linear)
    torch.testing.assert_close(joined(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined.columns(8, 40)(x), expected[:, 8:40], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined(x[None])[0], joined(x))
    assert joined(x[:0]).shape == (0, 80)
    # Nothing is held twice, and layers with others beside them keep their own.
    assert (
        layers[1].weight.qdata.untyped_storage().data_ptr()
        == joined.weight.untyped_storage().data_ptr()
    )
    mixed = linear(in_fp8_by_torchao(nn.Linear(64, 16)), nn.Linear(64, 16))
    assert isinstance(mixed, JoinedLinear)
    assert isinstance(mixed.parts[0], Fp8Linear)


@torch.inference_mode()
def test_tokens_that_come_quantised_give_the_same() -> None:
    layer = linear(in_fp8_by_torchao(nn.Linear(96, 32)))
    x, shift, scale = torch.randn(5, 96), torch.randn(96), torch.randn(96)
    x[2] = 0.0  # a token of zeros has no largest number
    torch.testing.assert_close(layer(quantised(x)), layer(x))
    through = layer(modulate_fp8(x, shift, scale))
    torch.testing.assert_close(through, layer(modulate(x, shift, scale)))
    tensor, up = torch.randn(5, 32), torch.randn(5, 64)
    joined = torch.cat((tensor, nn.functional.gelu(up, approximate="tanh")), dim=1)
    torch.testing.assert_close(layer(quantised_gelu(up, tensor)), layer(joined))


@pytest.fixture(scope="module")
def adapter() -> Any:
    """The demo model, all products of its blocks in FP8."""
    config = config_of(DEMO_MODEL, model={"outside_noise": "edit"})
    adapter: Any = load_adapter(config)
    with torch.no_grad():
        for name, layer in adapter.model.named_modules():
            # As kernels want them: multiples of 16.
            if "transformer_blocks." in name and type(layer) is nn.Linear:
                in_fp8_by_torchao(layer)
        weights = FluxWeights.of(adapter.model)
    assert isinstance(weights.single_blocks[0].qkv_up, Fp8Linear)
    assert isinstance(weights.double_blocks[0].image.qkv, Fp8Linear)
    adapter.stepped = weights
    return adapter


def test_dense_rows_equal_the_pipeline_whose_layers_round_alike(adapter: Any) -> None:
    from diffusers import FluxFillPipeline

    class Emulated(nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = in_fp8_by_torchao(layer)

        def forward(self, x: Tensor) -> Tensor:
            return emulated(x.flatten(0, -2), self.layer).unflatten(0, x.shape[:-1])

    pipeline: Any = FluxFillPipeline.from_pretrained(DEMO_MODEL)
    pipeline.set_progress_bar_config(disable=True)
    layers = list(pipeline.transformer.named_modules())
    with torch.no_grad():
        for name, layer in layers:
            if "transformer_blocks." in name and type(layer) is nn.Linear:
                pipeline.transformer.set_submodule(name, Emulated(layer))
    case = random_case(np.random.default_rng(3), num_inference_steps=3)
    expected = diffusers_latents(pipeline, case)
    encoder = load_encoder(config_of(DEMO_MODEL))
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    pixels = row.result().array()
    # As of `int8-dynamic` (test_quantise): held against the pipeline with its first tokens nudged.
    noise = torch.Generator().manual_seed(1)

    def nudge(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + 1e-6 * torch.randn(args[0].shape, generator=noise),)

    pipeline.transformer.x_embedder.register_forward_pre_hook(nudge)
    nudged = diffusers_latents(pipeline, case) - expected
    assert np.square(pixels - expected).mean() <= 2 * np.square(nudged).mean()
    assert np.abs(pixels - expected).max() <= 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["kv", "project"])
def test_with_all_tokens_active_cached_equals_dense(adapter: Any, kind: str) -> None:
    encoder = load_encoder(config_of(DEMO_MODEL))
    job = encode_case(encoder, random_case(np.random.default_rng(4), num_inference_steps=2), "r")
    cached_rows.check_all_active(Replay(adapter), encoder, job, kind)


@pytest.mark.parametrize("kind", ["kv", "project"])
def test_products_write_a_lone_rows_keys_where_attention_reads_them(
    adapter: Any, kind: str
) -> None:
    """Oracle: the same with keys and values that stay in place, where they are put by a copy."""
    bench = Bench("demo", None, torch.float32, torch.device("cpu"), "model")
    bench.fill_entry("both")
    row = bench.row(0.3, 1)
    stepped = adapter.stepped

    def velocity(placed_bytes: int) -> Tensor:
        weights = replace(stepped, placed_bytes=placed_bytes)
        batch = FluxBatch([row])
        with torch.inference_mode():
            step = batch.begin_step(weights, 0)
            return forward(step, batch.packed, [kind] * step.block_count)

    in_place, copied = velocity(0), velocity(2**30)
    torch.testing.assert_close(in_place, copied)
    assert in_place.abs().max() > 0


PROGRAM = """
import sys
import torch
from maskserve_engine.layers import fp8, modulation
from maskserve_engine.layers.modulation import Norm, PerRow, add_gated, modulate_fp8


def both(make):
    found = []
    for kernels in (True, False):
        fp8.has_kernels = modulation.has_kernels = lambda x: kernels
        found.append(make())
    return found


def close(one, other):
    torch.testing.assert_close(one.scale, other.scale, rtol=2e-2, atol=1e-9)
    a, b = (each.data.float() * each.scale for each in (one, other))
    # Two numbers of 8 bits are an eighth apart. The interpreter cuts bfloat16 off, so that some are
    # the next ones; and it loses the carry where a number is rounded to a power of two.
    step = torch.maximum(a.abs(), b.abs()) / 8 + 2**-9 * other.scale
    lost = one.data.float().abs().log2() % 1 == 0
    carried = lost & (b.abs() >= 1.7 * a.abs()) & (b.abs() <= 2.1 * a.abs())
    cut = 0.0 if dtype == torch.float32 else 0.1  # of numbers of 10 or so, before the last sum
    assert (((a - b).abs() <= 1.2 * step + cut) | carried).all()
    others = (one.data.float() != other.data.float()).float().mean()
    assert dtype != torch.float32 or others < 0.15


for seed in map(int, sys.argv[1:]):
    torch.manual_seed(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    tokens, width, rows = int(torch.randint(1, 7, ())), (16, 48)[seed % 2], 2
    x, y = (3 * torch.randn(tokens, 3 * width).to(dtype) for _ in range(2))
    x[0] = 0.0
    close(*both(lambda: fp8.quantised(x)))
    close(*both(lambda: fp8.quantised(x[:, width:])))
    close(*both(lambda: fp8.quantised_gelu(x[:, :width], y)))
    close(*both(lambda: fp8.quantised_gelu(y)))
    row_of = torch.randint(0, rows, (tokens,))
    vectors = torch.randn(rows, 9 * width).to(dtype).chunk(3, dim=1)
    looked_up = [PerRow(each, row_of) for each in vectors]
    for shift, scale, gate in (looked_up, [each[0] for each in vectors]):
        close(*both(lambda: modulate_fp8(x, shift, scale)))
        one, other = both(lambda: add_gated(x, gate, y, Norm(shift, scale, fp8=True)))
        torch.testing.assert_close(one[0], other[0], rtol=2e-2, atol=2e-2)
        close(one[1], other[1])
"""


def test_kernels_compute_what_plain_operations_do() -> None:
    pytest.importorskip("triton")
    seeds = range(6) if WHOLE else range(3)  # each type
    run_interpreted(PROGRAM, *map(str, seeds))
