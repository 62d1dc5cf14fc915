"""`segment`: masks by clicks and boxes, beside transformers' own model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Sam2Model, Sam2Processor, SamModel, SamProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from maskserve_common.config_file import config_of
from maskserve_common.errors import InvalidRequest
from maskserve_engine.nodes.segment import SegmentNodes, check_clicks
from maskserve_workflows.node_request import ModelSetup, NodeRequest
from tests.fakes.pictures import encode, scene
from tests.fakes.tiny_nodes import build_segment, build_segment_2
from tests.support.draws import fresh_rng

SIZE = (48, 80)
KINDS = {
    "sam": build_segment,
    "sam2": build_segment_2,
    "sam2_video": partial(build_segment_2, films=True),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mktemp = tmp_path_factory.mktemp("segment") / request.param
    KINDS[request.param](mktemp)
    return mktemp


def nodes_of(folder: Path) -> SegmentNodes:
    options = {"nodes": {"segment": str(folder)}, "model": {"device": "cpu"}}
    assert folder.name in vars(SegmentNodes)["node_model"].kinds
    return SegmentNodes(ModelSetup(str(folder), config_of(options)))


def expected(folder: Path, picture: Any, points: Any, box: Any) -> tuple[Any, float]:
    """The best of the masks that the model answers, said again by itself."""
    prompts: dict[str, Any] = {}
    if points:
        prompts["input_points"] = [[[[x, y] for x, y, _ in points]]]
        prompts["input_labels"] = [[[point[2] for point in points]]]
    if box:
        prompts["input_boxes"] = [[list(box)]]
    answer, every = (_by_sam if folder.name == "sam" else _said_2)(folder, picture, prompts)
    best = answer.iou_scores[0, 0].argmax()
    return every[best].numpy() > 0, float(answer.iou_scores[0, 0, best])


def _by_sam(folder: Path, picture: Any, prompts: dict[str, Any]) -> tuple[Any, Any]:
    model: Any = SamModel.from_pretrained(folder)
    processor: Any = SamProcessor.from_pretrained(folder)
    inputs = processor(images=Image.fromarray(picture), return_tensors="pt", **prompts)
    sizes = inputs["original_sizes"], inputs["reshaped_input_sizes"]
    names = ("pixel_values", "input_points", "input_labels", "input_boxes")
    with torch.no_grad():
        answer = model.eval()(**{name: inputs[name] for name in names if name in inputs})
    return answer, processor.post_process_masks(answer.pred_masks, *sizes)[0][0]


def _said_2(folder: Path, picture: Any, prompts: dict[str, Any]) -> tuple[Any, Any]:
    """Clicks by transformers' processor; the picture, for which it needs torchvision, by hand."""
    model: Any = Sam2Model.from_pretrained(folder)
    processor = Sam2Processor(ViTImageProcessorPil(size={"height": 64, "width": 64}))
    inputs = processor(original_sizes=[picture.shape[:2]], return_tensors="pt", **prompts)
    del inputs["original_sizes"]
    resized = Image.fromarray(picture).resize((64, 64), Image.Resampling.BILINEAR)
    normal = (np.asarray(resized) / 255 - IMAGENET_DEFAULT_MEAN) / IMAGENET_DEFAULT_STD
    pixels = torch.from_numpy(normal.transpose(2, 0, 1)[None]).float()
    with torch.no_grad():
        answer = model.eval()(pixel_values=pixels, **inputs)
    size = picture.shape[:2]
    return answer, torch.nn.functional.interpolate(answer.pred_masks[0], size, mode="bilinear")[0]


@pytest.mark.parametrize(
    ("points", "box"),
    [
        (((10.0, 12.0, 1),), ()),
        (((70.0, 40.0, 1), (3.0, 3.0, 0), (20.0, 30.0, 1)), ()),
        ((), (4.0, 6.0, 50.0, 40.0)),
        (((10.0, 12.0, 1),), (4.0, 6.0, 50.0, 40.0)),
    ],
)
def test_it_is_the_model_s_best_mask(folder: Path, points: Any, box: Any) -> None:
    picture = scene(*SIZE)
    mask, score = expected(folder, picture, points, box)
    if not mask.any():
        pytest.skip("these weights see nothing there")
    inputs = {"picture": encode(picture)}
    asked_node = NodeRequest("segment", inputs, {"points": points, "box": box})
    [output] = nodes_of(folder).run([asked_node])
    assert isinstance(output, dict)
    assert np.array_equal(output["mask"] == 255, mask)
    assert output["verdict"].score == pytest.approx(score, abs=1e-4)


def test_boxes_are_the_masks_of_each_and_take_the_memory_of_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks of GroundingDINO's boxes were scaled to the picture's size at once, and three of a
    click: 48 MB each at 12 megapixels.
    """
    picture, nodes = scene(*SIZE), nodes_of(folder)
    rng, largest = fresh_rng(), 0
    corners = rng.integers(0, 20, (37, 2))
    boxes = np.hstack([corners, corners + rng.integers(8, 28, (37, 2))]).tolist()
    masks = [nodes.in_boxes(picture, [box]) for box in boxes]
    whole = torch.nn.functional.interpolate

    def watched(tensor: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        nonlocal largest
        result = whole(tensor, *more, **named)
        if result.shape[-2:] == SIZE:
            largest = max(largest, result.numel())
        return result

    monkeypatch.setattr(torch.nn.functional, "interpolate", watched)
    differs = nodes.in_boxes(picture, boxes) != np.any(masks, axis=0)
    assert differs.mean() < 0.002  # last digits, of numbers near 0
    nodes.find_mask(picture, ((10.0, 12.0, 1),), ())
    assert largest == SIZE[0] * SIZE[1]


@pytest.mark.parametrize("size", [(1, 80), (3, 80), (80, 3), (1, 1)])
def test_a_picture_of_any_shape_is_seen_as_it_is(folder: Path, size: tuple[int, int]) -> None:
    """Three rows of pixels were taken for three channels."""
    nodes, picture, click = nodes_of(folder), scene(*size), ((0.0, 0.0, 1),)
    mask, score = nodes.find_mask(picture, click, ())
    right, its_score = expected(folder, picture, click, ())
    assert np.array_equal(mask, right)
    assert score == pytest.approx(its_score, abs=1e-4)


@pytest.mark.parametrize("folder", ["sam"], indirect=True)
def test_a_picture_too_thin_to_be_seen_is_refused(folder: Path) -> None:
    """One that had no width any more ended a call with an error of the server's."""
    nodes = nodes_of(folder)
    with pytest.raises(InvalidRequest, match="picture: is 3000x2 pixels; accepted: sides of"):
        nodes.find_mask(scene(2, 3000), ((0.0, 0.0, 1),), ())
    mask, _ = nodes.find_mask(scene(2, 256), ((0.0, 0.0, 1),), ())
    assert mask.shape == (2, 256)


@pytest.mark.parametrize(
    ("points", "box", "message"),
    [
        (((80.0, 3.0, 1),), (), r"points\[0\]: is 80, 3; accepted: within 80x48 pixels"),
        (((3.0, 3.0, 1), (2.0, -1.0, 0)), (), r"points\[1\]"),
        ((), (10.0, 10.0, 10.0, 20.0), "box: is"),
        ((), (10.0, 10.0, 90.0, 20.0), "box: is"),
    ],
)
def test_what_lies_outside_is_refused(points: Any, box: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_clicks(points, box, SIZE[1], SIZE[0])
