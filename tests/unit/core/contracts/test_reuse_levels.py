"""Levels of `reuse: elastic`: those of the committed tables, and which an edit may take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskserve_core.contracts.reuse_levels import LEVELS, levels_of
from maskserve_core.contracts.settings import EditSettings
from maskserve_core.models.facts import ModelFacts
from tests.fakes.facts import FILL_FACTS

TABLES = Path(__file__).parents[4] / "docs" / "benchmarks"


@pytest.mark.parametrize(("semantics", "cached"), LEVELS)
def test_levels_are_what_was_measured(semantics: str, cached: bool) -> None:
    table = json.loads((TABLES / f"quality-frontier-{semantics}.json").read_text(encoding="utf-8"))
    systems, before = table["systems"], (100.0, 1.0)
    whole = systems[table["default"]]["flux_flop_speedup"] if cached else 1.0
    for level in LEVELS[semantics, cached]:
        measured = systems[level.name]
        assert level.psnr == round(measured["psnr_in_mask"], 2)
        assert level.work == pytest.approx(whole / measured["flux_flop_speedup"], abs=2e-3)
        assert float(level.name.rpartition("skip")[2].rpartition("-")[2]) == (
            level.first_block_threshold
        )
        assert (level.psnr, level.work) < before  # each saves more, and costs more
        before = level.psnr, level.work


def facts(semantics: str) -> ModelFacts:
    return replace(FILL_FACTS, semantics=semantics)


def names(semantics: str = "fill", *, cached: bool = True, **asked: Any) -> list[str]:
    settings = EditSettings(**{"reuse": "elastic", "reuse_floor": 0.0, **asked})
    return [level.name for level in levels_of(settings, facts(semantics), cached=cached)]


def test_an_edit_may_take_what_holds_its_floor() -> None:
    first, second = names()
    assert names(reuse_floor=35.0) == [first]
    assert names(reuse_floor=40.0) == []
    assert names(reuse="exact", reuse_floor=None) == []
    assert names(first_block_threshold=0.1) == [second]
    assert names(cached=False) != names() != names("inpaint")
    settings = EditSettings(reuse="elastic", reuse_floor=0.0)
    none = replace(facts("fill"), skips_steps=False)
    assert levels_of(settings, none, cached=True) == ()
