"""What the engine asks of a model family, and the registry of families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maskserve_core.config import Config, ConfigError
from maskserve_core.contracts.entry_key import Anchor
from maskserve_core.contracts.facts import ModelFacts, load_facts
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.job import EditJob, PromptEmbedding


class Row(Protocol):
    """State of one row between steps; the adapter made it and the engine counts its steps."""

    request_id: str
    step: int

    @property
    def steps(self) -> int: ...

    @property
    def uses_entries(self) -> bool:
        """Whether the next step reads entries."""
        ...

    def load(self) -> None:
        """Bring in what the next step reads."""
        ...


class Adapter(Protocol):
    """Runs one family's model over explicit per-row state; the model itself holds none."""

    facts: ModelFacts
    blocks: int
    """Transformer blocks a plan speaks of."""
    anchor_tolerance: float
    """How far, in sigma, a step may be from the anchor it uses."""

    def steps(self, job: EditJob) -> int:
        """Model calls of the edit."""
        ...

    def sigmas(self, job: EditJob) -> list[tuple[float, float]]:
        """(sigma, timestep) of each of the edit's model calls."""
        ...

    def anchors(self, tokens: int, steps: int, stride: int) -> tuple[Anchor, ...]:
        """Timesteps to prime for an image of so many tokens."""
        ...

    def dense_row(self, job: EditJob) -> Any:
        """A row that computes all tokens, exactly as the diffusers pipeline does."""
        ...

    def cached_row(
        self, job: EditJob, entries: Sequence[AnchorEntry | None], noise_seed: int
    ) -> Any:
        """A row that computes the active tokens and reads `entries` (per step) for the rest."""
        ...

    def priming_row(
        self,
        job: EditJob,
        anchors: Sequence[Anchor],
        prompt: PromptEmbedding,
        noise_seed: int,
        kind: str,
        format: str,
    ) -> Any:
        """A row that computes the template's entries at `anchors`, one per step."""
        ...

    def step(self, rows: Sequence[Any], kinds: Sequence[str]) -> None:
        """One model call for all rows; `kinds` per block, for rows that use entries."""
        ...

    def session(self) -> AbstractContextManager[object]:
        """What a thread that makes rows and steps them is inside of all the while."""
        ...

    def release(self) -> None:
        """Let go of what was kept of the last step's rows; there is nothing to step."""
        ...

    def result(self, row: Any) -> NDArray[np.float32]:
        """[C, h, w] latents of a finished row."""
        ...

    def estimate(self, row: Any) -> NDArray[np.float32]:
        """[C, h, w] latents as they would end, judged by the last step."""
        ...


def _flux(facts: ModelFacts, config: Config) -> Adapter:
    from maskserve_engine.families.flux.adapter import FluxAdapter

    return FluxAdapter.load(facts, config)


FAMILIES: dict[str, Callable[[ModelFacts, Config], Adapter]] = {"flux": _flux}


def load_adapter(config: Config) -> Adapter:
    """The adapter of the family that the model folder names.

    Raises:
        ConfigError: no such folder, family or part.
    """
    facts = load_facts(config.model.path, config.model.native_resolution)
    if facts.family not in FAMILIES:
        raise ConfigError(f"[model] path: family {facts.family} has no adapter")
    return FAMILIES[facts.family](facts, config)
