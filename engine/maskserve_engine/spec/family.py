"""The interface of a family's module: facts of a model folder, and the work that it counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from maskserve_common.config import Config
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.spec.facts import ModelFacts


class FamilyFacts(Protocol):
    """What a family's module has."""

    NAME: str
    """Of its models, in an error's sentence."""

    @property
    def PIPELINES(self) -> Collection[str]:  # noqa: N802 - a module's constant
        """The classes in model_index.json that are served."""

    @property
    def SETTINGS(self) -> Collection[str]:  # noqa: N802
        """Keys of the configuration, as `model.gguf`, that only models of such families have."""

    def recorded_rows(self, config: Config, /) -> int:
        """Dense rows whose tokens a step may have that is recorded as a CUDA graph, on GPUs; 0:
        none is recorded.
        """

    def read(self, folder: Path, pipeline: str, native_resolution: int, /) -> ModelFacts:
        """The facts of a folder; `native_resolution` 0: what the folder says."""

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
        """The work of its denoiser, as `family_work`."""

    def control_work(self, config: dict[str, Any], height: int, width: int, /) -> ModelWork:
        """The work of a ControlNet beside it, for as many evaluations of a row as `count` has."""

    def lora_work(self, base: ModelWork, layers: Mapping[str, int], /) -> ModelWork:
        """What a LoRA adds to the work of its denoiser."""

    def lora_layers(self, config: Mapping[str, Any], /) -> dict[str, int]:
        """What a LoRA of the blocks has per rank, as `lora_work` takes it."""


def family_work(
    family: FamilyFacts,
    facts: ModelFacts,
    height: int,
    width: int,
    *,
    halo: int = 0,
    recorded: bool = False,
) -> ModelWork:
    """Count a model's work on one picture.

    Args:
        family: the model's family.
        facts: the model's facts.
        height: latent rows (pixels / VAE scale).
        width: latent columns.
        halo: as `ModelWork.halo`; 0 for families without convolutions.
        recorded: whether steps are CUDA graphs.
    """
    work = family.count(
        facts.denoiser,
        height,
        width,
        halo,
        recorded=recorded,
        references=int(facts.semantics.reference),
        exact=facts.semantics.exact,
    )
    picture_tokens = facts.shown_tokens(height, width)
    return work.looking_at(picture_tokens) if picture_tokens else work
