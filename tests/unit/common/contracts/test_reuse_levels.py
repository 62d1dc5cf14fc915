"""Levels of `reuse: elastic`: those of the committed tables, and which an edit may take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from maskserve_common.contracts.request import model_steps
from maskserve_common.contracts.reuse_levels import (
    LEVELS,
    Execution,
    RefreshStrides,
    levels_of,
    refresh_count,
)
from maskserve_common.contracts.semantics import FILL, INPAINT, Semantics
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.families.flux.spec import REFRESH_STRIDES
from maskserve_engine.spec.model_spec import ModelSpec
from tests.fakes.model_specs import FILL_SPEC

TABLES = Path(__file__).parents[4] / "docs" / "benchmarks"


@pytest.mark.parametrize(
    ("semantics", "way"), [level_key for level_key in LEVELS if level_key[1] != "own"]
)
def test_levels_are_what_was_measured(semantics: Semantics, way: Execution) -> None:
    table = json.loads((TABLES / f"quality-frontier-{semantics}.json").read_text(encoding="utf-8"))
    systems, psnr = table["systems"], 100.0
    cached = way == "cached"
    whole = systems[table["default"]]["flux_flop_speedup"] if cached else 1.0
    for level in LEVELS[semantics, way]:
        measured = systems[level.name]
        assert level.psnr == round(measured["psnr_in_mask"], 2)
        assert level.work == pytest.approx(whole / measured["flux_flop_speedup"], abs=2e-3)
        assert int(level.name.rpartition("interval")[2]) == level.step_interval
        assert level.ring is None or f"-ring{level.ring}-" in level.name
        assert level.psnr < psnr
        psnr = level.psnr
    for keeps_ring in (False, True):  # each saves more, and costs more
        work = [
            level.work for level in LEVELS[semantics, way] if keeps_ring == (level.ring is None)
        ]
        assert work == sorted(set(work), reverse=True)


@pytest.mark.parametrize("semantics", [FILL, INPAINT])
def test_levels_of_refresh_steps_are_what_was_measured(semantics: Semantics) -> None:
    table = json.loads((TABLES / f"quality-own-{semantics}.json").read_text(encoding="utf-8"))
    choices = {choice["choice"]: choice for choice in table["choices"]}
    refresh_steps, previous = (
        refresh_count(table["steps"], REFRESH_STRIDES[semantics]),
        (100.0, 1.0),
    )
    [as_served] = [choice for choice in table["choices"] if choice["dense_steps"] == refresh_steps]
    for level in LEVELS[semantics, "own"]:
        measured = choices[level.name]
        assert level.refresh_steps == measured["dense_steps"] < as_served["dense_steps"]
        assert level.psnr == round(measured["psnr_in_mask"], 2)
        saved = as_served["flux_flop_speedup"] / measured["flux_flop_speedup"]
        assert level.work == pytest.approx(saved, abs=2e-3)
        assert level.psnr < previous[0]
        assert level.work < previous[1]
        previous = level.psnr, level.work


def test_an_edit_may_have_fewer_refresh_steps_than_its_schedule() -> None:
    for anchors, expected in ((3, 2), (2, 1), (1, 0)):
        assert len(names(way="own", own_steps=anchors)) == expected


def under(points: list[tuple[float, float]], psnr: float, work: float) -> bool:
    """Whether two of the points, or one, are a mix that is as near at less work."""
    mixes = [w for p, w in points if p >= psnr]
    for p, w in points:
        for q, v in points:
            if p > psnr >= q:
                mixes.append(v + (w - v) * (psnr - q) / (p - q))
    return min(mixes, default=2.0) < work


def test_no_other_ring_and_no_thinned_context_saves_more_per_db() -> None:
    """Only systems that read the same entries count; the lowest level is the end of the table."""
    table = json.loads((TABLES / "quality-frontier-fill.json").read_text(encoding="utf-8"))
    systems, levels = table["systems"], LEVELS[FILL, "cached"]
    whole = systems[table["default"]]["flux_flop_speedup"]
    entries = table["default"].rpartition("-")[0]
    points = [(level.psnr, level.work) for level in levels]
    other_systems = {
        name: (figures["psnr_in_mask"], whole / figures["flux_flop_speedup"])
        for name, figures in systems.items()
        if name.startswith(f"{entries}-") and name not in {level.name for level in levels}
    }
    assert len([name for name in other_systems if "interval" in name]) >= 10
    assert any("thin4-interval" in name for name in other_systems)
    for name, (psnr, work) in other_systems.items():
        if levels[-1].psnr <= psnr <= levels[0].psnr:
            assert under(points, psnr, work), name
    without = [point for point, level in zip(points, levels, strict=True) if level.ring is None]
    assert any(not under(without, *point) for point in points)  # rings are worth it


def spec_of(semantics: Semantics) -> ModelSpec:
    return replace(FILL_SPEC, semantics=semantics)


def names(
    semantics: Semantics = FILL, *, way: Execution = "cached", own_steps: int = 0, **options: Any
) -> list[str]:
    settings = {"reuse": "elastic", "reuse_floor": 0.0, "mask_ring": 1, **options}
    edit_settings = msgspec.convert(settings, EditSettings)
    measured = spec_of(semantics).measured_levels
    return [level.name for level in levels_of(edit_settings, measured, way, 12, own_steps)]


def test_an_edit_may_take_what_holds_its_floor() -> None:
    all_names = [level.name for level in LEVELS[FILL, "cached"]]
    assert names() == all_names
    assert names(reuse_floor=41.5) == all_names[:3]
    assert names(reuse_floor=45.0) == []
    assert names(reuse="exact", reuse_floor=None) == []
    assert names(step_interval=2) == [name for name in all_names if name.endswith("interval4")]
    assert names(step_interval=3) == []  # no level's steps are all among its own
    assert names(way="dense") != names() != names(INPAINT)
    settings = EditSettings(reuse="elastic", reuse_floor=0.0)
    none = replace(spec_of(FILL), elastic=False)
    assert levels_of(settings, none.measured_levels, "cached", 12) == ()


def test_a_levels_work_is_that_of_the_edits_own_steps() -> None:
    """Work by the steps in which the model runs: of 4 steps an interval of 2 saves one."""
    settings = EditSettings(reuse="elastic", mask_ring=1)
    for steps, interval in ((4, 1), (12, 1), (28, 1), (28, 2)):
        edit_settings = msgspec.structs.replace(settings, step_interval=interval)
        levels = levels_of(edit_settings, FILL_SPEC.measured_levels, "dense", steps)
        assert levels
        for level in levels:
            runs = [len(model_steps(steps, n)) for n in (level.step_interval, interval)]
            assert level.work == pytest.approx(runs[0] / runs[1], rel=2e-3)
    assert levels_of(settings, FILL_SPEC.measured_levels, "dense", 2) == ()  # it saves nothing


@pytest.mark.parametrize("options", [{"mask_ring": 2}, {"loras": [{"name": "any"}]}])
def test_an_edit_with_a_ring_of_its_own_or_adapters_keeps_its_ring(options: dict[str, Any]) -> None:
    assert names(**options) == [
        level.name for level in LEVELS[FILL, "cached"] if level.ring is None
    ]


def test_an_edit_with_controlnets_keeps_its_steps() -> None:
    assert names(controls=[{"name": "any"}]) == []
    assert len(names(way="own", own_steps=3, controls=[{"name": "any"}])) == 2


def test_only_an_edit_that_computes_all_tokens_keeps_100_db() -> None:
    strides = RefreshStrides(0.35, 0.35, by_error=True, least_steps=0)
    counts = [strides.count_of(EditSettings(reuse_floor=floor), 20) for floor in (99.0, 100.0)]
    assert counts == [3, 0]
