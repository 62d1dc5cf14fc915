"""A worker's runtime folder and Triton's API, both small and fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from maskserve_common.config import Config, EngineConfig
from maskserve_common.status import StatusWriter
from tests.fakes.pb_utils import FakeTriton
from tests.fakes.status import READY


@pytest.fixture
def api() -> Iterator[FakeTriton]:
    triton = FakeTriton()
    yield triton
    assert triton.violations == []


@pytest.fixture
def config(tmp_path: Path) -> Config:
    engine = EngineConfig(heartbeat_timeout_s=30.0, watch_interval_s=0.005, front_threads=16)
    return Config(engine=engine, runtime_dir=str(tmp_path))


@pytest.fixture
def beat(config: Config) -> Callable[..., None]:
    """Writes the engine's status record, as a living engine does."""
    writer = StatusWriter(Path(config.runtime_dir) / "status")

    def write(**values: object) -> None:
        writer.write(replace(READY, **values))

    write()
    return write
