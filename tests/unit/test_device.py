"""Which device a model runs on; a GPU that cannot be used is not passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_core.config import Config, ConfigError
from maskserve_engine.stages import loader
from tests.fakes.jobs import config_of


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose driver lists two GPUs, for a torch that cannot use them."""
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(loader, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_torch_cannot_use_are_an_error(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"2 NVIDIA GPU\(s\) that cannot be used: .+ say device"):
        loader.device_of(config)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("visible", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(
    config: Config, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert loader.device_of(config).type == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_who_says_cpu_gets_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"path": str(tmp_path), "device": "cpu"})
    assert loader.device_of(config).type == "cpu"
    assert loader.device_in_words(config).startswith("cpu, float32, torch ")
