"""Residuals added to hidden states, against diffusers' own arguments for ControlNets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_engine.batch.forward import forward
from maskserve_engine.batch.packing import Packed
from maskserve_engine.families.flux.adapter import FluxBatch
from maskserve_engine.families.mmdit.rows import pass_inputs
from maskserve_engine.families.unet.forward import PackedPasses, PassInput
from maskserve_engine.families.unet.forward import forward as unet_forward
from maskserve_engine.families.unet.weights import UnetWeights
from tests.support.draws import fresh_rng

pytestmark = pytest.mark.usefixtures("inference")

BLOCKS = (3, 4)
KINDS = ("kv", "project", "dense")


class FixedResiduals:
    """Residuals that were made beforehand."""

    def __init__(self, by_number: Mapping[int, Tensor]) -> None:
        self.by_number = by_number

    @property
    def passes(self) -> tuple[FixedResiduals]:
        return (self,)

    def after(self, number: int) -> Tensor | None:
        return self.by_number.get(number)


@pytest.fixture(scope="module")
def bench() -> Bench:
    result = Bench("demo", BLOCKS, torch.float32, torch.device("cpu"), "model")
    result.fill_entry("both")
    return result


def rows(bench: Bench, ratios: tuple[float | None, ...], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return [bench.row(ratio, i) for i, ratio in enumerate(ratios)]


def outputs(bench: Bench, batch_rows: list[Any], kinds: list[str]) -> list[Tensor]:
    batch = FluxBatch.of(batch_rows, None)
    out = forward(batch.begin_step(bench.weights, 0), batch.packed, kinds)
    return list(out.split(batch.packed.layout.narrow.image_stream.lengths))


def test_a_dense_row_equals_diffusers_with_controlnet_samples(bench: Bench) -> None:
    [row] = rows(bench, (None,), 3)
    n, width = len(row.latents), bench.weights.width
    double, single = (torch.randn(count, n, width) for count in BLOCKS)
    row.residuals = FixedResiduals(dict(enumerate([*double, *single])))
    [result] = outputs(bench, [row], [])

    def positions(*_: Any) -> tuple[Tensor, Tensor]:
        cis = torch.cat((row.prompt.cis, row.image.masked.cis))
        cos, sin = cis.real, cis.imag
        return cos.repeat_interleave(2, 1).float(), sin.repeat_interleave(2, 1).float()

    class Embedded(torch.nn.Module):
        """Ids into the rotary factors that our row has."""

        def forward(self, _: Tensor) -> tuple[Tensor, Tensor]:
            return positions()

    model = bench.model
    embedders = model.context_embedder, model.pos_embed
    model.context_embedder, model.pos_embed = torch.nn.Identity(), Embedded()
    try:
        [expected] = model(
            hidden_states=Packed(pass_inputs(row)[:1]).tokens[None],
            encoder_hidden_states=row.prompt.text[None],
            pooled_projections=row.prompt.pooled[None],
            timestep=torch.tensor([row.schedule.walk[0].timestep / 1000]),
            img_ids=torch.zeros(n, 3),
            txt_ids=torch.zeros(len(row.prompt.text), 3),
            guidance=None if row.prompt.guidance is None else torch.tensor([row.prompt.guidance]),
            controlnet_block_samples=[sample[None] for sample in double],
            controlnet_single_block_samples=[sample[None] for sample in single],
            return_dict=False,
        )
    finally:
        model.context_embedder, model.pos_embed = embedders
    torch.testing.assert_close(result, expected[0], rtol=1e-3, atol=1e-3)
    [without] = outputs(bench, rows(bench, (None,), 3), [])
    assert (result - without).abs().max() > 0.1


def test_zeros_change_no_byte_and_others_change_their_own_row_alone(bench: Bench) -> None:
    ratios = (0.2, None, 0.4)
    rng = fresh_rng()
    for _ in range(6):
        kinds = [str(kind) for kind in rng.choice(KINDS, sum(BLOCKS))]
        plain = outputs(bench, rows(bench, ratios, 5), kinds)
        for scale in (0.0, 1.0):
            batch_rows, chosen = rows(bench, ratios, 5), int(rng.integers(3))
            shape = len(batch_rows[chosen].latents), bench.weights.width
            residuals = {i: scale * torch.randn(shape) for i in range(0, sum(BLOCKS), 2)}
            batch_rows[chosen].residuals = FixedResiduals(residuals)
            for i, (one, other) in enumerate(
                zip(outputs(bench, batch_rows, kinds), plain, strict=True)
            ):
                assert torch.equal(one, other) == (scale == 0 or i != chosen), (kinds, i)


@pytest.mark.parametrize("kind", ["dense", "mixed"])
def test_a_cached_row_with_all_tokens_active_takes_what_a_dense_one_does(
    bench: Bench, kind: str
) -> None:
    """The residuals' positions among text, active and inactive tokens are right."""
    kinds = ["dense"] * sum(BLOCKS)
    if kind == "mixed":
        kinds = ["dense", "kv", "project", "dense", "kv", "dense", "project"]
    [dense, cached] = rows(bench, (None, 1.0), 9)
    cached.image.masked.latents = dense.latents.clone()
    cached.passes = (replace(dense.prompt), *cached.passes[1:])
    cached.image.masked.condition = dense.image.masked.condition
    shape = len(dense.latents), bench.weights.width
    residuals = FixedResiduals({i: torch.randn(shape) for i in range(sum(BLOCKS))})
    dense.residuals = cached.residuals = residuals
    [one, other] = outputs(bench, [dense, cached], kinds)
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def unet() -> Any:
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()


def maps(unet: Any, passes: int) -> list[Tensor]:
    """Random ones [passes, C, h, w] for each skip connection and what leaves the middle block."""
    shapes: list[Any] = []
    hooks = [
        unet.conv_in.register_forward_hook(lambda _m, _a, out: shapes.append(out.shape)),
        *(
            down_block.register_forward_hook(
                lambda _m, _a, out: shapes.extend(x.shape for x in out[1])
            )
            for down_block in unet.down_blocks
        ),
        unet.mid_block.register_forward_hook(lambda _m, _a, out: shapes.append(out.shape)),
    ]
    unet(torch.randn(passes, 4, 16, 16), 7, torch.randn(passes, 5, 16))
    for hook in hooks:
        hook.remove()
    return [torch.randn(shape) for shape in shapes]


def test_a_unet_row_equals_diffusers_with_additional_residuals(unet: Any) -> None:
    residuals = maps(unet, 2)
    sample, text = torch.randn(3, 4, 16, 16), torch.randn(3, 5, 16)
    timesteps = torch.tensor([700.0, 30.0, 30.0])

    def run(values: list[FixedResiduals | None]) -> Tensor:
        passes = [
            PassInput(states, None, residuals=residual)
            for states, residual in zip(text, values, strict=True)
        ]
        packed = PackedPasses(passes, (16, 16), 2, sample.device)
        return unet_forward(UnetWeights.of(unet), packed, sample, timesteps)

    two = [
        FixedResiduals({i: residual[row] for i, residual in enumerate(residuals)})
        for row in range(2)
    ]
    result, plain = run([two[0], None, two[1]]), run([None] * 3)
    expected = unet(
        sample[[0, 2]],
        timesteps[[0, 2]],
        text[[0, 2]],
        down_block_additional_residuals=residuals[:-1],
        mid_block_additional_residual=residuals[-1],
    ).sample
    torch.testing.assert_close(result[[0, 2]], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(result[1], plain[1])
    assert (result[0] - plain[0]).abs().max() > 0.01
    zeros = FixedResiduals(
        {i: torch.zeros_like(residual[0]) for i, residual in enumerate(residuals)}
    )
    assert torch.equal(run([zeros] * 3), plain)
