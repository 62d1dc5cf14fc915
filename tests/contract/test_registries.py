"""Families, policies, tiers and what models take are objects in registries: adding one touches its
own module and the registry. Shown by adding a dummy of each, and by counting the files that name
one that is there.
"""

from __future__ import annotations

import ast
import json
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from msgspec import structs

from maskserve_common.config import Config, ConfigError, EngineConfig
from maskserve_common.contracts import tiers
from maskserve_common.contracts.pricing import Pricing
from maskserve_common.contracts.reuse_levels import levels_of
from maskserve_common.contracts.semantics import Semantics
from maskserve_common.contracts.settings import EditSettings
from maskserve_engine.families import specs as registry
from maskserve_engine.families.registry import FAMILIES as LOADERS
from maskserve_engine.families.registry import FamilyLoaders, load_adapter
from maskserve_engine.gangs.checks import check_devices
from maskserve_engine.planning.cost_model import H100, estimate
from maskserve_engine.scheduling import policies
from maskserve_engine.scheduling.step_scheduler import StepScheduler, Ticket
from maskserve_triton.preprocess import mask_for_model
from tests.fakes.jobs import config_of
from tests.fakes.model_specs import FILL_SPEC

REPO = Path(__file__).parents[2]
PRODUCT = ("engine", "router", "client", "serving")
NAMED = {
    # A family's modules, and both registries.
    "flux": {
        "engine/maskserve_engine/families/flux/spec.py",
        "engine/maskserve_engine/families/specs.py",
        "engine/maskserve_engine/families/registry.py",
    },
    # A policy's entry, and what people may write.
    "rounds": {
        "engine/maskserve_engine/scheduling/policies.py",
        "engine/maskserve_common/config.py",
    },
    "sampled reference": {"engine/maskserve_common/contracts/semantics.py"},
    "remote": {"engine/maskserve_common/contracts/tiers.py"},
    "AutoencoderKLQwenImage": {"engine/maskserve_engine/spec/latents.py"},
}
"""The files of the product with a string that is just this name."""


@pytest.mark.parametrize("name", NAMED)
def test_a_name_stands_in_its_module_and_the_registry(name: str) -> None:
    file_paths = set()
    for package in PRODUCT:
        for path in (REPO / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if f'"{name}"' in text and any(
                isinstance(node, ast.Constant) and node.value == name
                for node in ast.walk(ast.parse(text))
            ):
                file_paths.add(str(path.relative_to(REPO)))
    assert file_paths == NAMED[name]
    guide = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for file in file_paths:
        stem = Path(file).relative_to("engine").as_posix()
        assert stem in guide or stem.replace("/flux/", "/NAME/") in guide, stem


def test_a_family_is_found_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = replace(FILL_SPEC, family="dummy")
    dummy: Any = types.SimpleNamespace(
        NAME="dummies",
        PIPELINES=("DummyPipeline",),
        SETTINGS=("cache.stride",),
        read=lambda folder, pipeline, native: spec,
        recorded_rows=lambda spec, config: int(config.engine.heartbeat_s > 1),
        count=lambda config, picture: types.SimpleNamespace(
            blocks=(), size=(picture.height, picture.width, picture.recorded)
        ),
    )
    monkeypatch.setitem(registry.FAMILIES, "dummy", dummy)
    monkeypatch.setitem(LOADERS, "dummy", lambda: FamilyLoaders(_unused, _adapter, _unused))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DummyPipeline"}))
    assert load_adapter(config_of(tmp_path)) == ("adapter", spec)
    work: Any = registry.counted_work(spec, 4, 6, recorded=True)
    assert work.size == (4, 6, True)
    assert not registry.recorded_rows(spec, Config())
    with pytest.raises(
        ConfigError, match=r'\[model\] t5_weights: a setting of .*FLUX models.*; use "'
    ):
        load_adapter(config_of(tmp_path, model={"t5_weights": "int8"}))
    other_config = structs.replace(Config(), cache=structs.replace(Config().cache, stride=3))
    registry.check_family(other_config, spec)
    with pytest.raises(ConfigError, match=r"\[cache\] stride: a setting of dummies; use 0"):
        registry.check_family(other_config, FILL_SPEC)


def _unused(spec: Any, config: Config) -> Any:
    raise AssertionError


def _adapter(spec: Any, config: Config) -> Any:
    return "adapter", spec


def test_a_policy_is_a_scheduler_with_its_attributes(
    monkeypatch: pytest.MonkeyPatch, tiny_fill: Path
) -> None:
    dummy = policies.DevicePolicy(
        lambda engine, *bounds: StepScheduler(*bounds),
        deals=True,
        problem=lambda devices, spec: f"[engine] policy: {devices} of {spec.family}",
    )
    monkeypatch.setitem(policies.POLICIES, "dummy", dummy)
    config = config_of(tiny_fill)
    engine = structs.replace(config.engine, policy="dummy", devices=4)
    assert policies.batches_of(engine) == 1
    assert policies.policy_of(engine).shares_steps
    scheduler = partial(policies.policy_of(engine).make, engine)(2, 3, 0.5)
    assert isinstance(scheduler, StepScheduler)
    with pytest.raises(ConfigError, match=r"\[engine\] policy: 4 of flux"):
        check_devices(structs.replace(config, engine=engine), 0)


@pytest.mark.parametrize("name", list(policies.POLICIES))
def test_static_batching_goes_with_policies_whose_batches_stay_together(
    name: str, tiny_unets: dict[str, Path]
) -> None:
    config = config_of(tiny_unets["sdxl-base"])
    engine = structs.replace(config.engine, policy=name, devices=2, batching="static")
    config = structs.replace(config, engine=engine)
    if policies.POLICIES[name].gangs:
        with pytest.raises(ConfigError, match=r'\[engine\] batching: .*accepted: "continuous"'):
            check_devices(config, 0)
        return
    check_devices(config, 0)
    scheduler = policies.POLICIES[name].make(engine, 2, 8, 0.5)
    for n in range(4):
        scheduler.submit(Ticket(f"t{n}", 4, 8, 2, 0.0))
    first = {ticket.request_id for ticket in scheduler.schedule(0.0).admitted}
    scheduler.submit(Ticket("late", 4, 8, 2, 0.0))
    scheduler.finish(first.pop())
    assert not scheduler.schedule(1.0).admitted


def test_the_configuration_names_the_policies() -> None:
    assert set(get_args(get_type_hints(EngineConfig)["policy"])) == set(policies.POLICIES)


@pytest.mark.parametrize("blends", [True, False])
def test_what_a_model_takes_is_asked_of_its_attributes(blends: bool) -> None:
    spec = replace(FILL_SPEC, semantics=Semantics("dummy", masked_picture=False, blends=blends))
    mask = np.zeros((64, 64), np.uint8)
    mask[5, 5] = 255
    grown = spec.vae_scale_factor**2 if blends else 1
    assert np.count_nonzero(mask_for_model(mask, spec)) == grown
    elastic = EditSettings(reuse="elastic", reuse_floor=0.0)
    assert levels_of(elastic, spec.measured_levels, "cached", 12) == ()  # nothing was measured


@pytest.mark.parametrize("near", [True, False])
def test_a_tier_has_its_rates_and_is_priced(near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tiers.CacheTier("shelf", "disk_bytes", read_by_steps=near, gbytes=2.0, wait=1e-3)
    monkeypatch.setitem(tiers.TIERS, "shelf", shelf)
    costs = estimate(H100)
    assert costs.load_seconds("shelf", 2e9) == pytest.approx(1.001)
    assert list(costs.loads) == ["device", "host", "disk", "remote", "shelf"]
    prices = Pricing(0.0, 1.0, 0.1, 0.0, 0.0, fetch={} if near else {"shelf": 1.0})
    assert prices.fetch_s("shelf") == (0.0 if near else 1.0)
    assert prices.fetch_s("disk") == float("inf")
