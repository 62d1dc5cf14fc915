"""Doubles the sides of pictures: Swin2SR, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from msgspec import structs
from transformers import Swin2SRForImageSuperResolution

from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import ModelSetup, NodeRequest, one_by_one
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.pictures import read_picture
from maskserve_workflows.ports import Picture

MOST_PIXELS: Final = 2**21
"""Maximum pixels of a picture, for which the model takes some gigabytes."""


@node(model="enlarge", price_s=0.3)
def enlarge(picture: Picture) -> Picture:
    """Double the picture's sides."""
    raise NotImplementedError


@node_model("enlarge", source="enlarge", kinds=("swin2sr",))
class EnlargeNodes:
    """Swin2SR model that doubles sides."""

    def __init__(self, setup: ModelSetup) -> None:
        limits = setup.config.limits
        most = min(limits.max_pixels, MOST_PIXELS)
        self._limits = structs.replace(limits, max_pixels=most)
        self._device = device_of(setup.config)
        model: Any = Swin2SRForImageSuperResolution.from_pretrained(setup.source)
        self._model = model.to(self._device).eval()

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        return one_by_one(self._run, calls)

    @torch.inference_mode()
    def _run(self, request: NodeRequest) -> dict[str, Any]:
        pixels = np.array(read_picture(request.inputs["picture"], self._limits))
        small = torch.from_numpy(pixels).to(self._device).permute(2, 0, 1)[None].float() / 255
        large = self._model(small).reconstruction[0].clamp(0, 1)
        large_pixels = (255 * large).round().permute(1, 2, 0).to(torch.uint8).cpu().numpy()
        return {"picture": np.ascontiguousarray(large_pixels)}
