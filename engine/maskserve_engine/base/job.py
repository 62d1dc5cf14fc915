"""The jobs that the engine takes, their ControlNet pictures, and the events that it sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.contracts.request import EditRequest
from maskserve_common.contracts.settings import scale_at
from maskserve_common.errors import MaskserveError
from maskserve_engine.base.timeline import RequestTimeline


@dataclass(frozen=True, slots=True)
class ControlInput:
    """A ControlNet's picture and its weight in one edit."""

    net: str
    """Version of the ControlNet, as the engine names it."""
    picture: NDArray[np.uint8]
    """[H, W, 3] at model resolution."""
    scale: float = 1.0
    """Factor of the residuals that the ControlNet adds."""
    start: float = 0.0
    """Share of the edit's steps before which it adds nothing."""
    end: float = 1.0
    """Share of the edit's steps behind which it adds nothing."""
    mode: int | None = None
    """Which kind of picture it is, for a union ControlNet."""
    moments: NDArray[np.float32] | None = None
    """[2C, h, w] VAE posterior of the picture: mean, log-variance; FLUX's nets are given it."""
    fills: bool = False
    """Whether the ControlNet fills the edit's mask: the picture is black there."""

    def scale_at(self, step: int, steps: int) -> float:
        """The scale of step `step` of `steps`; 0: adds nothing."""
        return scale_at(self, step, steps)


Conditioning = dict[str, NDArray[np.float32]]
"""Prompt embeddings of a family's text encoders, by name. `prompt_embeds` [T, width] is always
present; `pooled` [width] where the family has it.
"""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of an edit at the finest level of the model."""

    active: int
    """Tokens that a cached row computes."""
    total: int
    inner: int = 0
    """Computed tokens inside the mask: steps compute these alone when they leave the margin out."""
    ring: int = 0
    """Margin tokens that rows compute at some of the steps that leave the margin out
    (`RefreshSpec.ring`).
    """
    cover_a_side: bool = False
    """Whether the computed tokens cover a whole side of the picture; False where that decides
    nothing (`ModelSpec.dense_sides`, `ModelSpec.dense_steps`).
    """


@dataclass(frozen=True, slots=True)
class EditJob:
    """One edit, encoded. Arrays are the job's own: nobody else writes them."""

    request: EditRequest
    edit_mask: NDArray[np.uint8]
    """[H, W] at model resolution, above 127 = edit."""
    moments: NDArray[np.float32]
    """[2C, h, w] VAE posterior of the source: mean, log-variance."""
    masked_moments: NDArray[np.float32]
    """The same with the masked area blanked; size 0 for models that do not take it."""
    conditioning: Conditioning
    """Embeddings of the prompt."""
    negative: Conditioning | None = None
    """Embeddings of the negative prompt; None: there is none. With one, every step runs the model
    twice.
    """
    adapters: str = ""
    """Names the adapters with which its template's entries are made and read; empty: none."""
    controls: tuple[ControlInput, ...] = ()
    """ControlNet inputs of the edit."""
    references: tuple[NDArray[np.float32], ...] = ()
    """[2C, h, w] VAE posterior of each reference beside the source."""
    prepared: object = None
    """The row's initial state, set by `Adapter.prepare`; its type is the family's."""

    @property
    def mask_ring(self) -> int:
        """Tokens round the mask that a cached row computes too."""
        ring = self.request.settings.mask_ring
        assert ring is not None, "preprocess fills in the model's default"
        return ring

    def with_settings(self, **changes: int) -> EditJob:
        """Return a copy with another `mask_ring` or `step_interval`, not prepared."""
        settings = structs.replace(self.request.settings, **changes)
        return replace(self, request=replace(self.request, settings=settings), prepared=None)


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class PreviewEvent:
    """The image as the model expects it to end, after `step` of `steps` model calls."""

    step: int
    steps: int
    latents: NDArray[np.float32]
    """[C, h, w]"""


@dataclass(frozen=True, slots=True)
class FinalEvent:
    latents: NDArray[np.float32]
    """[C, h, w]"""
    meta: dict[str, Any]
    timeline: RequestTimeline | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    error: MaskserveError
    timeline: RequestTimeline | None = None
    """None if it was refused."""


EngineEvent = ProgressEvent | PreviewEvent | FinalEvent | Failed

Sink = Callable[[EngineEvent], None]
"""Takes a job's events on the engine's reply thread: any number of Progress and Preview, then
exactly one Final or Failed."""
