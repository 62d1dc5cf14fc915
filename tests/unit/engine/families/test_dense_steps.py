"""First steps of cached edits that compute all tokens (docs/decisions/templates.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.semantics import DenseSteps
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.contracts.status_record import Served
from maskserve_common.routing import Edit, Pricing, WorkerView
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_encoder
from maskserve_engine.families.specs import load_spec
from maskserve_engine.loop.engine import Engine
from maskserve_engine.spec.model_spec import dense_steps
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.keys import KeyRing
from maskserve_router.scheduling.edit_cost import EditCosts
from tests.fakes.jobs import config_of, encode_case, random_case
from tests.fakes.pictures import encode
from tests.support.draws import fresh_rng
from tests.support.engines import edit, make_engine

pytestmark = pytest.mark.each_value

ANYBODY = KeyRing((), 1).client({})
SIDE = (32, 48)
STEPS = 10
NEEDED = DenseSteps(prompt=1, side=2)


def masks() -> dict[str, np.ndarray]:
    side, inner = np.zeros(SIDE, np.uint8), np.zeros(SIDE, np.uint8)
    side[:8], inner[8:16, 8:24] = 255, 255
    return {"side": side, "inner": inner}


def test_the_largest_number_that_applies_counts() -> None:
    assert NEEDED.of(20, prompt=False, side=False) == 0
    assert NEEDED.of(20, prompt=True, side=False) == 1
    assert NEEDED.of(20, prompt=True, side=True) == NEEDED.of(20, prompt=False, side=True) == 2
    assert [NEEDED.of(steps, prompt=True, side=True) for steps in (1, 4, 9, 10, 19, 28)] == [
        *(0, 0, 0, 1, 1, 2)
    ]
    assert dense_steps(-1, NEEDED) == NEEDED
    for configured in (0, 3):
        dense = dense_steps(configured, NEEDED)
        assert {dense.of(4, prompt=p, side=s) for p in (True, False) for s in (True, False)} == {
            configured
        }


@pytest.fixture(scope="module")
def encoder(tiny_inpaint: Path) -> Encoder:
    return load_encoder(config_of(tiny_inpaint))


@pytest.fixture(scope="module")
def engines(tiny_inpaint: Path, encoder: Encoder) -> Iterator[dict[int, Engine]]:
    engines = {
        configured: make_engine(
            tiny_inpaint, encoder, model={"mask_ring": 0}, dense_steps=configured
        )
        for configured in (-1, 0)
    }
    yield engines
    for engine in engines.values():
        engine.close(10.0)


@pytest.mark.parametrize("prompt", ["", "a red star"])
@pytest.mark.parametrize("mask", masks())
def test_a_base_models_edit_begins_dense_where_it_has_a_prompt_or_covers_a_side(
    engines: dict[int, Engine], encoder: Encoder, mask: str, prompt: str
) -> None:
    rng = fresh_rng()
    case = random_case(rng, strength=1.0, num_inference_steps=STEPS, cache="require")
    pixels = rng.integers(0, 256, (*SIDE, 3), dtype=np.uint8)
    edit_job = encode_case(
        encoder, replace(case, pixels=pixels, mask=masks()[mask], prompt=prompt), "e"
    )
    for configured, engine in engines.items():
        meta = edit(engine, edit_job).meta
        first = int(configured < 0 and (mask == "side" or prompt != ""))
        blocks = engine.adapter.blocks
        ran = {"dense": first * blocks, "kv": (STEPS - first) * blocks}
        assert meta["kinds"] == {kind: count for kind, count in ran.items() if count}
        assert meta.get("dense_steps", 0) == first
        computed = first * meta["total_tokens"] + (STEPS - first) * meta["active_tokens"]
        assert meta["computed_tokens"] == computed


def test_fill_needs_none(tiny_fill: Path) -> None:
    assert load_spec(tiny_fill).dense_steps == DenseSteps()


@pytest.mark.parametrize("prompted", [False, True])
@pytest.mark.parametrize("mask", masks())
async def test_the_router_expects_the_same(mask: str, prompted: bool) -> None:
    turns = FairShare(1)
    costs, image = EditCosts(RouterConfig(), turns), memoryview(b"")
    served = Served(64, 8, 20, mask_ring=0, dense_steps=NEEDED)
    encoded: Any = encode(masks()[mask])
    measured, *_ = await costs.cost_of(
        ANYBODY, image, encoded, EditSettings(), served, "m", prompted=prompted
    )
    assert measured.dense_steps == NEEDED.of(20, prompt=prompted, side=mask == "side")
    turns.close()


@pytest.mark.parametrize("first", range(5))
def test_a_dense_first_step_costs_what_a_dense_step_does(first: int) -> None:
    pricing = Pricing(1.0, 10.0, 1.0, 0.02, 0.01, tokens=100.0)
    worker = WorkerView("w", pricing, 8, 8)
    cached, begun = (worker.price(Edit(4, 20, 100, "t", dense_steps=steps)) for steps in (0, first))
    dense, minimum = worker.price(Edit(4, 20, 100, cache=False)), min(1.0, first / 4)
    assert begun == pytest.approx(
        [minimum * d + (1 - minimum) * c for c, d in zip(cached, dense, strict=True)]
    )
