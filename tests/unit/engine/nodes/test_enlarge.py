"""A node server bounds the work of its models before it runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.soak.pictures import png_file
from maskserve_common.config_file import config_of
from maskserve_common.errors import InvalidRequest
from maskserve_common.imaging.images import encode_png
from maskserve_engine.nodes.enlarge import EnlargeNodes
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.pictures import read_picture
from tests.fakes.tiny_nodes import build_enlarge
from tests.support.workflows import run_one


def test_a_picture_is_enlarged_as_far_as_memory_bears(tmp_path: Path) -> None:
    """One of 49 megapixels, 155 KiB, took a node server all the memory there was."""
    build_enlarge(tmp_path)
    config = config_of({"nodes": {"enlarge": str(tmp_path)}, "model": {"device": "cpu"}})
    nodes = EnlargeNodes(ModelSetup(str(tmp_path), config))

    def enlarged(picture: bytes) -> Any:
        return run_one(nodes, "enlarge", {"picture": picture}, {})["picture"]

    small = np.random.default_rng(1).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    assert read_picture(enlarged(encode_png(small)), config.limits).shape == (24, 40, 3)
    large = png_file(7000, 7000, 1, 0, (b"\0" + bytes(875)) * 7000)
    assert read_picture(large, config.limits).shape == (7000, 7000, 3)
    with pytest.raises(InvalidRequest, match=r"picture: .*2097152"):
        enlarged(large)
