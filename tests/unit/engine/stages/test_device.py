"""Which device a model runs on; a GPU that cannot be used is not passed over in silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel

from maskserve_common.config import Config, ConfigError, sharing_the_device
from maskserve_engine.families.registry import FAMILIES
from maskserve_engine.families.specs import load_spec
from maskserve_engine.stages import loader
from maskserve_studies.kernels.live_bytes import LiveBytes
from tests.fakes.jobs import config_of


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


UNUSABLE = SimpleNamespace(is_available=lambda: False)
"""torch.cuda where it finds no GPU."""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the driver of a host lists two GPUs."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


def test_gpus_that_torch_cannot_use_are_an_error(config: Config, two_gpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 NVIDIA GPU\(s\) that cannot be used: .+ say device"):
        loader.device_of(config, UNUSABLE, two_gpus)


def test_gpus_that_are_named_and_not_there_are_an_error(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=1 names GPUs .+ say device"):
        loader.device_of(config, UNUSABLE, tmp_path / "no driver")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(
    config: Config, two_gpus: Path, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert loader.device_of(config, UNUSABLE, two_gpus).type == "cpu"


def test_who_says_cpu_gets_it(tmp_path: Path, two_gpus: Path) -> None:
    config = config_of(tmp_path, model={"device": "cpu"})
    assert loader.device_of(config, UNUSABLE, two_gpus).type == "cpu"
    assert loader.device_in_words(config).startswith("cpu, float32, torch ")


def test_a_gpu_that_is_not_there_is_told(tmp_path: Path) -> None:
    one = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
    config = config_of(tmp_path, model={"device": "cuda:1"})
    with pytest.raises(ConfigError, match="'cuda:1' is configured, but 1 can be seen here"):
        loader.device_of(config, one)


def test_stages_go_where_they_are_told_and_else_to_the_denoiser(tmp_path: Path) -> None:
    def devices(**names: str) -> list[str]:
        config = config_of(tmp_path, model={"device": "cpu", **names})
        return [sharing_the_device(config, stage).model.device for stage in ("encoder", "decoder")]

    assert devices() == ["cpu", "cpu"]
    assert devices(encoder_device="meta") == ["meta", "cpu"]
    assert devices(decoder_device="cuda:1") == ["cpu", "cuda:1"]


@pytest.mark.parametrize("model", ["tiny_fill", "tiny_unets"])
def test_tensors_arrive_where_the_encoder_and_the_decoder_are(
    model: str, request: pytest.FixtureRequest
) -> None:
    """`meta` is a second device that every machine has; it computes shapes alone."""
    getfixturevalue = request.getfixturevalue(model)
    folder = getfixturevalue["sdxl-fill"] if isinstance(getfixturevalue, dict) else getfixturevalue
    devices = {"encoder_device": "meta", "decoder_device": "meta"}
    config = config_of(folder, model={"device": "cpu", **devices})
    spec = load_spec(folder)
    family = FAMILIES[spec.family]()
    denoiser = family.load_adapter(spec, config)
    assert {p.device.type for p in denoiser.model.parameters()} == {"cpu"}
    encoder = family.load_encoder(spec, sharing_the_device(config, "encoder"))
    decoder = family.load_decoder(spec, sharing_the_device(config, "decoder"))
    pixels, mask = np.zeros((32, 32, 3), np.uint8), np.full((32, 32), 255, np.uint8)
    # All is computed on the other device: what fails is the copy of the answer from there.
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        encoder.encode(pixels, mask, "a red star")
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        encoder.encode_prompt("a red star")
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        decoder.decode(np.zeros((spec.latent_channels, 8, 8), np.float32))


def test_weights_are_never_whole_on_the_host(tiny_fill: Path) -> None:
    """Weights for another device are mapped, and go there one tensor after the other."""
    where = {"device": "meta", "dtype": "bfloat16"}
    config = config_of(tiny_fill, model=where)
    with LiveBytes("cpu") as live:
        part = loader.load_part(config, "transformer", FluxTransformer2DModel)
    assert {(p.device.type, p.dtype) for p in part.parameters()} == {("meta", torch.bfloat16)}
    mapped = 2 * loader.module_bytes(part)  # the file is in float32
    assert live.peak - mapped < loader.module_bytes(part) / 4
