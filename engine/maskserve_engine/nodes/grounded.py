"""Masks by name: GroundingDINO finds boxes, SAM the thing in each; from folders saved by
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, GroundingDinoForObjectDetection

from maskserve_common.config import Config
from maskserve_engine.nodes.find import FindNodes
from maskserve_engine.nodes.segment import SegmentNodes
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.pictures import Grey, Pixels


class GroundedNodes(FindNodes):
    """The nodes `find` and `shows`.

    Args:
        config: configuration of the node server; `[nodes] find` is GroundingDINO's folder.
        loaded: models by name; it contains `segment` whenever a call runs.
    """

    def __init__(self, config: Config, loaded: Mapping[str, SegmentNodes]) -> None:
        self._limits, self._device, self._loaded = config.limits, device_of(config), loaded
        folder = config.nodes.find
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        detector: Any = GroundingDinoForObjectDetection.from_pretrained(folder)
        self._model = detector.to(self._device).eval()

    def features(self, pixels: Pixels) -> Any:
        """Return the picture: GroundingDINO reads it together with the name."""
        return pixels

    @torch.inference_mode()
    def find_mask(self, features: Any, size: tuple[int, ...], name: str, threshold: float) -> Grey:
        """Return the mask [H, W] of the named thing: all boxes whose score is above the
        threshold.
        """
        words = f"{name.lower().strip().rstrip('.')}."  # as it was trained
        processed = self._processor(
            images=[Image.fromarray(features)], text=[words], return_tensors="pt", truncation=True
        ).to(self._device)
        [detections] = self._processor.post_process_grounded_object_detection(
            self._model(**processed),
            processed["input_ids"],
            threshold,
            0.0,
            target_sizes=[size[:2]],
        )
        boxes = detections["boxes"].tolist()
        if not boxes:
            return np.zeros(size[:2], np.bool_)
        return self._loaded["segment"].in_boxes(features, boxes)
