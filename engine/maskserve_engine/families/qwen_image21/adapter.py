"""Qwen-Image-2.1: what of its rows is not FLUX.1's.

Its tokens are a sentence: some words, the reference, the prompt, and last the picture. Each sees
those before it, pictures all of themselves besides, and all but the last are as they are at time 0.
So steps compute the picture alone. What of the reference there is to see follows from the source,
and a template keeps it; the words' keys and values are made once in an edit.

On the first axis of positions a picture stands behind all that is before it. Here it stands at 0,
and the reference as far before it as it would without a prompt. What attention sees of the
sentence, it sees turned back by as many places as the prompt has tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.flux2.adapter import Flux2Preparation
from maskserve_engine.families.mmdit.blocks import Vectors
from maskserve_engine.families.mmdit.preparation import BEFORE, FlowPrompt, grid_of
from maskserve_engine.families.mmdit.rows import FixedWords, FlowRow, References, Row
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.qwen_image21 import spec as qwen_image21
from maskserve_engine.families.qwen_image21.blocks import said, vectors
from maskserve_engine.families.qwen_image21.weights import QwenImage21Weights, places_of, weights_of
from maskserve_engine.layers.low_rank import Adapters, Place
from maskserve_engine.spec.family import FamilyFacts

_TURNS = 10_000.0
"""Base of the angles by which positions turn."""


class QwenImage21Batch(FluxBatch):
    """Rows stepped by a QwenImage21Transformer2DModel."""

    def vectors(self, weights: FluxWeights, timesteps: Tensor) -> tuple[Vectors, ...]:
        assert isinstance(weights, QwenImage21Weights)
        return vectors(weights, timesteps)

    def make_fixed(self, model: FluxWeights) -> None:
        """References, too, see words: those that stand before them."""
        for row in self.rows:
            assert row.references is not None
            _say(model, row, row.references.before)
        super().make_fixed(model)
        for row in self.rows:
            if isinstance(row, FlowRow):
                _say(model, row, row.words)
                _say(model, row, None if row.negative is None else row.negative.words)


def _say(model: FluxWeights, row: Row, words: FixedWords | None) -> None:
    """Make a row's words, if they have not been made."""
    if words is not None and words.entry is None:
        assert isinstance(model, QwenImage21Weights)
        assert row.references is not None
        words.entry = said(model.with_adapters((row.adapters,)), words)
        row.references.made = True


class QwenImage21Adapter(FluxAdapter):
    """Rows of Qwen-Image-2.1's edits over one QwenImage21Transformer2DModel."""

    spec: ClassVar[FamilyFacts] = qwen_image21
    batches = QwenImage21Batch
    preparation = Flux2Preparation
    text_places = ()

    @staticmethod
    def transformer() -> Any:
        from diffusers import QwenImage21Transformer2DModel

        return QwenImage21Transformer2DModel

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def blank_prompt(self, tokens: int) -> Conditioning:
        words = super().blank_prompt(1)["prompt_embeds"]
        return {**super().blank_prompt(tokens), BEFORE: words}

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        """Of no tokens: no step computes any."""
        return embeds.new_empty(0, self.weights.width)

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        super().attach(row, job, adapters)
        negative = getattr(row.negative, "words", None)
        for words in (row.references.before, row.words, negative):
            if words is not None:
                words.entry = None  # made without them

    def positions(self, height: int, width: int, text: int) -> Tensor:
        return self._rotary(places_of_pictures(height, width))

    def words(
        self, job: EditJob, prompt: FlowPrompt, references: References | None
    ) -> FixedWords | None:
        """Behind the reference."""
        assert references is not None
        assert references.before is not None
        count, begin = len(prompt.embeds), len(references.before) + max(grid_of(job))
        back = self._rotary(torch.tensor([[-count, 0, 0]]))[0]
        visible = (references.before, references)
        return FixedWords(prompt.embeds, self._spoken(count, 0, begin), visible, back)

    def _references(self, job: EditJob, text: int) -> References | None:
        refs = super()._references(job, text)
        assert refs is not None
        embeds = torch.from_numpy(job.conditioning[BEFORE]).to(self.dtype)
        [embeds] = to_device([embeds], self.device)
        count = len(embeds)
        refs.before = FixedWords(embeds, self._spoken(count, -max(grid_of(job)) - count, 0))
        return refs

    def _spoken(self, count: int, first: int, begin: int) -> Tensor:
        """[count, head_dim / 2] of words, the first of them there on the first axis and `begin` on
        the others.
        """
        along = torch.arange(count)
        return self._rotary(torch.stack((first + along, begin + along, begin + along), dim=1))

    def _rotary(self, places: Tensor) -> Tensor:
        return rotary(self.model, places).to(self.device)


def places_of_pictures(height: int, width: int) -> Tensor:
    """[2 · height · width, 3] of a picture and its reference."""
    places = torch.cartesian_prod(torch.tensor([0]), _middle(height), _middle(width))
    return torch.cat((places, places - torch.tensor([max(height, width), 0, 0])))


def rotary(model: Any, places: Tensor) -> Tensor:
    """[N, head_dim / 2] complex factors of places [N, 3]."""
    angles = [
        torch.outer(along.float(), 1.0 / _TURNS ** (torch.arange(0, size, 2) / size))
        for along, size in zip(places.unbind(1), model.pos_embed.axes_dim, strict=True)
    ]
    all_angles = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(all_angles), all_angles)


def _middle(side: int) -> Tensor:
    """[side] along a picture's side, counted from its middle."""
    return torch.arange(side) - (side - side // 2)
