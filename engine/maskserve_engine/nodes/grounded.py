"""Masks by name: GroundingDINO finds boxes, SAM what of each is the thing; from folders as
transformers saves them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoProcessor,
    GroundingDinoForObjectDetection,
    SamModel,
    SamProcessor,
)

from maskserve_core.config import Config
from maskserve_core.workflows.pictures import Grey, Pixels
from maskserve_engine.nodes.find import FindNodes
from maskserve_engine.stages.loader import device_of


class GroundedNodes(FindNodes):
    """`find` and `shows`.

    Args:
        config: of the node server; `[nodes] find` is GroundingDINO's folder, `segment` SAM's.
    """

    def __init__(self, config: Config) -> None:
        nodes = config.nodes
        self._limits, self._device = config.limits, device_of(config)
        self._processor: Any = AutoProcessor.from_pretrained(nodes.find)
        self._pieces: Any = SamProcessor.from_pretrained(nodes.segment)
        detector: Any = GroundingDinoForObjectDetection.from_pretrained(nodes.find)
        segmenter: Any = SamModel.from_pretrained(nodes.segment)
        self._model = detector.to(self._device).eval()
        self._segmenter = segmenter.to(self._device).eval()

    def seen(self, pixels: Pixels) -> Any:
        """The picture itself: GroundingDINO reads it together with the name."""
        return pixels

    @torch.inference_mode()
    def found(self, seen: Any, size: tuple[int, ...], name: str, threshold: float) -> Grey:
        """Where the named thing is, [H, W]: all boxes whose score is over the threshold."""
        words = f"{name.lower().strip().rstrip('.')}."  # as it was trained
        given = self._processor(
            images=[seen], text=[words], return_tensors="pt", truncation=True
        ).to(self._device)
        [said] = self._processor.post_process_grounded_object_detection(
            self._model(**given), given["input_ids"], threshold, 0.0, target_sizes=[size[:2]]
        )
        boxes = said["boxes"].cpu()
        if not len(boxes):
            return torch.zeros(size[:2], dtype=torch.bool).numpy()
        asked = self._pieces(images=[seen], input_boxes=[boxes.tolist()], return_tensors="pt")
        made = self._segmenter(**asked.to(self._device, torch.float32), multimask_output=False)
        sizes = asked["original_sizes"], asked["reshaped_input_sizes"]
        [masks] = self._pieces.post_process_masks(made.pred_masks.cpu(), *sizes)
        white: Grey = masks.any(dim=1).any(dim=0).numpy()
        return white
