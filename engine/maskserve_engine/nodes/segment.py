"""Masks by clicks and boxes: SAM or SAM 2, from a folder saved by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForMaskGeneration, Sam2Processor, SamProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from maskserve_common.contracts.settings import Click
from maskserve_common.errors import InvalidRequest
from maskserve_engine.stages.loader import device_of
from maskserve_workflows.node_request import ModelSetup, NodeRequest, one_by_one
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.pictures import Grey, Pixels, mask_pixels, read_picture
from maskserve_workflows.ports import Mask, Picture, Verdict
from maskserve_workflows.values import Judgement

Points: TypeAlias = Sequence[tuple[float, float, int]]
"""(x, y, 1 or 0) of clicks; 0: the point is not part of the object."""
_BOXES_AT_A_TIME = 16
_SIZES = ("original_sizes", "reshaped_input_sizes")
"""Keys of a processor's output that describe its picture."""


class MaskMatch(NamedTuple):
    """A mask, and the model's verdict on it."""

    mask: Mask
    verdict: Verdict


@node(model="segment", price_s=0.3)
def segment(
    picture: Picture, *, points: tuple[Click, ...] = (), box: tuple[float, ...] = ()
) -> MaskMatch:
    """Select the region under clicks (x, y, and 1, or 0 for a point outside of it) and in a box
    (left, top, right, bottom). The verdict is the model's own estimate of the fit. An empty region
    ends the run with an error.
    """
    raise NotImplementedError


# Published SAM 2 folders are for videos; only the part for pictures is read.
@node_model("segment", source="segment", kinds=("sam", "sam2", "sam2_video"))
class SegmentNodes:
    """SAM or SAM 2 model: masks by clicks and boxes, and of things that GroundingDINO finds."""

    def __init__(self, setup: ModelSetup) -> None:
        self._limits, self._device = setup.config.limits, device_of(setup.config)
        folder = setup.source
        model: Any = AutoModelForMaskGeneration.from_pretrained(folder)
        self._model = model.to(self._device).eval()
        is_sam1 = model.config.model_type == "sam"
        self._processor: Any = (
            SamProcessor.from_pretrained(folder)
            if is_sam1
            else Sam2Processor(Sam2Pictures.from_pretrained(folder))
        )

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        return one_by_one(self._run, calls)

    def _run(self, request: NodeRequest) -> dict[str, Any]:
        pixels = read_picture(request.inputs["picture"], self._limits)
        points, box = request.settings["points"], request.settings["box"]
        check_clicks(points, box, pixels.shape[1], pixels.shape[0])
        segmented, score = self.find_mask(pixels, points, box)
        if not segmented.any():
            raise InvalidRequest("points" if points else "box", "select nothing in the picture")
        return {"mask": mask_pixels(segmented), "verdict": Judgement(round(score, 4), passed=True)}

    @torch.inference_mode()
    def find_mask(self, pixels: Pixels, points: Points, box: Sequence[float]) -> tuple[Grey, float]:
        """Return the best of the model's masks for clicks and a box, bool [H, W], and its score.

        Args:
            pixels: [H, W, 3].
            points: clicks.
            box: left, top, right and bottom; empty: none.
        """
        prompts: dict[str, Any] = {}
        if points:
            prompts["input_points"] = [[[[float(x), float(y)] for x, y, _ in points]]]
            prompts["input_labels"] = [[[int(is_inside) for *_, is_inside in points]]]
        if box:
            prompts["input_boxes"] = [[[float(side) for side in box]]]
        model_inputs = self._model_input(pixels, prompts)
        prediction = self._model(**model_inputs.inputs, multimask_output=True)
        [scores] = prediction.iou_scores[0].cpu()
        best = int(scores.argmax())
        return model_inputs.whole(prediction.pred_masks[0, 0, best]), float(scores[best])

    @torch.inference_mode()
    def in_boxes(self, pixels: Pixels, boxes: Sequence[Sequence[float]]) -> Grey:
        """Return one mask of the objects in all boxes, bool [H, W]."""
        model_inputs = self._model_input(pixels, {"input_boxes": [boxes]})
        image_embeddings = self._model.get_image_embeddings(model_inputs.inputs["pixel_values"])
        white: Grey = np.zeros(pixels.shape[:2], np.bool_)
        for box_batch in model_inputs.inputs["input_boxes"].split(_BOXES_AT_A_TIME, dim=1):
            prediction = self._model(
                image_embeddings=image_embeddings, input_boxes=box_batch, multimask_output=False
            )
            for mask in prediction.pred_masks[0, :, 0]:
                white |= model_inputs.whole(mask)
        return white

    def _model_input(self, pixels: Pixels, request: dict[str, Any]) -> _ModelInput:
        """Return the model's inputs.

        Raises:
            InvalidRequest: the picture is so narrow that the model's input would have no pixels.
        """
        height, width = pixels.shape[:2]
        longest = self._processor.image_processor.size.get("longest_edge")  # SAM 2 has squares
        if longest and 2 * longest * min(height, width) < max(height, width):
            problem = f"is {width}x{height} pixels"
            raise InvalidRequest("picture", problem, f"sides of up to 1:{2 * longest}")
        processed = self._processor(
            images=[Image.fromarray(pixels)], return_tensors="pt", **request
        )
        sizes = {name: processed.pop(name) for name in _SIZES if name in processed}
        return _ModelInput(processed.to(self._device, torch.float32), partial(self._whole, sizes))

    def _whole(self, sizes: Mapping[str, Any], mask: torch.Tensor) -> Grey:
        """Scale a mask of the model to the picture's size, bool [H, W]. Only one at a time: for a
        picture of 12 megapixels it takes 48 MB.
        """
        [masks] = self._processor.post_process_masks(mask[None, None, None].cpu(), **sizes)
        whole: Grey = masks[0, 0].numpy()
        return whole


class Sam2Pictures(ViTImageProcessorPil):
    """The image part of `Sam2Processor`; transformers' own needs torchvision."""

    size: ClassVar = {"height": 1024, "width": 1024}
    image_mean, image_std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    def preprocess(
        self, images: Sequence[Image.Image], segmentation_maps: None = None, **request: Any
    ) -> Any:
        """Return `pixel_values` of pictures, and their sizes."""
        features = super().preprocess(images, **request)
        features["original_sizes"] = [(picture.height, picture.width) for picture in images]
        return features

    def post_process_masks(
        self, masks: torch.Tensor, sizes: Sequence[tuple[int, int]], *_: Any
    ) -> list[torch.Tensor]:
        """Return each picture's masks, bool [N, M, H, W]."""
        pairs = zip(masks, sizes, strict=True)
        return [torch.nn.functional.interpolate(*pair, mode="bilinear") > 0 for pair in pairs]


class _ModelInput(NamedTuple):
    """A picture and its prompts as the model's input."""

    inputs: Any
    whole: Callable[[torch.Tensor], Grey]
    """Scales one of its masks to the picture's size."""


def check_clicks(points: Points, box: Sequence[float], width: int, height: int) -> None:
    """Check that clicks and box lie in a picture of this size.

    Raises:
        InvalidRequest: they do not.
    """
    size = f"within {width}x{height} pixels"
    for at, (x, y, _) in enumerate(points):
        if not (0 <= x < width and 0 <= y < height):
            raise InvalidRequest(f"points[{at}]", f"is {x:g}, {y:g}", size)
    if box:
        left, top, right, bottom = box
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise InvalidRequest("box", f"is {[round(side) for side in box]}", size)
