"""Weights in fewer bits: every layer against the library's own, dense rows against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from maskserve_core.config import ConfigError
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers.linear import linear
from maskserve_engine.stages.quantise import form_in_words, quantise
from maskserve_engine.stages.revision import model_revision
from maskserve_harness.checkout import CHECKOUT
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents

pytest.importorskip("torchao")

DEMO = CHECKOUT / "assets" / "models" / "demo"
CPU = torch.device("cpu")
FORMS = ("int8", "fp8")
LEAST_SAVED = {"int8": 0.5, "fp8": 0.5}  # of float32


class Block(nn.Module):
    """Layers as a model has them: some of a transformer block, one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.Sequential(nn.Linear(128, 64), nn.Linear(128, 192, bias=False))
        self.proj_out = nn.Linear(64, 8)


def library_layer(form: str, dense: nn.Linear) -> nn.Module:
    """What the library makes of a layer by its own documentation."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    made = nn.Linear(dense.in_features, dense.out_features, bias=dense.bias is not None)
    made.load_state_dict(dense.state_dict())
    quantize_(made, Int8WeightOnlyConfig() if form == "int8" else Float8WeightOnlyConfig())
    return made


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_equals_the_librarys_own(form: str) -> None:
    model = Block().requires_grad_(False)
    dense = list(model.transformer_blocks)
    expected = [library_layer(form, layer) for layer in dense]  # type: ignore[arg-type]
    before = model.proj_out.weight.clone()
    quantise(model, form, CPU)
    x = torch.randn(7, 128)
    outs = []
    for own, other in zip(model.transformer_blocks, expected, strict=True):
        outs.append(linear(own)(x))
        torch.testing.assert_close(outs[-1], other(x))
        part = linear(own).columns(8, 40)(x)
        torch.testing.assert_close(part, outs[-1][:, 8:40])
    joined = linear(*model.transformer_blocks)
    torch.testing.assert_close(joined(x), torch.cat(outs, -1))
    assert type(model.proj_out) is nn.Linear
    assert torch.equal(model.proj_out.weight, before)


@pytest.mark.parametrize("form", FORMS)
def test_dense_rows_equal_the_pipeline_with_the_same_weights(form: str) -> None:
    from diffusers import FluxFillPipeline

    pipeline: Any = FluxFillPipeline.from_pretrained(DEMO)
    pipeline.set_progress_bar_config(disable=True)
    layers = [
        (name, layer)
        for name, layer in pipeline.transformer.named_modules()
        if "transformer_blocks." in name and type(layer) is nn.Linear
    ]
    for name, layer in layers:
        pipeline.transformer.set_submodule(name, library_layer(form, layer))
    config = config_of(DEMO, model={"weights": form, "outside_noise": "edit"})
    encoder, adapter = load_encoder(config), load_adapter(config)
    plain = load_adapter(config_of(DEMO))
    assert adapter.weight_bytes < (1 - LEAST_SAVED[form]) * plain.weight_bytes
    case = random_case(np.random.default_rng(3), num_inference_steps=3)
    expected = diffusers_latents(pipeline, case)
    row: Any = adapter.dense_row(encode_case(encoder, case, "r"))
    while row.step < row.steps:
        adapter.step([row], None)
    assert np.abs(row.result().array() - expected).max() <= tolerance(expected)


def test_entries_of_one_form_are_not_another_forms(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    words = [
        form_in_words(config_of(tmp_path, model={"weights": form})) for form in ("bf16", *FORMS)
    ]
    assert words[0] == ""
    assert len({model_revision(tmp_path, each) for each in words}) == len(words)
    assert model_revision(tmp_path) == model_revision(tmp_path, words[0])


def test_what_cannot_be_is_said(tiny_fill: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"\[model\] compile: not with weights"):
        load_adapter(config_of(tiny_fill, model={"weights": "int8", "compile": True}))
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(ConfigError, match=r'weights: "int8" needs torchao: pip install'):
        load_adapter(config_of(tiny_fill, model={"weights": "int8"}))
