"""ComfyUI's nodes outside of ComfyUI: LoRAs chosen as files."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from maskserve_benchmarks.checkout import CHECKOUT
from tests.support.node_pack import load_node_pack

FILES = ["Ghibli.v2.safetensors", "styles\\line-art.safetensors", "flux/faces/a.safetensors"]
NAMES = ["Ghibli.v2", "styles--line-art", "flux--faces--a"]


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The nodes beside stand-ins for the parts of ComfyUI that they import."""
    parts: dict[str, dict[str, Any]] = {
        "comfy.model_management": {"throw_exception_if_processing_interrupted": None},
        "comfy.utils": {"ProgressBar": None},
        "folder_paths": {"get_filename_list": {"loras": FILES}.__getitem__},
    }
    monkeypatch.setitem(sys.modules, "comfy", ModuleType("comfy"))
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return load_node_pack(CHECKOUT / "clients" / "comfyui")


def test_files_become_the_loras_of_an_edit(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = pack.MaskserveLora()
    assert node.INPUT_TYPES()["required"]["file"] == (FILES,)
    loras: Any = ()
    for number, file in enumerate(FILES):
        (loras,) = node.chosen(file, 0.5 * number, loras)
    assert loras == tuple({"name": name, "scale": 0.5 * n} for n, name in enumerate(NAMES))
    calls = list[dict[str, Any]]()
    monkeypatch.setattr(pack, "_made", lambda *arguments: calls.append(arguments[-1]))
    picture, settings = torch.zeros(1, 8, 8, 3), '{"loras": [{"name": "own"}], "seed": 2}'
    pack.MaskserveEdit().edit(picture, "a star", 1, "", settings=settings, loras=loras)
    pack.MaskserveEdit().edit(picture, "a star", 1, "", picture[..., 0], loras=loras)
    pack.MaskserveGenerate().generate("a star", "auto", 1, 1, "")
    assert calls[0] == {"seed": 2, "loras": [{"name": "own"}, *loras]}
    assert calls[1]["loras"] == list(loras)
    assert "loras" not in calls[2]
