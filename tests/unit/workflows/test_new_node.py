"""The new node of docs/workflows.md, from its file to the answer of a workflow."""

from __future__ import annotations

import json
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
from tests.support.eventually import eventually
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


WEIGHED = """
import torch

from maskserve_workflows.node_request import one_by_one
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.ports import Picture, Words


class Layers(torch.nn.Module):
    def forward(self, x):
        return x * self.scale


@node(model="scale", price_s=0.1)
def scale(text: Words) -> Words: ...


@node_model("scale", source="scale", kinds=("scale",), needs=("unit",))
class Scale(Layers):
    def __init__(self, setup):
        super().__init__()
        self.scale = torch.load(f"{setup.source}/scale.pt")
        self.loaded = setup.loaded

    def run(self, calls):
        return one_by_one(self.scaled, calls)

    def scaled(self, call):
        unit = self.loaded["unit"].name
        return {"text": f"{float(self(torch.tensor(float(call.inputs['text'])))):g} {unit}"}


@node_model("unit", source="unit", kinds=("unit",))
class Unit:
    def __init__(self, setup):
        self.name = setup.source.rpartition("/")[2]


@node(model="place", price_s=0.1)
def place(text: Words) -> Words: ...


@node_model("place", source="place")
class Place:
    def __init__(self, setup):
        self.source = setup.source

    def run(self, calls):
        return [{"text": self.source} for call in calls]
"""


def test_a_node_may_have_weights_another_model_or_a_url(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "scale.py").write_text(WEIGHED)
    (tmp_path / "wrong.py").write_text(
        WEIGHED.replace("import torch", "import torch, nowhere")
        .replace("place", "home").replace("scale", "size").replace("unit", "metre")
    )  # fmt: skip
    folders = ("scale", "unit", "size", "metre")
    for name in folders:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        torch.save(torch.tensor(2.5), tmp_path / name / f"{name}.pt")
    nodes: dict[str, Any] = {name: str(tmp_path / name) for name in folders}
    nodes |= {"place": "http://127.0.0.1:9/v1", "path": [str(tmp_path)], "load": "use"}
    results: dict[str, Any] = {}
    with node_path():
        models = NodeModels(config_of({"nodes": nodes}))
        for name in ("place", "scale", "size"):

            def done(result: Any, seconds: float, name: str = name) -> None:
                results[name] = result

            models.call(name, NodeRequest(name, {"text": "4"}, {}), done)
        eventually("all are answered", lambda: len(results) == 3)
        sizes = {model["name"]: model["bytes"] for model in models.record()["models"]}
        models.close()
    assert results["place"] == {"text": "http://127.0.0.1:9/v1"}
    assert results["scale"] == {"text": "10 unit"}
    assert str(results["size"]) == "[ENGINE_FAILED] nodes: model size: wrong.py cannot be imported"
    assert sizes["place"] == 0 < sizes["scale"]
