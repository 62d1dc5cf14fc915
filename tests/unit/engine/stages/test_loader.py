"""Models that do not load."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from maskserve_common.config import ConfigError
from maskserve_engine.families.registry import load_adapter
from tests.fakes.jobs import config_of


def test_weights_that_end_too_early_are_one_sentence(tiny_fill: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_fill, broken)
    [weights] = (broken / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    pattern = rf"\[model\] path: cannot load {re.escape(str(broken / 'transformer'))}: \S[^\n]*\Z"
    with pytest.raises(ConfigError, match=pattern):
        load_adapter(config_of(broken))
