"""Masks by name: CLIPSeg, from a folder as transformers saves one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

from maskserve_core.config import Config
from maskserve_core.errors import InvalidRequest
from maskserve_core.workflows.pictures import Grey, Pixels, encode_mask, read_mask, read_picture
from maskserve_core.workflows.values import Judgement
from maskserve_engine.stages.cpu_threads import limit_threads
from maskserve_engine.stages.loader import device_of


class FindNodes:
    """`find` and `shows`.

    Args:
        config: of the node server; `[nodes] find` is the folder.
    """

    def __init__(self, config: Config) -> None:
        limit_threads(config)
        self._limits, self._device = config.limits, device_of(config)
        folder = config.nodes.find
        self._processor: Any = CLIPSegProcessor.from_pretrained(folder)
        model: Any = CLIPSegForImageSegmentation.from_pretrained(folder)
        self._model = model.to(self._device).eval()

    def run(
        self, node: str, inputs: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The node's outputs.

        Raises:
            InvalidRequest: a picture cannot be used, or `find` found nothing.
        """
        name = inputs["name"]
        pixels = read_picture(inputs["picture"], self._limits)
        found = self.found(pixels, name, settings["threshold"])
        if node == "find":
            if not found.any():
                raise InvalidRequest("name", f"{name[:60]!r} is not found in the picture")
            return {"mask": encode_mask(found)}
        mask = read_mask(inputs["mask"], self._limits, pixels.shape[:2])
        score = float(found[mask].mean()) if mask.any() else 0.0
        return {"verdict": Judgement(round(score, 4), score >= settings["enough"])}

    @torch.inference_mode()
    def found(self, pixels: Pixels, name: str, threshold: float) -> Grey:
        """Where the named thing is, [H, W], in a picture [H, W, 3]."""
        # The tokenizer's own limit of words; what is beyond it is left out.
        given = self._processor(
            text=[name], images=[pixels], return_tensors="pt", padding=True, truncation=True
        )
        logits = self._model(**{key: x.to(self._device) for key, x in given.items()}).logits
        sized = torch.nn.functional.interpolate(
            logits.reshape(1, 1, *logits.shape[-2:]), pixels.shape[:2], mode="bilinear"
        )
        said: Grey = (torch.sigmoid(sized[0, 0]) > threshold).cpu().numpy()
        return np.ascontiguousarray(said)
