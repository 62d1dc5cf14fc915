"""LoRAs in the weights (`[model] fuse_loras`) against diffusers' own `fuse_lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from maskserve_common.config import Config, ConfigError
from maskserve_engine.adapters.fuse import served_form
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.spec.fused_loras import fused_loras
from tests.fakes.jobs import config_of, encode_case, random_case, tolerance
from tests.fakes.loras import lora, write
from tests.fakes.pipelines import diffusers_latents
from tests.support.draws import fresh_rng
from tests.support.text_loras import of_text

FLUX = {
    "transformer_blocks.0.attn.to_q": None,
    "transformer_blocks.0.ff.net.2": None,
    "single_transformer_blocks.0.proj_out": None,
}
UNET = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": None,
    "mid_block.attentions.0.transformer_blocks.0.ff.net.2": None,
}


def drawn(net: Any, names: Any, prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    """A LoRA of layers of a model, by their own shapes."""
    layers = {}
    for name in names:
        weight = net.get_submodule(name).weight
        layers[name] = (weight.shape[1], weight.shape[0])
    return {key: (0.2 * value).astype(np.float32) for key, value in lora(layers, 4, prefix).items()}


def weights_of(adapter: Any) -> dict[str, torch.Tensor]:
    return dict(adapter.model.state_dict())


@pytest.fixture
def fill(tmp_path: Path, tiny_fill: Path) -> tuple[Config, Any]:
    """A configuration with two fused LoRAs, and diffusers' pipeline with the same ones."""
    pipe = DiffusionPipeline.from_pretrained(tiny_fill)
    pipe.set_progress_bar_config(disable=True)
    files, entries = [], []
    for number, scale in enumerate((0.7, -0.4)):
        tensors = drawn(pipe.transformer, FLUX, "transformer.")
        text = of_text("text_encoder")
        files.append(tmp_path / f"{number}.safetensors")
        write(files[-1], tensors | text)
        entries.append(f"{files[-1]}:{scale}")
        pipe.load_lora_weights(str(files[-1]), adapter_name=str(number))
    pipe.set_adapters(["0", "1"], [0.7, -0.4])
    pipe.fuse_lora(components=["transformer", "text_encoder"])
    return config_of(tiny_fill, model={"fuse_loras": entries}), pipe


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_edits_equal_diffusers_with_the_same_loras_fused(fill: tuple[Config, Any]) -> None:
    config, pipe = fill
    case = random_case(fresh_rng(), strength=1.0, num_inference_steps=3)
    encoder, adapter = load_encoder(config), load_adapter(config)
    job = encode_case(encoder, case, "r")
    row = adapter.dense_row(job)
    while row.step < row.steps:
        adapter.step([row], None)
    expected = diffusers_latents(pipe, case)
    np.testing.assert_allclose(row.result().array(), expected, atol=tolerance(expected))


def test_a_unet_s_layers_change_as_counted_and_the_folder_does_not(
    tmp_path: Path, tiny_unets: dict[str, Path]
) -> None:
    folder = next(iter(tiny_unets.values()))
    before = weights_of(load_adapter(config_of(folder)))
    plain = load_adapter(config_of(folder)).model
    tensors = drawn(plain, UNET, "unet.")
    conv = "down_blocks.0.resnets.0.conv1"
    out, inner, *kernel = plain.get_submodule(conv).weight.shape
    rng = fresh_rng()
    down = rng.standard_normal((2, inner, *kernel)).astype(np.float32)
    up = rng.standard_normal((out, 2, 1, 1)).astype(np.float32)
    tensors |= {f"unet.{conv}.lora_A.weight": down, f"unet.{conv}.lora_B.weight": up}
    write(tmp_path / "a.safetensors", tensors)
    config = config_of(folder, model={"fuse_loras": [f"{tmp_path}/a.safetensors:0.5"]})
    after = weights_of(load_adapter(config))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in (*UNET, conv)}
    expected = before[f"{conv}.weight"] + 0.5 * torch.einsum(
        "or,rikl->oikl", torch.from_numpy(up[..., 0, 0]), torch.from_numpy(down)
    )
    torch.testing.assert_close(after[f"{conv}.weight"], expected, atol=1e-5, rtol=1e-5)
    again = weights_of(load_adapter(config_of(folder)))
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_entries_know_which_loras_and_how_strong(tmp_path: Path, tiny_fill: Path) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_fill)
    path = tmp_path / "a.safetensors"

    def words(text: str) -> str:
        return served_form(config_of(tiny_fill, model={"fuse_loras": [text]}))

    write(path, drawn(pipe.transformer, FLUX, "transformer."))
    known = {words(str(path)), words(f"{path}:0.5"), served_form(config_of(tiny_fill))}
    write(path, drawn(pipe.transformer, FLUX, "transformer."))
    assert len({*known, words(str(path))}) == 4
    assert words(f"{path}:1") == words(str(path))


def test_what_cannot_be_fused_is_told_in_one_sentence(tmp_path: Path, tiny_fill: Path) -> None:
    assert load_spec(tiny_fill).family == "flux"
    other = tmp_path / "other.safetensors"
    write(other, lora({"transformer_blocks.0.attn.to_q": (8, 8)}))
    (tmp_path / "text.safetensors").write_text("no weights")
    for entry, why in (
        (str(tmp_path / "none.safetensors"), "cannot be read: No such file"),
        (f"{other}:much", "'much' is not a scale; use FILE or FILE:SCALE"),
        (f"{other}:nan", "'nan' is not a scale"),
        (str(tmp_path / "text.safetensors"), "safetensors"),
        (str(other), "to_q"),
    ):
        config = config_of(tiny_fill, model={"fuse_loras": [entry]})
        with pytest.raises(ConfigError, match=r"\[model\] fuse_loras: .+") as refused:
            load_adapter(config)
        assert why in str(refused.value)


def test_a_scale_is_optional_and_a_folder_may_have_a_colon(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"fuse_loras": ["a:b/c.safetensors", "d:0.25"]})
    assert [(str(path), scale) for path, scale in fused_loras(config)] == [
        ("a:b/c.safetensors", 1.0),
        ("d", 0.25),
    ]
