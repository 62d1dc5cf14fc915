"""The interface of a family's module: its model spec, read from a folder, and its counted work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from maskserve_common.config import Config
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import ModelSpec


class FamilyModule(Protocol):
    """The members of a family's module."""

    NAME: str
    """Name of its models in error messages."""

    @property
    def PIPELINES(self) -> Collection[str]:  # noqa: N802 - a module's constant
        """Served classes in model_index.json."""

    @property
    def SETTINGS(self) -> Collection[str]:  # noqa: N802
        """Keys of the configuration, as `model.gguf`, that only models of such families have."""

    def recorded_rows(self, config: Config, /) -> int:
        """Return the most dense rows whose tokens a step may have that is recorded as a CUDA graph,
        on GPUs; 0: none is recorded.
        """

    def read(self, folder: Path, pipeline: str, native_resolution: int, /) -> ModelSpec:
        """Read the model spec of a folder; `native_resolution` 0: the folder's own."""

    def count(
        self,
        config: dict[str, Any],
        height: int,
        width: int,
        halo: int,
        /,
        *,
        recorded: bool,
        references: int,
        exact: bool,
    ) -> ModelWork:
        """Return the work of the denoiser; see `family_work`."""

    def control_work(self, config: dict[str, Any], height: int, width: int, /) -> ModelWork:
        """Return the work of a ControlNet, for as many evaluations of a row as `count` has."""

    def lora_work(self, base: ModelWork, layers: Mapping[str, int], /) -> ModelWork:
        """Return the work that a LoRA adds to that of the denoiser."""

    def lora_layers(self, config: Mapping[str, Any], /) -> dict[str, int]:
        """Return the numbers per rank of a LoRA on the blocks, for `lora_work`."""


def family_work(
    family: FamilyModule,
    spec: ModelSpec,
    height: int,
    width: int,
    *,
    halo: int = 0,
    recorded: bool = False,
) -> ModelWork:
    """Count a model's work on one picture.

    Args:
        family: the model's family.
        spec: spec of the model.
        height: latent rows (pixels / VAE scale).
        width: latent columns.
        halo: positions round a mask's box (`ModelWork.halo`); 0 for families without convolutions.
        recorded: whether steps are CUDA graphs.
    """
    work = family.count(
        spec.denoiser,
        height,
        width,
        halo,
        recorded=recorded,
        references=int(spec.semantics.reference),
        exact=spec.semantics.exact,
    )
    picture_tokens = spec.encoder_picture_tokens(height, width)
    return work.looking_at(picture_tokens) if picture_tokens else work
