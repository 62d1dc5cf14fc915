"""Weights in fewer bits: every layer against the library's own, dense rows against diffusers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config import ConfigError
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.fitting.memory import denoiser_bytes, weight_bytes
from maskserve_engine.layers.linear import Linear, linear
from maskserve_engine.stages.loader import module_bytes, shape_of
from maskserve_engine.stages.quantise import bytes_as, form_in_words, quantise
from maskserve_engine.stages.revision import model_revision
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")

DEMO = CHECKOUT / "assets" / "models" / "demo"
CPU = torch.device("cpu")
FORMS = ("int8", "int8-dynamic", "fp8", "nf4")
LEAST_SAVED = {"int8": 0.5, "int8-dynamic": 0.5, "fp8": 0.5, "nf4": 0.7}  # of float32


class Block(nn.Module):
    """Layers as a model has them: some of a transformer block, one outside."""

    _repeated_blocks = ("Sequential",)

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.Sequential(nn.Linear(128, 64), nn.Linear(128, 192, bias=False))
        self.proj_out = nn.Linear(64, 8)


def library_layer(form: str, dense: nn.Linear) -> nn.Module:
    """The layer that the library makes as its documentation says."""
    if form == "nf4":
        from bitsandbytes.nn import Linear4bit

        four: Any = Linear4bit(
            dense.in_features,
            dense.out_features,
            bias=dense.bias is not None,
            compute_dtype=torch.float32,
            compress_statistics=False,
            quant_type="nf4",
        )
        four.load_state_dict(dense.state_dict())
        # With AVX512-BF16 a CPU would compute in bfloat16 instead.
        four.support_avx512bf16_for_cpu = False
        return four.to("cpu").eval()
    from torchao import quantization

    configs = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8WeightOnlyConfig,
    }
    layer = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias is not None)
    layer.load_state_dict(dense.state_dict())
    quantization.quantize_(layer, configs[form]())
    return layer


def part_of(product: Linear) -> Linear:
    return product.columns(62, 67)


@pytest.mark.parametrize("form", ["bf16", *FORMS])
def test_bytes_are_counted_as_they_are_held(form: str) -> None:
    config = config_of(DEMO, model={"weights": form})
    counted = bytes_as(shape_of(config, "transformer"), form)
    assert counted == load_adapter(config).weight_bytes


def test_t5_in_8_bits_is_the_librarys_own() -> None:
    prompt = "a red star"
    config = config_of(DEMO, model={"t5_weights": "int8"})
    encoder: Any = load_encoder(config)
    expected: Any = load_encoder(config_of(DEMO))
    folder = load_encoder(config_of(DEMO)).encode_prompt(prompt)["prompt_embeds"]
    for name, layer in list(expected.t5.model.named_modules()):
        if type(layer) is nn.Linear:
            expected.t5.model.set_submodule(name, library_layer("int8", layer))
    embedding = encoder.encode_prompt(prompt)["prompt_embeds"]
    np.testing.assert_allclose(
        embedding, expected.encode_prompt(prompt)["prompt_embeds"], rtol=0, atol=1e-5
    )
    assert 0 < np.abs(embedding - folder).max() < 0.1 * np.abs(folder).max()
    total = sum(module_bytes(vae) for vae in (encoder.vae, encoder.clip.model, encoder.t5.model))
    assert weight_bytes(config, "encoder", load_spec(config.model.path)) == pytest.approx(
        total, rel=1e-3
    )  # but for buffers


def test_a_t5_that_comes_layer_by_layer_says_the_same() -> None:
    config = config_of(DEMO, model={"t5_offload": True})
    encoder: Any = load_encoder(config)
    reference: Any = load_encoder(config_of(DEMO))
    for prompt in ("a red star", "", "two cats"):
        result, expected = encoder.encode_prompt(prompt), reference.encode_prompt(prompt)
        assert {parameter.device.type for parameter in encoder.t5.model.parameters()} == {"meta"}
        for name, numbers in expected.items():
            np.testing.assert_array_equal(result[name], numbers)
    whole, parts = (
        weight_bytes(config_of(DEMO), "encoder", load_spec(DEMO)),
        (encoder.vae, encoder.clip.model),
    )
    layers = [
        sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        for module in reference.t5.model.modules()
    ]
    counted = weight_bytes(config, "encoder", load_spec(config.model.path))
    assert counted == pytest.approx(sum(map(module_bytes, parts)) + max(layers), rel=1e-3)
    assert counted < whole


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_equals_the_librarys_own(form: str) -> None:
    model = Block().requires_grad_(False)
    dense = list(model.transformer_blocks)
    expected = [library_layer(form, layer) for layer in dense]  # type: ignore[arg-type]
    copy = model.proj_out.weight.clone()
    quantise(model, form, CPU)
    x = torch.randn(7, 128)
    outs = []
    for transformer_block, other in zip(model.transformer_blocks, expected, strict=True):
        outs.append(linear(transformer_block)(x))
        torch.testing.assert_close(outs[-1], other(x))
        part = linear(transformer_block).columns(8, 40)(x)
        torch.testing.assert_close(part, outs[-1][:, 8:40])
    joined = linear(*model.transformer_blocks)
    torch.testing.assert_close(joined(x), torch.cat(outs, -1))
    assert [tuple(layer(x[:0]).shape) for layer in (joined, part_of(joined))] == [(0, 256), (0, 5)]
    assert type(model.proj_out) is nn.Linear
    assert torch.equal(model.proj_out.weight, copy)


@pytest.mark.parametrize(
    ("name", "form"), [*(("demo", form) for form in FORMS), ("reference", "int8")]
)
def test_dense_rows_equal_the_pipeline_with_the_same_weights(
    name: str, form: str, tiny_flux: dict[str, Path]
) -> None:
    from diffusers import DiffusionPipeline

    folder = tiny_flux.get(name, DEMO)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    layers = [
        (name, layer)
        for name, layer in pipeline.transformer.named_modules()
        if "transformer_blocks." in name and type(layer) is nn.Linear
    ]
    for name, layer in layers:
        if form != "nf4" or layer.in_features % 64 == 0:
            pipeline.transformer.set_submodule(name, library_layer(form, layer))
    config = config_of(folder, model={"weights": form, "outside_noise": "edit"})
    encoder, adapter = load_encoder(config), load_adapter(config)
    if folder == DEMO:  # of the others the blocks are but a part
        plain = load_adapter(config_of(folder))
        assert adapter.weight_bytes < (1 - LEAST_SAVED[form]) * plain.weight_bytes
    case = random_case(np.random.default_rng(3), num_inference_steps=3)
    expected = diffusers_latents(pipeline, case)
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    pixels = row.result().array() - expected
    if form != "int8-dynamic":
        assert np.abs(pixels).max() <= tolerance(expected)
        return
    # Tokens are rounded to 8 bits: what differs by rounding of float32 may differ by a step of
    # these. So it is held against the pipeline itself, whose first tokens were nudged by as much.
    noise = torch.Generator().manual_seed(1)

    def nudge(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0] + 1e-6 * torch.randn(args[0].shape, generator=noise),)

    pipeline.transformer.x_embedder.register_forward_pre_hook(nudge)
    nudged = diffusers_latents(pipeline, case) - expected
    assert np.square(pixels).mean() <= 2 * np.square(nudged).mean()
    assert np.abs(pixels).max() <= 0.05 * np.abs(expected).max()


def test_a_folder_that_is_quantised_is_served_as_it_is(tiny_fill: Path, tmp_path: Path) -> None:
    """By diffusers' own `quantization_config`; it reaches embeddings and the last layer, too."""
    from diffusers import FluxFillPipeline, FluxTransformer2DModel, TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig

    folder = tmp_path / "quantised"
    shutil.copytree(tiny_fill, folder)
    torch_ao_config = TorchAoConfig(Int8WeightOnlyConfig())
    where = {"torch_dtype": torch.float32, "device_map": {"": CPU}}
    model = FluxTransformer2DModel.from_pretrained(
        tiny_fill / "transformer", quantization_config=torch_ao_config, **where
    )
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")

    config = config_of(folder, model={"outside_noise": "edit"})
    encoder, adapter = load_encoder(config), load_adapter(config)
    assert adapter.weight_bytes < 0.5 * load_adapter(config_of(tiny_fill)).weight_bytes
    pipeline: Any = FluxFillPipeline.from_pretrained(
        folder, transformer=FluxTransformer2DModel.from_pretrained(folder / "transformer", **where)
    )
    pipeline.set_progress_bar_config(disable=True)
    case = random_case(np.random.default_rng(5), num_inference_steps=3)
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    expected = diffusers_latents(pipeline, case)
    assert np.abs(row.result().array() - expected).max() <= tolerance(expected)

    assert denoiser_bytes(config, ["bf16", "int8"]) == {
        "bf16": pytest.approx(adapter.weight_bytes, rel=0.01)
    }
    with pytest.raises(ConfigError, match="transformer is quantised already; use"):
        load_adapter(config_of(folder, model={"weights": "int8"}))


def test_entries_of_one_form_are_not_another_forms(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    words = [
        form_in_words(config_of(tmp_path, model={"weights": form})) for form in ("bf16", *FORMS)
    ]
    assert words[0] == ""
    assert len({model_revision(tmp_path, word) for word in words}) == len(words)
    assert model_revision(tmp_path) == model_revision(tmp_path, words[0])
    assert form_in_words(config_of(tmp_path, model={"t5_weights": "int8"})) not in words


def test_what_cannot_be_is_said(
    tiny_fill: Path, tiny_unets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"\[model\] t5_weights: a setting of .*FLUX models"):
        load_adapter(config_of(tiny_unets["sdxl-base"], model={"t5_weights": "int8"}))
    with pytest.raises(ConfigError, match=r"\[model\] t5_offload: a setting of .*FLUX models"):
        load_adapter(config_of(tiny_unets["sdxl-base"], model={"t5_offload": True}))
    with pytest.raises(ConfigError, match=r"\[model\] t5_offload: not with t5_weights"):
        load_encoder(config_of(tiny_fill, model={"t5_weights": "int8", "t5_offload": True}))
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ConfigError, match=r'weights: "int8" needs torchao: in the checkout'):
        load_adapter(config_of(tiny_fill, model={"weights": "int8"}))
    with pytest.raises(ConfigError, match=r't5_weights: "int8" needs torchao: in the checkout'):
        load_encoder(config_of(tiny_fill, model={"t5_weights": "int8"}))
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r'weights: "nf4" needs bitsandbytes: in the checkout'):
        load_adapter(config_of(tiny_fill, model={"weights": "nf4"}))
