"""Similarity of a picture and a text: CLIP, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from maskserve_common.config import Config
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import NodeRequest, one_by_one
from maskserve_workflows.pictures import read_picture
from maskserve_workflows.values import Judgement


class LikenessNodes:
    """The node `resembles`; `[nodes] likeness` is the folder."""

    def __init__(self, config: Config) -> None:
        self._limits, self._device = config.limits, device_of(config)
        folder = config.nodes.likeness
        self._processor: Any = CLIPProcessor.from_pretrained(folder)
        model: Any = CLIPModel.from_pretrained(folder)
        self._model = model.to(self._device).eval()

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        return one_by_one(self._run, calls)

    @torch.inference_mode()
    def _run(self, request: NodeRequest) -> dict[str, Any]:
        pixels = read_picture(request.inputs["picture"], self._limits)
        processed = self._processor(
            text=[request.inputs["text"]], images=[Image.fromarray(pixels)],
            return_tensors="pt", padding=True, truncation=True,
        )  # fmt: skip
        embeddings = self._model(**{name: x.to(self._device) for name, x in processed.items()})
        # Both are of length 1; below 0 they say no more than at it (CLIPScore, Hessel et al. 2021).
        score = round(max(float((embeddings.image_embeds * embeddings.text_embeds).sum()), 0.0), 4)
        return {"verdict": Judgement(score, score >= request.settings["enough"])}
