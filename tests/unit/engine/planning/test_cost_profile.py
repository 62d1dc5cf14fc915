"""A worker starts with the profile of its measured steps: written, read, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maskserve_common.config import ConfigError
from maskserve_common.line_fit import Line
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.cost_profile import CostProfile, read_profile
from maskserve_engine.planning.degree_costs import ExchangeCosts

PROFILE = CostProfile(
    CostModel("cpu", Line(0.01, 2e-12, 0.99, 12), {"host": Line(1e-5, 1e-10)}),
    ExchangeCosts(1e9, 1e-4, 4),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(PROFILE.text(), encoding="utf-8")
    assert read_profile(str(file)) == PROFILE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "cannot be read: No such file"),
        ("no JSON", "is nothing that scripts/bench profile_costs has written"),
        ([], "is nothing that"),
        ({"costs": 1}, "is nothing that"),
        ({"exchange": {"bytes_per_second": -1.0}}, "no such exchange"),
        ({"exchange": {"other": 1.0}}, "is nothing that"),
    ],
)
def test_what_is_no_profile_is_refused_in_a_sentence(
    tmp_path: Path, change: Any, message: str
) -> None:
    file = tmp_path / "costs.json"
    if isinstance(change, str):
        file.write_text(change, encoding="utf-8")
    elif change is not None:
        whole = {**json.loads(PROFILE.text()), **change} if change else change
        file.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^\[engine\] costs: .*" + message) as raised:
        read_profile(str(file))
    assert "\n" not in str(raised.value)
