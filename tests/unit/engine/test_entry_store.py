"""The tiers that a configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_core.config import ConfigError
from maskserve_core.config_file import config_of
from maskserve_core.planning.cost_model import CostModel, Line
from maskserve_engine.cache.sizing import TemplateSize
from maskserve_engine.entry_store import open_store


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_folder_that_cannot_be_written_to_is_told_by_its_key(tmp_path: Path, tier: str) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "entries")
    config = config_of({"model": {"path": "", "device": "cpu"}, "cache": {f"{tier}_dir": folder}})
    costs = CostModel("x", Line(0.0, 0.0), {})
    with pytest.raises(ConfigError, match=rf"\[cache\] {tier}_dir: .+ cannot be used: Not a dir"):
        open_store(config, TemplateSize(64, 1, 1), costs, 2**20)
