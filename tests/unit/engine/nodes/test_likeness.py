"""Likeness is the cosine of CLIP's embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import CLIPModel, CLIPProcessor

from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_png
from maskserve_engine.nodes.likeness import LikenessNodes
from maskserve_workflows.node_request import ModelSetup
from tests.fakes.tiny_nodes import build_likeness
from tests.support.draws import fresh_rng
from tests.support.workflows import run_one


def test_a_picture_is_like_a_text_by_the_cosine_of_both(tmp_path: Path) -> None:
    build_likeness(tmp_path)
    nodes = LikenessNodes(ModelSetup(str(tmp_path), config_of({})))
    model, processor = (
        CLIPModel.from_pretrained(tmp_path).eval(),
        CLIPProcessor.from_pretrained(tmp_path),
    )
    pixels = fresh_rng().integers(0, 256, (40, 50, 3), dtype=np.uint8)
    cosines = []
    for text in ("a red star", "a blue heart", "x", "a very long text " * 40):
        inputs = {"picture": encode_png(pixels), "text": text}
        verdict = run_one(nodes, "resembles", inputs, {"enough": 0.0})["verdict"]
        assert verdict.passed
        refused = run_one(nodes, "resembles", inputs, {"enough": 1.0})["verdict"]
        assert not refused.passed
        tensors = processor(text=[text], images=[pixels], return_tensors="pt", truncation=True)
        with torch.inference_mode():
            outputs = model(**tensors)
        cosines.append(float(torch.cosine_similarity(outputs.image_embeds, outputs.text_embeds)))
        assert abs(verdict.score - max(cosines[-1], 0)) < 1e-3
    assert len(set(cosines)) == 4
