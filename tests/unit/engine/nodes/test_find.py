"""Names are found as transformers' own model finds them, and calls share what they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import CLIPSegForImageSegmentation, CLIPSegProcessor

from maskserve_common.config_file import config_of
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import encode_png
from maskserve_engine.nodes.find import FindNodes
from maskserve_workflows.node_request import ModelSetup, NodeRequest
from maskserve_workflows.pictures import encode_mask, read_mask
from tests.fakes.tiny_nodes import build_find
from tests.support.draws import fresh_rng


def test_calls_of_one_picture_see_it_once_and_answer_as_the_whole_model(tmp_path: Path) -> None:
    build_find(tmp_path)
    config = config_of({"nodes": {"find": str(tmp_path)}, "model": {"device": "cpu"}})
    nodes, rng = FindNodes(ModelSetup(str(tmp_path), config)), fresh_rng()
    pictures = [rng.integers(0, 256, (24, 40, 3), dtype=np.uint8) for _ in range(2)]
    names = ["a star", "a rather long name of a blue heart", "x"]
    model: Any = CLIPSegForImageSegmentation.from_pretrained(tmp_path).eval()
    processor: Any = CLIPSegProcessor.from_pretrained(tmp_path)
    encoded_pictures = []
    whole = nodes.features
    nodes.features = lambda pixels: encoded_pictures.append(pixels) or whole(pixels)  # type: ignore[method-assign]
    some = encode_mask(rng.random((24, 40)) > 0.5)
    calls, expected = [], []
    for pixels in pictures:
        for name in names:
            tensors = processor(text=[name], images=[pixels], return_tensors="pt", padding=True)
            with torch.inference_mode():
                logits = model(**tensors).logits.reshape(1, 1, 32, 32)
            sized = torch.sigmoid(
                torch.nn.functional.interpolate(logits, (24, 40), mode="bilinear")[0, 0]
            ).numpy()
            threshold = float(np.median(sized))
            expected.append(sized > threshold)
            inputs = {"picture": encode_png(pixels), "name": name}
            settings = {"threshold": threshold, "enough": 0.0}
            calls.append(NodeRequest("find", inputs, settings))
            calls.append(NodeRequest("shows", {**inputs, "mask": some}, settings))
    bad = NodeRequest("find", {"picture": b"no", "name": "a"}, {"threshold": 0.5})
    *answers, refused = nodes.run([*calls, bad])
    assert isinstance(refused, InvalidRequest)
    assert len(encoded_pictures) == 2
    mask = read_mask(some, config.limits)
    for find_answer, verdict, right in zip(answers[::2], answers[1::2], expected, strict=True):
        assert ((find_answer["mask"] == 255) == right).mean() > 0.99  # type: ignore[index]
        assert abs(verdict["verdict"].score - right[mask].mean()) < 0.01  # type: ignore[index]


def test_three_rows_of_pixels_are_no_channels(tmp_path: Path) -> None:
    build_find(tmp_path)
    config = config_of({"nodes": {"find": str(tmp_path)}, "model": {"device": "cpu"}})
    pixels = fresh_rng().integers(0, 256, (3, 40, 3), dtype=np.uint8)
    nodes = FindNodes(ModelSetup(str(tmp_path), config))
    processor: Any = CLIPSegProcessor.from_pretrained(tmp_path)
    inputs: list[Any] = []
    nodes._model.clip.vision_model.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    nodes.features(pixels)
    right = processor.image_processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    assert torch.equal(inputs[0], right["pixel_values"])
