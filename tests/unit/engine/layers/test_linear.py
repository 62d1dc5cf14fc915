"""Products of every form against dense ones on random numbers: by themselves, in FLUX, in UNets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from maskserve_benchmarks.published_models import SD21
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.steps.unet_rig import UNETS, UnetBench
from maskserve_engine.batch.forward import forward
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.mmdit import blocks
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.unet.forward import PackedPasses
from maskserve_engine.families.unet.forward import forward as unet_forward
from maskserve_engine.families.unet.latents import PackedLatents
from maskserve_engine.families.unet.rows import Guidance, UnetPrompt
from maskserve_engine.families.unet.weights import UnetWeights
from maskserve_engine.layers.attention import spans
from maskserve_engine.layers.linear import (
    JoinedLinear,
    Linear,
    ModuleLinear,
    PlainLinear,
    linear,
    map_linears,
    sum_of_parts,
    write_product,
)
from maskserve_engine.layers.low_rank import LowRank, Update, Updates
from maskserve_engine.layers.shrink_expand import Part

pytestmark = [pytest.mark.spread("unet"), pytest.mark.usefixtures("inference")]

KINDS = ("kv", "project", "dense")
BLOCKS = (2, 2)
Adapter = tuple[Tensor, Tensor, float]


class Int8Linear(nn.Module):
    """As a library has quantised weights: in no form that torch knows."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.out_features = dense.out_features
        self.scales = dense.weight.detach().abs().amax(1, keepdim=True) / 127
        self.packed = (dense.weight.detach() / self.scales).round().to(torch.int8)
        self.bias = dense.bias

    @property
    def dense(self) -> Tensor:
        return self.packed * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense, self.bias)


def adapter(inputs: int, outputs: int, scale: float) -> Adapter:
    rank = int(torch.randint(1, 5, ()))
    return torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank) / rank**0.5, scale


def updates_of(adapters: Sequence[Adapter]) -> Updates:
    return tuple([(Update(a, (Part(b, 0, 0),)), scale) for a, b, scale in adapters])


def merged(weight: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """W + Σ s · B A"""
    return weight + sum(scale * (b @ a) for a, b, scale in adapters)


def columns() -> tuple[int, int]:
    begin = int(torch.randint(0, 20, ()))
    return begin, int(torch.randint(begin + 1, 25, ()))


@pytest.mark.parametrize("bias", [True, False])
def test_plain_layers_are_joined_without_a_copy(bias: bool) -> None:
    layers = [nn.Linear(6, n, bias=bias) for n in (9, 4, 11)]
    x, (begin, end) = torch.randn(7, 6), columns()
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    joined = linear(*layers)
    assert isinstance(joined, PlainLinear)
    assert joined.out_features == 24
    torch.testing.assert_close(joined(x), expected)
    torch.testing.assert_close(joined.columns(begin, end)(x), expected[:, begin:end])
    assert joined.columns(9, 13).weight.data_ptr() == layers[1].weight.data_ptr()


def test_a_librarys_layer_is_called_and_nothing_of_it_is_read() -> None:
    int8_linear = Int8Linear(nn.Linear(6, 24))
    x, (begin, end) = torch.randn(2, 7, 6), columns()
    wrapper = linear(int8_linear)
    assert isinstance(wrapper, ModuleLinear)
    assert torch.equal(wrapper(x), int8_linear(x))
    assert torch.equal(wrapper.columns(begin, end)(x), int8_linear(x)[..., begin:end])
    part = wrapper.columns(5, 20).columns(2, 9)
    assert part.out_features == 7
    assert torch.equal(part(x), int8_linear(x)[..., 7:14])


def test_layers_that_cannot_be_joined_lie_beside_one_another() -> None:
    layers = [nn.Linear(6, 9), Int8Linear(nn.Linear(6, 4)), nn.Linear(6, 11)]
    x = torch.randn(7, 6)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    joined = linear(*layers)
    assert isinstance(joined, JoinedLinear)
    assert torch.equal(joined(x), expected)
    for _ in range(10):
        begin, end = columns()
        part = joined.columns(begin, end)
        assert part.out_features == end - begin
        torch.testing.assert_close(part(x), expected[:, begin:end])


@pytest.mark.parametrize("make", [lambda layer: layer, Int8Linear], ids=["plain", "int8"])
def test_each_row_has_its_own_update(make: Callable[[nn.Linear], nn.Module]) -> None:
    """Oracle: W + Σ s · B A, made for each row, in float64."""
    layer = make(nn.Linear(8, 24))
    weight = (layer.dense if isinstance(layer, Int8Linear) else layer.weight).double()
    for _ in range(10):
        lengths = [int(n) for n in torch.randint(0, 6, (5,))]
        two = [adapter(8, 24, 0.7), adapter(8, 24, -1.3)]
        adapters = [two, two, [], [adapter(8, 24, 2.0)], two[:1]]
        row_updates = list(map(updates_of, adapters))
        product = LowRank(linear(layer), (row_updates[0], row_updates[0], *row_updates[2:]))
        rows, x = spans(lengths), torch.randn(sum(lengths), 8)
        out, (first, last) = product(x, rows), columns()
        part = product.columns(first, last)(x, rows)
        for update, (begin, end) in zip(adapters, rows, strict=True):
            exact = [(a.double(), b.double(), scale) for a, b, scale in update]
            expected = F.linear(x[begin:end].double(), merged(weight, exact), layer.bias.double())
            torch.testing.assert_close(out[begin:end].double(), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(part[begin:end], out[begin:end, first:last])
        begin, end = rows[2]
        assert torch.equal(out[begin:end], linear(layer)(x)[begin:end])


@pytest.fixture(scope="module")
def bench() -> Bench:
    result = Bench("demo", BLOCKS, torch.float32, torch.device("cpu"), "model")
    result.fill_entry("both")
    return result


RATIOS = (0.2, None, 0.4, 0.2)


def outputs(
    bench: Bench,
    weights: FluxWeights,
    chosen: Sequence[int],
    kind: str,
    step_class: type[blocks.FluxStep] = blocks.FluxStep,
) -> list[Tensor]:
    """[n, channels] of each chosen row."""
    torch.manual_seed(7)
    rows = [bench.row(ratio, seed) for seed, ratio in enumerate(RATIOS)]
    batch = FluxBatch.of([rows[i] for i in chosen], None)
    step = batch.begin_step(weights, 0)
    step = step_class(step.weights, step.vectors)
    out = forward(step, batch.packed, [kind] * sum(BLOCKS))
    return list(out.split(batch.packed.layout.narrow.image_stream.lengths))


class RowAdapters:
    """Random adapters of each row for all products of a model: some, several or none."""

    def __init__(self) -> None:
        self.of: dict[str, list[list[Adapter]]] = {}

    def added(self, rows: Sequence[int]) -> Callable[[str, Linear], Linear]:
        """Products that add to each packed part what the row of this number has."""

        def change(name: str, layer: Linear) -> Linear:
            assert isinstance(layer, PlainLinear)
            size = layer.weight.shape[1], layer.weight.shape[0]
            self.of[name] = [
                [adapter(*size, 0.3)],
                [adapter(*size, -0.2), adapter(*size, 0.1)],
                [],
                [adapter(*size, 0.2)],
            ]
            updates = list(map(updates_of, self.of[name]))
            return LowRank(layer, tuple([updates[row] for row in rows]))

        return change

    def merged(self, row: int) -> Callable[[str, Linear], Linear]:
        """Products of a model that has this row's adapters in its weights."""

        def change(name: str, layer: Linear) -> Linear:
            assert isinstance(layer, PlainLinear)
            return PlainLinear(merged(layer.weight, self.of[name][row]), layer.bias)

        return change


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_adapters_of_their_own_share_a_batch(bench: Bench, kind: str) -> None:
    """Each as it is by itself on a model that has its adapters in its weights."""
    adapters, every = RowAdapters(), range(len(RATIOS))
    weights = map_linears(bench.weights, adapters.added(every))
    for row, output in enumerate(outputs(bench, weights, every, kind)):
        merged_weights = map_linears(bench.weights, adapters.merged(row))
        [alone] = outputs(bench, merged_weights, [row], kind)
        torch.testing.assert_close(output, alone, rtol=1e-3, atol=1e-3)
        if adapters.of["proj_out"][row]:
            [without] = outputs(bench, bench.weights, [row], kind)
            assert (output - without).abs().max() > 0.01
    embedders = 2 * 2 + 2 * bool(bench.weights.time_text_embed.guidance_embedder)
    assert len(adapters.of) == 4 + embedders + 10 * BLOCKS[0] + 3 * BLOCKS[1]


class InsideEpilogues(PlainLinear):
    """A product that says of every device what it says of CUDA."""

    def in_epilogue(self, device: torch.device) -> bool:
        return True


def inside_epilogues(name: str, layer: Linear) -> Linear:
    return InsideEpilogues(*layer) if isinstance(layer, PlainLinear) else layer


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_their_activations_inside_compute_the_same(bench: Bench, kind: str) -> None:
    """As on CUDA: what is joined elsewhere is never joined there."""
    every = range(len(RATIOS))
    apart = [outputs(bench, bench.weights, chosen, kind) for chosen in (every, [1])]
    weights = map_linears(bench.weights, inside_epilogues)
    inside = [outputs(bench, weights, chosen, kind) for chosen in (every, [1])]
    for one, other in zip(apart, inside, strict=True):  # GELU rounds otherwise there
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_products_write_a_lone_rows_keys_where_attention_reads_them(
    bench: Bench, kind: str
) -> None:
    """As on CUDA, of keys that do not stay in place from step to step."""
    apart = [outputs(bench, bench.weights, [row], kind)[0] for row in (0, 2)]
    rooms: list[Tensor] = []

    class Watched(blocks.FluxStep):
        def pre(self, *args: Any) -> Any:
            rooms.extend(arg for arg in args[-1:] if arg is not None)
            return super().pre(*args)

    weights = replace(map_linears(bench.weights, inside_epilogues), placed_bytes=0)
    for row, expected in zip((0, 2), apart, strict=True):
        [result] = outputs(bench, weights, [row], kind, Watched)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=5e-5)
    assert len(rooms) == (0 if kind == "dense" else 2 * sum(BLOCKS))


@pytest.mark.parametrize("widths", [(5,), (3, 9), (4, 1, 7)])
def test_a_sum_of_parts_is_the_product_of_what_is_joined(widths: tuple[int, ...]) -> None:
    product = PlainLinear(torch.randn(6, sum(widths)), torch.randn(6))
    parts = [torch.randn(8, width) for width in widths]
    joined = torch.cat(parts, dim=1)
    torch.testing.assert_close(sum_of_parts(product, parts), product(joined))
    out = torch.empty(10, 6)
    write_product(product, joined, out[1:9])
    torch.testing.assert_close(out[1:9], product(joined))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_librarys_layers_compute_the_same(bench: Bench, kind: str) -> None:
    def wrapped(name: str, linear_layer: Linear) -> Linear:
        assert isinstance(linear_layer, PlainLinear)
        layer = nn.Linear(*reversed(linear_layer.weight.shape), bias=linear_layer.bias is not None)
        layer.weight = nn.Parameter(linear_layer.weight, requires_grad=False)
        if linear_layer.bias is not None:
            layer.bias = nn.Parameter(linear_layer.bias, requires_grad=False)
        return ModuleLinear(layer, linear_layer.out_features)

    every = range(len(RATIOS))
    results = outputs(bench, map_linears(bench.weights, wrapped), every, kind)
    for one, output in zip(results, outputs(bench, bench.weights, every, kind), strict=True):
        torch.testing.assert_close(one, output)


UNET: dict[str, Any] = {
    **SD21,
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": (2, 4),
    "cross_attention_dim": 16,
    "norm_num_groups": 8,
    "layers_per_block": 2,
}
STACKS = 2 + 1 + 3
UNET_RATIOS = (None, 0.2, 0.4, 0.1)
GUIDED = (True, False, False, True)
UNET_KINDS = [("kv", 0), ("project", 0), ("dense", 0), ("kv", 1)]


@pytest.fixture(scope="module", params=[True, False], ids=["linear", "convolution"])
def unet(request: pytest.FixtureRequest) -> Any:
    """How a stack's tokens come from its feature map, and go back."""
    config = {**UNET, "use_linear_projection": request.param}
    return UNet2DConditionModel(**config).eval().requires_grad_(False)


def unet_bench(unet: Any, halo: int) -> UnetBench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UNETS, "small", UNET)
        result = UnetBench("small", torch.float32, torch.device("cpu"), "model", halo, unet)
    result.fill_entry("both")
    return result


def unet_answers(
    model_bench: UnetBench, weights: UnetWeights, chosen: Sequence[int], kind: str
) -> list[Tensor]:
    """[passes, C, h, w] of each chosen row; rows with a tile are the last."""
    torch.manual_seed(7)
    rows = [model_bench.row(ratio, seed) for seed, ratio in enumerate(UNET_RATIOS)]
    for row, guided in zip(rows, GUIDED, strict=True):
        if guided:
            row.guidance = Guidance(UnetPrompt(torch.randn_like(row.prompt.text), None), 3.0)
    passes = [rows[i].passes() for i in chosen]
    inputs = PackedLatents([rows[i] for i in chosen]).samples()
    samples = [x for x, row_passes in zip(inputs, passes, strict=True) for _ in row_passes]
    packed = PackedPasses(
        [x for row_passes in passes for x in row_passes], (16, 16), 2, torch.device("cpu")
    )
    timesteps = torch.full([len(samples)], 300.0)
    out = unet_forward(
        weights, packed, torch.stack(samples), timesteps, [kind] * model_bench.blocks
    )
    return list(out.split([len(row_passes) for row_passes in passes]))


@pytest.mark.parametrize(("kind", "halo"), UNET_KINDS)
def test_unet_rows_with_adapters_of_their_own_share_a_batch(
    unet: Any, kind: str, halo: int
) -> None:
    """Both passes of a row have its adapters, and no other row's."""
    model_bench, adapters, every = unet_bench(unet, halo), RowAdapters(), range(len(GUIDED))
    weights = UnetWeights.of(unet)
    rows = [row for row in every for _ in range(1 + GUIDED[row])]
    together = weights.with_linears(adapters.added(rows))
    for row, unet_answer in enumerate(unet_answers(model_bench, together, every, kind)):
        assert len(unet_answer) == 1 + GUIDED[row]
        linears = weights.with_linears(adapters.merged(row))
        [alone] = unet_answers(model_bench, linears, [row], kind)
        torch.testing.assert_close(unet_answer, alone, rtol=1e-3, atol=1e-3)
        [without] = unet_answers(model_bench, weights, [row], kind)
        changed = any(updates[row] for updates in adapters.of.values())
        assert ((unet_answer - without).abs().amax((1, 2, 3)) > 0.01).tolist() == [changed] * len(
            unet_answer
        )
    assert len(adapters.of) == STACKS * (2 + 7)  # two projections of tokens, a block's products


@pytest.mark.parametrize(("kind", "halo"), UNET_KINDS)
def test_unet_blocks_of_a_librarys_layers_compute_the_same(kind: str, halo: int) -> None:
    """A model whose layers a library has quantised, and one with the weights they stand for."""
    quantised, dense = (UNet2DConditionModel(**UNET).eval().requires_grad_(False) for _ in "ab")
    dense.load_state_dict(quantised.state_dict())
    for name, layer in list(quantised.named_modules()):
        if "attentions" in name and type(layer) is nn.Linear:
            int8_linear = Int8Linear(layer)
            quantised.set_submodule(name, int8_linear)
            dense.get_submodule(name).weight.copy_(int8_linear.dense)
    every = range(len(GUIDED))
    weights = UnetWeights.of(quantised)
    assert isinstance(weights.up_blocks[1][0].transformer_blocks[0].down, ModuleLinear)
    model_bench = unet_bench(dense, halo)
    results = unet_answers(model_bench, weights, every, kind)
    for one, unet_answer in zip(
        results, unet_answers(model_bench, model_bench.weights, every, kind), strict=True
    ):
        torch.testing.assert_close(one, unet_answer)
