"""Masks by name: GroundingDINO finds boxes, SAM the thing in each; from folders saved by
transformers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, GroundingDinoForObjectDetection

from maskserve_engine.nodes.find import FindNodes
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.node_types import node_model
from maskserve_workflows.pictures import Grey, Pixels


@node_model("find", source="find", kinds=("grounding-dino",), needs=("segment",))
class GroundedNodes(FindNodes):
    """GroundingDINO model: masks by name, which the model `segment` cuts out."""

    def __init__(self, setup: ModelSetup) -> None:
        self._limits, self._device = setup.config.limits, device_of(setup.config)
        self._loaded = setup.loaded
        self._processor: Any = AutoProcessor.from_pretrained(setup.source)
        detector: Any = GroundingDinoForObjectDetection.from_pretrained(setup.source)
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
        mask: Grey = self._loaded["segment"].in_boxes(features, boxes)
        return mask
