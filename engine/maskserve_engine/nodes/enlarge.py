"""Doubles the sides of pictures: Swin2SR, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from msgspec import structs
from transformers import Swin2SRForImageSuperResolution

from maskserve_common.config import Config
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import NodeRequest, one_by_one
from maskserve_workflows.pictures import read_picture

MOST_PIXELS: Final = 2**21
"""Maximum pixels of a picture, for which the model takes some gigabytes."""


class EnlargeNodes:
    """The node `enlarge`; `[nodes] enlarge` is the folder."""

    def __init__(self, config: Config) -> None:
        most = min(config.limits.max_pixels, MOST_PIXELS)
        self._limits = structs.replace(config.limits, max_pixels=most)
        self._device = device_of(config)
        model: Any = Swin2SRForImageSuperResolution.from_pretrained(config.nodes.enlarge)
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
