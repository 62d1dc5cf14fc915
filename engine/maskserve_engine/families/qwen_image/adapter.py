"""Qwen-Image and its edit models, where their rows differ from FLUX.1's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.families.flux.adapter import FluxAdapter, FluxBatch
from maskserve_engine.families.mmdit.preparation import Grid
from maskserve_engine.families.mmdit.weights import FluxWeights
from maskserve_engine.families.qwen_image import spec as qwen_image
from maskserve_engine.families.qwen_image.weights import places_of, weights_of
from maskserve_engine.layers.low_rank import Adapters, Place
from maskserve_engine.spec.family import FamilyModule


class QwenImageBatch(FluxBatch):
    @staticmethod
    def guide(positive: Tensor, negative: Tensor, scale: float) -> None:
        """Guide, then scale each token's answer to the length of its first pass's."""
        length = positive.norm(dim=-1, keepdim=True)
        FluxBatch.guide(positive, negative, scale)
        positive.mul_(length / positive.norm(dim=-1, keepdim=True))


class QwenImageAdapter(FluxAdapter):
    family: ClassVar[FamilyModule] = qwen_image
    transformer = "QwenImageTransformer2DModel"
    batches = QwenImageBatch
    text_varies = True
    flow_sigmas = frozenset()

    def weights_of(self, model: Any, placed_bytes: int, graphs: Graphs | None) -> FluxWeights:
        return weights_of(model, placed_bytes=placed_bytes, graphs=graphs)

    @staticmethod
    def places_of(model: Any) -> Mapping[str, Place]:
        return places_of(model)

    def text(self, embeds: Tensor, grid: tuple[int, int], adapters: Adapters = ()) -> Tensor:
        return super().text(self.model.txt_norm(embeds), grid, adapters)

    @property
    def timeless(self) -> bool:
        return bool(self.model.zero_cond_t)

    def positions(self, height: int, width: int, text: int, references: tuple[Grid, ...]) -> Tensor:
        """Return the factors of pictures, centred at 0, and of the text after them on their
        diagonal.
        """
        pictures = [(1, *grid) for grid in ((height, width), *references)]
        image, words = self.model.pos_embed([pictures], device=self.device, max_txt_seq_len=text)
        return torch.cat((words, image))
