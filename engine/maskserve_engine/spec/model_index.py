"""The index of a model folder: the class of its pipeline and of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json

_PLAIN, _MODULAR = "model_index.json", "modular_model_index.json"


def read_model_index(folder: Path) -> dict[str, Any]:
    """Return a folder's model_index.json. The index of a modular pipeline, in a folder without one,
    is returned in the same form: where it says from where a part is loaded, the part is in the
    folder.

    Raises:
        ConfigError: the folder has neither, or it is unreadable.
    """
    if (folder / _PLAIN).is_file():
        return read_json(folder / _PLAIN)
    if not (folder / _MODULAR).is_file():
        raise ConfigError(f"[model] path: {folder} is not a model folder (no {_PLAIN})")
    return {
        name: value[-1].get("type_hint", value[:2])
        if isinstance(value, list) and isinstance(value[-1], dict)
        else value
        for name, value in read_json(folder / _MODULAR).items()
    }
