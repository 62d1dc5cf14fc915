"""The interface of a family's module: its model spec, read from a folder, and its counted work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from maskserve_common.config import Config
from maskserve_common.contracts.request import EditKind
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.model_spec import ModelSpec


class StepPicture(NamedTuple):
    """The picture of a row, and how its steps run, as far as a model's work depends on them."""

    height: int
    """Latent rows (pixels / VAE scale)."""
    width: int
    """Latent columns."""
    halo: int = 0
    """Positions round a mask's box (`ModelWork.halo`); 0 for families without convolutions."""
    recorded: bool = False
    """Whether steps are CUDA graphs."""
    references: int = 0
    """Number of reference pictures of the same size."""
    exact: bool = False
    """Whether references do not depend on the row (`Semantics.exact`), instead of being context."""


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

    def recorded_rows(self, spec: ModelSpec, config: Config, /) -> float:
        """Return the most dense rows whose tokens a step may have that is recorded as a CUDA graph,
        on GPUs; 0: none is recorded.
        """

    def read(self, folder: Path, pipeline: str, native_resolution: int, /) -> ModelSpec:
        """Read the model spec of a folder; `native_resolution` 0: the folder's own."""

    def count(self, config: Mapping[str, Any], picture: StepPicture, /) -> ModelWork:
        """Return the work of the denoiser; `config` is its config.json."""

    def control_work(self, config: dict[str, Any], height: int, width: int, /) -> ModelWork:
        """Return the work of a ControlNet, for as many evaluations of a row as `count` has."""


def family_work(
    family: FamilyModule,
    spec: ModelSpec,
    height: int,
    width: int,
    *,
    halo: int = 0,
    recorded: bool = False,
    kind: EditKind = "inpaint",
) -> ModelWork:
    """Count a model's work on one picture.

    Args:
        family: the model's family.
        spec: spec of the model.
        height: latent rows (pixels / VAE scale).
        width: latent columns.
        halo: positions round a mask's box (`ModelWork.halo`); 0 for families without convolutions.
        recorded: whether steps are CUDA graphs.
        kind: kind of the edit, which decides how many reference pictures the model sees.
    """
    references = spec.references(kind)
    picture = StepPicture(
        height, width, halo, recorded, references=references, exact=spec.semantics.exact
    )
    work = family.count(spec.denoiser, picture)
    picture_tokens = spec.encoder_picture_tokens(height, width)
    return work.with_context(picture_tokens) if picture_tokens else work
