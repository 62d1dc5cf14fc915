"""The configuration of a worker, and what follows from it.

config_file.py reads it from a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from maskserve_core.config_tables import (
    AdaptersConfig,
    CacheConfig,
    ControlsConfig,
    EngineConfig,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    SloConfig,
    StagesConfig,
    TraceConfig,
)
from maskserve_core.reading import Table


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key."""


class Config(Table, frozen=True):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    stages: StagesConfig = StagesConfig()
    slo: SloConfig = SloConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    controls: ControlsConfig = ControlsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    runtime_dir: str = ""
    """Folder of the worker's status record; best in memory."""
    templates_dir: str = ""
    """Folder of registered images; empty: in the runtime folder."""
    worker: str = "worker-0"
    """Name of this worker in answers and metrics."""


def cores() -> int:
    """CPU cores that this process may use: a container or `taskset` may leave it a part."""
    return len(os.sched_getaffinity(0))


def templates_folder(config: Config) -> Path:
    """Where the images of registered templates are."""
    return Path(config.templates_dir or Path(config.runtime_dir) / "templates")


def model_name(config: Config) -> str:
    """The name clients use for the served model."""
    return config.model.name or Path(config.model.path).name or "model"


def beside_denoiser(config: Config, stage: Literal["encoder", "decoder"]) -> Config:
    """The configuration of the encoder or decoder, which run beside the denoiser's steps.

    They take a thread or two, so that their work does not stop the batch.
    """
    model = config.model
    threads = max(1, min(2, (model.torch_threads or cores()) // 2))
    device = model.encoder_device if stage == "encoder" else model.decoder_device
    return replace(
        config, model=replace(model, torch_threads=threads, device=device or model.device)
    )


def gpus_wanted(config: Config) -> int:
    """GPUs that one worker of this configuration is to see: as many as its devices count up to."""
    model = config.model
    named = (model.device, model.encoder_device, model.decoder_device)
    return 1 + max(int(number) for number in (name.partition(":")[2] or 0 for name in named))
