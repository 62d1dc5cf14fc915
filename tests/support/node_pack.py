"""A node pack, loaded as ComfyUI loads a folder of `custom_nodes`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_node_pack(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location(str(folder), folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    return pack
