"""The new node of docs/workflows.md, from its file to the answer of a workflow."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from maskserve_client.cli import main
from maskserve_common.config_file import config_of
from maskserve_workflows.folder import read_plans
from maskserve_workflows.node_models import NodeModels
from maskserve_workflows.node_request import NodeRequest
from maskserve_workflows.nodes import NODE_TYPES
from maskserve_workflows.plan import NodeCall
from tests.fakes.pictures import encode, scene
from tests.support.workflows import interpret, new_node, node_path

DEFINITION = """
from maskserve_workflows.definition import Workflow
from maskserve_workflows.nodes import outline, sharpen

with Workflow("crisp") as crisp:
    image = crisp.picture("image")
    crisp.gives(image=sharpen(image, percent=200), lines=outline(sharpen(image)))
"""


def test_a_new_node_is_compiled_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, plans = new_node(tmp_path / "nodes"), tmp_path / "plans"
    plans.mkdir()
    (plans / "crisp.py").write_text(DEFINITION)
    with node_path():
        assert main(["workflows", "compile", str(plans)]) != 0
        assert "cannot import name 'sharpen'" in capsys.readouterr().err
    with node_path():
        for action in ("compile", "check", "explain"):
            assert main(["workflows", action, str(plans), "--node-path", str(nodes)]) == 0
        assert "sharpen(picture=inputs.image, percent=200) at sharpen" in capsys.readouterr().out
        [plan] = read_plans(plans)
        models = NodeModels(config_of({"nodes": {"path": [str(nodes)]}}))

        def run(key: str, call: NodeCall, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
            kind, ended, results = NODE_TYPES[call.node], threading.Event(), []
            table: Any = kind.settings(**call.settings)
            settings = {name: getattr(table, name) for name in kind.settings.__struct_fields__}

            def done(result: Any, seconds: float) -> None:
                results.append(result)
                ended.set()

            models.call(kind.model, NodeRequest(call.node, inputs, settings), done)
            assert ended.wait(10)
            [outputs] = results
            return {name: encode(pixels) for name, pixels in outputs.items()}

        pixels = scene(40, 24)
        outputs = interpret(plan, {"image": encode(pixels)}, run)
        models.close()
    sharpened = Image.fromarray(pixels).filter(ImageFilter.UnsharpMask(percent=200))
    assert outputs["image"] == encode(np.asarray(sharpened))
    assert outputs["lines"]
