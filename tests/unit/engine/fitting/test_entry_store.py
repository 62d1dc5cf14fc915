"""The tiers that a configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from maskserve_common.config import ConfigError
from maskserve_common.config_file import config_of
from maskserve_common.line_fit import Line
from maskserve_engine.cache.entry_file import OpenFile
from maskserve_engine.cache.loader import HostMover
from maskserve_engine.cache.sizing import TemplateSize
from maskserve_engine.fitting.entry_store import open_store
from maskserve_engine.planning.cost_model import CostModel
from tests.fakes.entries import ANCHORS, NOTE, random_entry


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_folder_that_cannot_be_written_to_is_told_by_its_key(tmp_path: Path, tier: str) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "entries")
    config = config_of({"model": {"path": "", "device": "cpu"}, "cache": {f"{tier}_dir": folder}})
    costs = CostModel("x", Line(0.0, 0.0), {})
    with pytest.raises(ConfigError, match=rf"\[cache\] {tier}_dir: .+ cannot be used: Not a dir"):
        open_store(config, TemplateSize(64, 1, 1), costs, 2**20, HostMover())


def test_files_of_the_host_tier_alone_are_registered(tmp_path: Path) -> None:
    class Registering(HostMover):
        files: list[int]

        def register(self, file: OpenFile) -> None:
            self.files.append(file.nbytes)

    mover = Registering()
    mover.files = []
    names = ("host", "disk")
    folders = {f"{name}_dir": str(tmp_path / name) for name in names}
    config = config_of({"model": {"path": "", "device": "cpu"}, "cache": folders})
    costs = CostModel("x", Line(0.0, 0.0), {name: Line(0.0, 1e-9) for name in names})
    store = open_store(config, TemplateSize(64, 1, 1), costs, 2**20, mover)
    opened = []
    for tier in store.lower.folders:
        assert tier.put("k", random_entry(0), NOTE)
        entry = tier.open("k", ANCHORS[0])
        assert entry is not None
        opened.append(entry.nbytes)
    assert mover.files == opened[:1]
    store.close()
