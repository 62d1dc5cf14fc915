"""Similarity of a picture and a text: CLIP, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import ModelSetup, NodeRequest, one_by_one
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.pictures import read_picture
from maskserve_workflows.ports import Picture, Verdict, Words
from maskserve_workflows.values import Judgement


@node(model="likeness", price_s=0.1)
def resembles(
    picture: Picture, text: Words | str, *, enough: Annotated[float, Meta(ge=0, le=1)] = 0.25
) -> Verdict:
    """Compare the picture with the text by CLIP's cosine, which passes from `enough` on."""
    raise NotImplementedError


@node_model("likeness", source="likeness", kinds=("clip",))
class LikenessNodes:
    """CLIP model, for `resembles`."""

    def __init__(self, setup: ModelSetup) -> None:
        self._limits, self._device = setup.config.limits, device_of(setup.config)
        self._processor: Any = CLIPProcessor.from_pretrained(setup.source)
        model: Any = CLIPModel.from_pretrained(setup.source)
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
