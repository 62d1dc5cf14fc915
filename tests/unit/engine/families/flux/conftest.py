"""A FLUX model of each semantics; a file that needs another configuration has its own `config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_benchmarks.steps.replay import Replay
from maskserve_common.config import Config
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.registry import load_adapter, load_encoder
from tests.fakes.jobs import config_of


@pytest.fixture(scope="module", params=["fill", "inpaint"])
def folder(request: pytest.FixtureRequest, tiny_flux: dict[str, Path]) -> Path:
    return tiny_flux[request.param]


@pytest.fixture(scope="module")
def config(folder: Path) -> Config:
    return config_of(folder)


@pytest.fixture(scope="module")
def encoder(config: Config) -> Encoder:
    return load_encoder(config)


@pytest.fixture(scope="module")
def adapter(config: Config) -> FluxAdapter:
    adapter = load_adapter(config)
    assert isinstance(adapter, FluxAdapter)
    return adapter


@pytest.fixture
def replay(adapter: FluxAdapter) -> Replay:
    return Replay(adapter)
