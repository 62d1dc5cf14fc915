"""GroundingDINO's boxes, and SAM's masks in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.config_file import config_of
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import encode_png
from maskserve_workflows.node_files import open_model
from maskserve_workflows.node_folders import node_folders
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.pictures import read_mask
from tests.fakes.tiny_nodes import build_grounded
from tests.support.draws import fresh_rng
from tests.support.workflows import run_one


def test_what_is_found_is_what_sam_says_of_the_boxes(tmp_path: Path) -> None:
    build_grounded(tmp_path / "dino", tmp_path / "sam")
    folders = {"find": str(tmp_path / "dino"), "segment": str(tmp_path / "sam")}
    config = config_of({"nodes": folders, "model": {"device": "cpu"}})
    needed = {
        name: [(requirement.name, requirement.model.class_name) for requirement in of]
        for name, of in node_folders(config.nodes).items()
    }
    dino, sam = ("find", "GroundedNodes"), ("segment", "SegmentNodes")
    assert needed == {"find": [dino, sam], "segment": [sam]}
    loaded: dict[str, Any] = {}
    [[finder, cut], _] = node_folders(config.nodes).values()
    nodes = open_model(finder.model, ModelSetup(folders["find"], config, loaded))
    loaded["segment"] = open_model(cut.model, ModelSetup(folders["segment"], config))
    pixels = fresh_rng().integers(0, 256, (40, 52, 3), dtype=np.uint8)
    inputs = {"picture": encode_png(pixels), "name": "A red star"}
    masks = [
        read_mask(run_one(nodes, "find", inputs, {"threshold": threshold})["mask"], config.limits)
        for threshold in (0.0, 0.02)
    ]
    assert [mask.shape for mask in masks] == [(40, 52)] * 2
    assert (masks[0] >= masks[1]).all()  # more boxes, more of the picture
    assert masks[0].any()
    with pytest.raises(InvalidRequest, match="'A red star' is not found in the picture"):
        run_one(nodes, "find", inputs, {"threshold": 1.0})
