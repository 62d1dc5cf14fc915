"""UNets: edits that compute a whole side compute all of the picture (docs/decisions/masks.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import structs

from maskserve_common.contracts.settings import ControlSetting, EditSettings, LoraSetting
from maskserve_common.contracts.status_record import Served
from maskserve_common.imaging.masks import active_tokens, cover_a_side
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.loop.engine import Engine
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from maskserve_engine.spec.model_spec import refresh_strides
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.keys import KeyRing
from maskserve_router.scheduling.edit_cost import EditCosts
from tests.fakes.jobs import config_of, encode_case, random_case, unet_case
from tests.fakes.pictures import encode
from tests.support.draws import fresh_rng
from tests.support.engines import edit, make_engine

ANYBODY = KeyRing((), 1).client({})
SIDE = (48, 40)
INNER = slice(4, 20)


@given(
    hnp.arrays(
        np.uint8, st.sampled_from([(32, 48), (8, 24), (8, 8)]), elements=st.sampled_from([0, 9, 9])
    ),
    st.integers(0, 2),
)
def test_a_side_is_covered_where_each_of_its_tokens_is(mask: np.ndarray, ring: int) -> None:
    rows, columns = mask.shape[0] // 8, mask.shape[1] // 8
    active = active_tokens(mask, 8, ring)
    grid = np.zeros((rows, columns), np.bool_)
    grid.ravel()[active] = True
    sides = [grid[0], grid[-1], grid[:, 0], grid[:, -1]]
    assert cover_a_side(active, rows, columns) == any(side.all() for side in sides)


def masks() -> dict[str, np.ndarray]:
    """By where they lie; only those named `side` cover one."""
    named = {}
    for name, place in {
        "side: top": (slice(0, 8), slice(None)),
        "side: left": (slice(None), slice(0, 8)),
        "side: right and more": (slice(None), slice(20, None)),
        "corner": (slice(0, 16), slice(0, 16)),
        "across the middle": (slice(20, 28), slice(None)),
        "most of the top": (slice(0, 8), slice(12, None)),
    }.items():
        named[name] = np.zeros(SIDE, np.uint8)
        named[name][place] = 255
    return named


@pytest.fixture(scope="module")
def encoder(tiny_unets: dict[str, Path]) -> Encoder:
    return load_encoder(config_of(tiny_unets["sd-base"]))


@pytest.fixture(scope="module")
def engine(tiny_unets: dict[str, Path], encoder: Encoder) -> Iterator[Engine]:
    engine = make_engine(tiny_unets["sd-base"], encoder, model={"mask_ring": 1})
    yield engine
    engine.close(10.0)


@pytest.mark.parametrize("name", masks())
def test_an_edit_of_a_whole_side_runs_dense_and_says_so_and_others_are_cached(
    engine: Engine, encoder: Encoder, name: str
) -> None:
    rng = fresh_rng()
    case = unet_case(rng, strength=1.0)
    pixels = rng.integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    case = replace(case, pixels=pixels, mask=masks()[name])
    edit_job = encode_case(encoder, case, name)

    def with_settings(request_id: str, **changes: Any) -> Any:
        settings = structs.replace(edit_job.request.settings, **changes)
        request = replace(edit_job.request, request_id=request_id, settings=settings)
        return edit(engine, replace(edit_job, request=request)).meta

    dense, ways = name.startswith("side"), ({"cache": "require"}, {}, {"reproducible": True})
    for number, settings in enumerate(ways):
        meta = with_settings(f"{name} {number}", **settings)
        assert meta["cache"] == ("off" if dense else "hit")
        assert meta.get("dense_for") == ("mask_side" if dense else None)
        assert set(meta["kinds"]) == {"dense" if dense else "kv"}
    assert "dense_for" not in with_settings("off", cache="off")


def test_flux_caches_them(tiny_fill: Path) -> None:
    config = config_of(tiny_fill)
    mask = np.zeros((32, 48), np.uint8)
    mask[:8] = 255
    case = random_case(fresh_rng(), strength=1.0)
    pixels = np.zeros((*mask.shape, 3), np.uint8)
    job = encode_case(load_encoder(config), replace(case, pixels=pixels, mask=mask), "e")
    assert not load_adapter(config).tokens(job).cover_a_side


@pytest.mark.parametrize("name", masks())
async def test_the_router_expects_the_same(name: str) -> None:
    turns = FairShare(1)
    costs = EditCosts(RouterConfig(), turns)
    mask, image = encode(masks()[name]), memoryview(b"")
    for sides in (True, False):
        served = Served(64, 8, 20, mask_ring=0, dense_sides=sides)
        measured, *_ = await costs.cost_of(
            ANYBODY, image, mask, EditSettings(), served, "m", prompted=False
        )
        assert measured.cache == (not (sides and name.startswith("side")))
    turns.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, (5, None)),
        ({"loras": (LoraSetting(name="a"),)}, (5, None)),
        ({"controls": (ControlSetting(name="n"),)}, (5, None)),
        ({"cache": "own"}, (5, True)),
        ({"reuse_floor": 40.0}, (3, True)),
        ({"reuse_floor": 40.0, "controls": (ControlSetting(name="n"),)}, (0, False)),
        ({"reuse_floor": 40.0, "reuse": "elastic"}, (5, None)),
        ({"cache": "require"}, (0, False)),
        ({"reproducible": True}, (0, False)),
    ],
)
async def test_the_router_knows_which_edits_have_anchors_of_their_own(
    settings: dict[str, Any], counts: tuple[int, bool | None], first: bool
) -> None:
    """And whether they have them although a template is at hand: where the model is so, or asked
    for.
    """
    turns = FairShare(1)
    strides = {"own_stride": 0.2, "promised_stride": 0.35}
    served = Served(64, 8, 20, own_over_template=first, **strides)
    mask = encode(masks()["corner"])
    measured, *_ = await EditCosts(RouterConfig(), turns).cost_of(
        ANYBODY, memoryview(b""), mask, EditSettings(**settings), served, "m", prompted=False
    )
    steps, over_template = counts
    assert measured.refresh_steps == steps
    assert measured.always_refreshes == (first if over_template is None else over_template)
    assert measured.cache == (steps > 0 or "reuse_floor" not in settings)
    turns.close()


@pytest.mark.parametrize("model", ["tiny_fill", "tiny_inpaint", "tiny_kontext"])
@pytest.mark.parametrize("cache", [{"fidelity": 0.0}, {"fidelity": 8.0}, {"own_anchors": 0.0}])
async def test_the_router_expects_the_plans_of_the_engine(
    model: str, cache: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """By how it runs: with refresh steps or dense, whatever it asks for."""
    folder = request.getfixturevalue(model)
    config = config_of(folder, cache=cache)
    adapter, turns = load_adapter(config), FairShare(1)
    strides = refresh_strides(config, adapter.spec)
    served = Served(
        *(64, 8, 20),
        own_stride=strides.plain,
        promised_stride=strides.promised,
        own_by_error=strides.by_error,
        error_steps=strides.least_steps,
    )
    job = encode_case(load_encoder(config), random_case(fresh_rng(), strength=1.0), "e")
    every = ({}, {"reuse_floor": 8.0}, {"cache": "own"}, {"cache": "off"}, {"step_interval": 3})
    for settings, steps in product(every, (20, 5)):
        changes = {"num_inference_steps": steps, **settings}
        edit_settings = structs.replace(job.request.settings, **changes)
        edit = replace(job, request=replace(job.request, settings=edit_settings))
        schedule = RefreshSchedules(config, adapter).of(edit)
        measured, *_ = await EditCosts(RouterConfig(), turns).cost_of(
            ANYBODY,
            memoryview(b""),
            encode(masks()["corner"]),
            edit_settings,
            served,
            "m",
            prompted=False,
        )
        assert measured.steps == adapter.steps(edit)
        assert (measured.refresh_steps > 0) == (schedule is not None)
        assert measured.cache == (schedule is not None or settings.keys() <= {"step_interval"})
    turns.close()
