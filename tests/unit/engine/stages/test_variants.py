"""Folders whose weights are a variant's, as the hub's libraries write them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskserve_common.config import ConfigError
from maskserve_common.files.weight_files import weight_files
from maskserve_engine.adapters.control_net_loader import NetFolder
from maskserve_engine.families.registry import load_adapter, load_decoder, load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.fitting.memory import weight_bytes
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.stages.quantise import form_in_words
from maskserve_lora.base_layers import BaseLayers
from tests.fakes.control_nets import random_net
from tests.fakes.jobs import config_of

PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")


def saved(source: Path, folder: Path, *variants: str, shards: str = "5GB") -> Path:
    """The model with its weights in these variants alone; "": without one. Each variant's first
    number is another.
    """
    from diffusers import DiffusionPipeline

    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    for variant in variants:
        pipe: Any = DiffusionPipeline.from_pretrained(source)
        with torch.no_grad():
            pipe.transformer.proj_out.bias.fill_(len(variant))
        for part in PARTS:
            more = {"variant": variant} if variant else {}
            getattr(pipe, part).save_pretrained(folder / part, max_shard_size=shards, **more)
    return folder


@pytest.mark.parametrize("shards", ["5GB", "100KB"])
def test_a_folder_of_one_variant_alone_is_served(
    tiny_fill: Path, tmp_path: Path, shards: str
) -> None:
    folder = saved(tiny_fill, tmp_path / "m", "fp16", shards=shards)
    files = weight_files(folder / "transformer")
    assert files.variant == "fp16"
    assert (len(files.files) > 1) == (shards == "100KB")
    config, plain = config_of(folder), config_of(tiny_fill)
    adapter: Any = load_adapter(config)
    assert float(adapter.model.proj_out.bias[0]) == 4
    pixels = np.zeros((32, 32, 3), np.uint8)
    encoder, reference = load_encoder(config), load_encoder(plain)
    np.testing.assert_array_equal(encoder.moments(pixels), reference.moments(pixels))
    result, expected = (
        text_encoder.encode_prompt("a red star") for text_encoder in (encoder, reference)
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value)
    load_decoder(config)
    layers, same = BaseLayers.of_folder(folder), BaseLayers.of_folder(tiny_fill)
    assert layers is not None
    assert same is not None
    assert layers.shapes == same.shapes
    assert weight_bytes(config, "encoder", load_spec(config.model.path)) == weight_bytes(
        plain, "encoder", load_spec(plain.model.path)
    )


def test_of_several_the_one_that_is_asked_for_is_read(tiny_fill: Path, tmp_path: Path) -> None:
    folder = saved(tiny_fill, tmp_path / "m", "", "fp16", "bf")
    for variant, first in (("", 0), ("fp16", 4), ("bf", 2), ("none_such", 0)):
        config = config_of(folder, model={"variant": variant})
        adapter: Any = load_adapter(config)
        assert float(adapter.model.proj_out.bias[0]) == first
        assert weight_bytes(config, "encoder", load_spec(config.model.path)) == weight_bytes(
            config_of(tiny_fill), "encoder", load_spec(tiny_fill)
        )
    assert form_in_words(config_of(folder, model={"variant": "bf"})) == "variant bf"


def test_of_several_one_has_to_be_asked_for(tiny_fill: Path, tmp_path: Path) -> None:
    folder = saved(tiny_fill, tmp_path / "m", "fp16", "bf")
    message = r"\[model\] variant: .* holds weights of the variants bf, fp16"
    with pytest.raises(ConfigError, match=message):
        load_adapter(config_of(folder))


def test_a_controlnet_of_one_variant_is_served(tiny_inpaint: Path, tmp_path: Path) -> None:
    net = random_net(1, 1, 1)
    net.save_pretrained(tmp_path / "nets" / "canny", variant="fp16")
    config = config_of(tiny_inpaint, controls={"folder": str(tmp_path / "nets")})
    known = ControlNets(config, load_spec(tiny_inpaint)).find("canny", "x")
    read = NetFolder(
        "canny", "FluxControlNetModel", known.path, known.version, torch.float32
    ).read()
    assert torch.equal(read.x_embedder.weight, net.x_embedder.weight)
    net.save_pretrained(tmp_path / "nets" / "canny", variant="bf16")
    [control_net] = ControlNets(config, load_spec(tiny_inpaint)).all()
    assert "variants bf16, fp16" in control_net.problem


NAMES = {
    "model.safetensors": "",
    "model-00001-of-00002.safetensors": "",
    "diffusion_pytorch_model.fp16.safetensors": "fp16",
    "diffusion_pytorch_model.fp16-00001-of-00002.safetensors": "fp16",
    "diffusion_pytorch_model-00001-of-00002.fp16.safetensors": "fp16",
    "model.non_ema.safetensors": "non_ema",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_told_by_the_file_s_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "model.fp16.bin").touch()
    assert weight_files(tmp_path) == (NAMES[name], (tmp_path / name,))
