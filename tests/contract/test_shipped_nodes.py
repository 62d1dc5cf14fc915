"""The models of nodes that are shipped find what they are asked for."""

from __future__ import annotations

import numpy as np

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.config import Config
from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_png
from maskserve_studies.demo_model.named_scenes import held_out_clicks, held_out_scenes, iou
from maskserve_studies.demo_model.node_judges import enlarge_db
from maskserve_workflows.node_files import open_model
from maskserve_workflows.node_folders import node_folders
from maskserve_workflows.node_request import ModelSetup, Nodes
from maskserve_workflows.pictures import read_mask
from tests.support.workflows import run_one

FIND = CHECKOUT / "assets" / "nodes" / "find"
SEGMENT = FIND.with_name("segment")
ENLARGE = FIND.with_name("enlarge")


def opened(name: str, config: Config) -> Nodes:
    folder, *_ = node_folders(config.nodes)[name]
    return open_model(folder.model, ModelSetup(config.nodes.source(name), config))


def test_find_masks_what_is_named_in_scenes_that_it_never_saw() -> None:
    """`scripts/bench train_find --judge 200` judges it whole."""
    assert sum(file.stat().st_size for file in FIND.iterdir()) <= 4 * 2**20
    config = config_of({"nodes": {"find": str(FIND)}, "model": {"device": "cpu"}})
    nodes, scores, full_mask_scores = opened("find", config), [], []
    for scene, thing in held_out_scenes(16, (128, 128)):
        inputs = {"picture": encode_png(scene.picture), "name": f"a {thing.colour} {thing.shape}"}
        settings = {"threshold": 0.5, "enough": 0.2}
        right = scene.mask(thing.colour, thing.shape)
        mask = run_one(nodes, "find", inputs, settings)["mask"]
        scores.append(iou(read_mask(mask, config.limits), right))
        full_mask_scores.append(iou(np.ones_like(right), right))
    assert np.mean(scores) >= 0.7
    assert np.mean(full_mask_scores) < 0.2  # who masks everything


def test_segment_masks_what_is_clicked_on_in_scenes_that_it_never_saw() -> None:
    """`scripts/bench train_segment --judge 200` judges it whole."""
    assert sum(file.stat().st_size for file in SEGMENT.iterdir()) <= 6 * 2**20
    config = config_of({"nodes": {"segment": str(SEGMENT)}, "model": {"device": "cpu"}})
    nodes, clicked, elsewhere = opened("segment", config), [], []
    for scene, thing, (x, y) in held_out_clicks(16, (128, 128)):
        inputs = {"picture": encode_png(scene.picture)}
        for scores, click in ((clicked, (x, y)), (elsewhere, (127 - x, 127 - y))):
            answer = run_one(nodes, "segment", inputs, {"points": [[*click, 1]], "box": ()})
            scores.append(iou(read_mask(answer["mask"], config.limits), thing.covers))
    assert np.mean(clicked) >= 0.75
    assert np.mean(elsewhere) < 0.3  # what is clicked on matters


def test_enlarge_doubles_a_photograph_that_it_never_saw_better_than_a_filter() -> None:
    assert sum(file.stat().st_size for file in ENLARGE.iterdir()) <= 4 * 2**20
    model_db, lanczos = enlarge_db(ENLARGE)
    assert model_db >= lanczos + 0.5
