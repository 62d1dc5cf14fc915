"""Each model of the family table, loaded once a run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.family_cases import CASES, FamilyModel

_FOLDERS = {
    "flux-fill": ("tiny_flux", "fill"),
    "flux-base": ("tiny_flux", "inpaint"),
    "flux-kontext": ("tiny_flux", "reference"),
    "sd21-base": ("tiny_unets", "sd-base"),
    "sd21-fill": ("tiny_unets", "sd-fill"),
    "sdxl-base": ("tiny_unets", "sdxl-base"),
    "sdxl-fill": ("tiny_unets", "sdxl-fill"),
}
"""Models whose folder is that of a fixture."""


@pytest.fixture(scope="session")
def family_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], FamilyModel]:
    """Return the model of a row of the table by the row's name."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        if name not in _FOLDERS:
            return root / name
        fixture, key = _FOLDERS[name]
        path: Path = request.getfixturevalue(fixture)[key]
        return path

    @cache
    def load(name: str) -> FamilyModel:
        model = FamilyModel(CASES[name], folder(name))
        gc.freeze()  # it lives to the end
        return model

    return load
