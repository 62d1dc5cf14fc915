"""Qwen-Image-2.1, where its rows differ from FLUX.1's.

Its tokens form a sequence: for each reference some words and the reference, then the prompt, and
last the picture; without a reference they begin with the prompt. Each
attends to those before it, pictures also to all of themselves, and all but the picture are computed
at time 0. So steps compute the picture only. A lone reference's keys and values follow from the
source, and a template caches them; those of words are computed once per edit.

On the first axis of positions the model puts a picture after everything that precedes it. Here the
picture is at 0, and the references as far before it as without a prompt. Attention sees the keys of
the sequence rotated back by the prompt's number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.packing import TokenCache
from maskserve_engine.batch.transfer import moved
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.flux2.adapter import Flux2Preparation
from maskserve_engine.families.mmdit.blocks import Vectors
from maskserve_engine.families.mmdit.preparation import (
    BEFORE,
    FlowPrompt,
    Grid,
    before,
    reference_grids,
)
from maskserve_engine.families.mmdit.rows import FlowRow, Row
from maskserve_engine.families.mmdit.spans import FixedWords, References
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.qwen_image21 import spec as qwen_image21
from maskserve_engine.families.qwen_image21.blocks import fixed_words_entry, vectors
from maskserve_engine.families.qwen_image21.weights import QwenImage21Weights, places_of, weights_of
from maskserve_engine.layers.low_rank import Adapters, Place
from maskserve_engine.spec.family import FamilyModule

_ROTARY_BASE = 10_000.0


class QwenImage21Batch(FluxBatch):
    def vectors(self, weights: FluxWeights, steps: slice) -> tuple[Vectors, ...]:
        assert isinstance(weights, QwenImage21Weights)
        return vectors(weights, self.timesteps[steps])

    def make_fixed(self, model: FluxWeights) -> None:
        """Compute missing keys and values of words, too."""
        super().make_fixed(model)
        for row in self.rows:
            for references in () if row.references is None else row.references.all:
                _say(model, row, references.before)  # if a template has the references
            if isinstance(row, FlowRow):
                for prompt in row.passes:
                    _say(model, row, prompt.words)

    def make_references(
        self, model: FluxWeights, lacking: Sequence[tuple[Row, References]]
    ) -> None:
        """Compute the words before the references first, to which these attend. Earlier references
        may be another row's, and the words before them are this row's.
        """
        for row, references in lacking:
            for part in references.all:
                _say(model, row, part.before)
        super().make_references(model, lacking)


def _say(model: FluxWeights, row: Row, words: FixedWords | None) -> None:
    if words is not None and words.entry is None:
        assert isinstance(model, QwenImage21Weights)
        words.entry = fixed_words_entry(model.with_adapters((row.adapters,)), words)
        if row.references is not None:
            row.references.computed = True


class QwenImage21Adapter(FluxAdapter):
    family: ClassVar[FamilyModule] = qwen_image21
    transformer = "QwenImage21Transformer2DModel"
    batches = QwenImage21Batch
    preparation = Flux2Preparation
    flow_sigmas = frozenset()
    text_places = ()

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def blank_prompt(self, tokens: int) -> Conditioning:
        words = super().blank_prompt(1)["prompt_embeds"]
        return {**super().blank_prompt(tokens), BEFORE: words}

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        """Return no tokens: no step computes text."""
        return embeds.new_empty(0, self.weights.width)

    def attach(self, row: Any, job: EditJob, adapters: Adapters) -> None:
        super().attach(row, job, adapters)
        passes = row.passes if isinstance(row, FlowRow) else ()
        references = () if row.references is None else row.references.all
        befores = [of_one.before for of_one in references]
        for words in (*befores, *(prompt.words for prompt in passes)):
            if words is not None:
                words.entry = None  # made without them

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        """Return the factors of the picture alone: those of references depend on the words between
        them.
        """
        return self._rotary(places_at(height, width, 0))

    def words(
        self, job: EditJob, prompt: FlowPrompt, references: References | None
    ) -> FixedWords | None:
        """Return the words of a prompt, which follow the reference if there is one."""
        count, visible = len(prompt.embeds), tuple[TokenCache, ...]()
        begin = sum(len(words) + extent for words, extent in self._sentence(job))
        if references is not None:
            visible = references.whole
        back = self._rotary(torch.tensor([[-count, 0, 0]]))[0]
        return FixedWords(prompt.embeds, self._spoken(count, 0, begin), visible, back)

    def references(self, job: EditJob, text: int) -> References | None:
        grids, references = reference_grids(job, self.spec), None
        if not grids:
            return None
        sentence = self._sentence(job)
        end = sum(len(words) + extent for words, extent in sentence)
        states = [torch.from_numpy(words).to(self.dtype) for words, _ in sentence]
        tokens = self._preparation.references(job).split([rows * cols for rows, cols in grids])
        host_tensors = tuple(zip(tokens, states, strict=True))
        begin = 0
        for grid, (picture, embeds) in zip(grids, moved(host_tensors, self.device), strict=True):
            visible = () if references is None else references.whole
            words = FixedWords(embeds, self._spoken(len(embeds), begin - end, begin), visible)
            begin += len(embeds)
            cis = self._rotary(places_at(*grid, begin - end))
            references = References(picture, cis, before=words, earlier=references)
            begin += max(grid)
        return references

    def _sentence(self, job: EditJob) -> list[tuple[NDArray[np.float32], int]]:
        """Return for each reference the states of the words before it, and the number of positions
        that it takes.
        """
        grids = reference_grids(job, self.spec)
        return [(job.conditioning[before(number)], max(grid)) for number, grid in enumerate(grids)]

    def _spoken(self, count: int, first: int, begin: int) -> Tensor:
        """Return [count, head_dim / 2] of words that begin at `first` on the first axis and at
        `begin` on the others.
        """
        along = torch.arange(count)
        return self._rotary(torch.stack((first + along, begin + along, begin + along), dim=1))

    def _rotary(self, places: Tensor) -> Tensor:
        return rotary(self.model, places).to(self.device)


def places_at(height: int, width: int, first: int) -> Tensor:
    """Return [height · width, 3] positions of a picture that is at `first` on the first axis."""
    return torch.cartesian_prod(torch.tensor([first]), _middle(height), _middle(width))


def rotary(model: Any, places: Tensor) -> Tensor:
    """Return [N, head_dim / 2] complex factors of positions [N, 3]."""
    angles = [
        torch.outer(along.float(), 1.0 / _ROTARY_BASE ** (torch.arange(0, size, 2) / size))
        for along, size in zip(places.unbind(1), model.pos_embed.axes_dim, strict=True)
    ]
    all_angles = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(all_angles), all_angles)


def _middle(side: int) -> Tensor:
    """Return [side] positions along a picture's side, counted from its middle."""
    return torch.arange(side) - (side - side // 2)
