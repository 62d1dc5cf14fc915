"""Edits without a mask that find the regions that they change (`region: auto`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from maskserve_engine.base.job import EditJob, FinalEvent
from maskserve_engine.loop.engine import Engine
from maskserve_engine.planning.regions import Bools, RegionRule
from maskserve_engine.requests.refresh_schedules import RefreshSchedules
from tests.fakes.jobs import tolerance
from tests.support import refresh_rows
from tests.support.draws import fresh_rng, fresh_seed
from tests.support.engines import edit, make_engine
from tests.support.eventually import eventually
from tests.support.family_cases import CASES, FamilyModel
from tests.support.sink import Sink

STEPS, AFTER = 16, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASES["klein"], tmp_path_factory.mktemp("models") / "klein")


@pytest.fixture
def engine(model: FamilyModel) -> Iterator[Engine]:
    engine = make_engine(model.folder, model.encoder)
    yield engine
    engine.close(10.0)
    engine.cache.check_integrity()


def job(model: FamilyModel, name: str, seed: int, **settings: Any) -> EditJob:
    defaults = {"cache": "auto", "num_inference_steps": STEPS, "strength": 1.0, "region": "auto"}
    edit_job = model.job(seed, "edit", **{**defaults, **settings})
    return replace(edit_job, request=replace(edit_job.request, request_id=name))


def follow_rule(engine: Engine, rule: RegionRule) -> None:
    adapter = cast(Any, engine.adapter)
    adapter.spec = replace(adapter.spec, region=rule)


def change_after(engine: Engine, edit_job: EditJob, steps: int) -> tuple[Any, NDArray[Any]]:
    """A dense row after some steps, and the change of its prediction."""
    row: Any = engine.adapter.dense_row(edit_job)
    for _ in range(steps):
        engine.adapter.step([row], None, [None])
    engine.adapter.release()
    return row, row.change().array()


def halving_rule(engine: Engine, edit_job: EditJob) -> RegionRule:
    """A rule by which an edit's region is about a fifth of its tokens, and stays so."""
    _, change = change_after(engine, edit_job, AFTER)
    return _Fixed(AFTER, float(np.quantile(change, 0.8)))


class _Fixed(RegionRule):
    """No token joins later."""

    def region(self, change: NDArray[Any], before: Bools | None = None) -> Bools:
        return super().region(change) if before is None else before


def expected(engine: Engine, edit_job: EditJob, rule: RegionRule) -> tuple[Bools, NDArray[Any]]:
    """The region, and the latents of a masked row that begins where the dense one has arrived."""
    adapter = cast(Any, engine.adapter)
    dense, change = change_after(engine, edit_job, rule.after)
    region = rule.region(change.reshape(dense.image.grid))
    pixels = adapter.spec.token_pixels
    mask = np.kron(region, np.full((pixels, pixels), 255, np.uint8)).astype(np.uint8)
    masked = adapter.with_settings(replace(edit_job, edit_mask=mask, prepared=None), mask_ring=0)
    schedule = RefreshSchedules(engine.config, adapter).of_region(masked, rule.after)
    row = adapter.refreshing_row(masked, schedule)
    unmasked = row.image.unmasked
    outside = unmasked.ids[: len(unmasked.latents.clean)]
    adapter.follow(row, (dense.latents[row.image.masked.ids], (), dense.latents[outside]), AFTER)
    unmasked.latents = replace(unmasked.latents, predicted=len(outside))
    refresh_rows.run(adapter, [row], [schedule])
    adapter.release()
    return region, row.result().array()


def test_it_goes_on_as_an_edit_whose_mask_is_its_region(engine: Engine, model: FamilyModel) -> None:
    edit_job = job(model, "found", fresh_seed())
    rule = halving_rule(engine, edit_job)
    follow_rule(engine, rule)
    region, latents = expected(engine, edit_job, rule)
    final = edit(engine, edit_job)
    np.testing.assert_allclose(final.latents, latents, atol=tolerance(latents))
    meta = final.meta
    assert meta["region"] == {"share": round(float(region.mean()), 4), "joined_tokens": 0}
    assert (meta["cache"], "dense_for" in meta) == ("own", False)
    schedule = RefreshSchedules(engine.config, engine.adapter).of_region(edit_job, AFTER)
    assert meta["anchors"] == [*range(AFTER), *sorted(schedule.computed_at)]
    assert meta["computed_tokens"] < meta["steps"] * meta["total_tokens"]


@pytest.mark.parametrize("way", ["all", "none", "off", "short"])
def test_an_edit_without_a_region_is_a_dense_one(
    engine: Engine, model: FamilyModel, way: str
) -> None:
    """Where all tokens change or none does, where it does not ask, or has too few steps."""
    settings: dict[str, Any] = {"off": {"region": "off"}, "short": {"num_inference_steps": 4}}
    edit_job = job(model, "dense", fresh_seed(), **settings.get(way, {}))
    follow_rule(engine, RegionRule(AFTER, np.inf if way == "none" else 0.0))
    final = edit(engine, edit_job)
    np.testing.assert_array_equal(
        final.latents, refresh_rows.result(engine.adapter, edit_job, None)
    )
    assert final.meta["dense_for"] == "edit"
    assert "region" not in final.meta


def run(engine: Engine, jobs: Sequence[EditJob]) -> list[FinalEvent]:
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    return [sink.final() for sink in sinks]


def test_its_picture_does_not_depend_on_its_batch(engine: Engine, model: FamilyModel) -> None:
    jobs = [
        job(model, f"edit-{n}", fresh_seed(), num_inference_steps=STEPS + 4 * n) for n in range(3)
    ]
    follow_rule(engine, halving_rule(engine, jobs[0]))
    alone = [edit(engine, edit_job) for edit_job in jobs]
    again = [
        replace(one, request=replace(one.request, request_id=f"again-{n}"))
        for n, one in enumerate(jobs)
    ]
    for before, together in zip(alone, run(engine, again), strict=True):
        assert together.meta.get("region") == before.meta.get("region")
        np.testing.assert_allclose(together.latents, before.latents, atol=tolerance(before.latents))


class _Growing(RegionRule):
    """A column of tokens, and at each refresh step one more."""

    __slots__ = ()
    measured = 0

    def region(self, change: NDArray[Any], before: Bools | None = None) -> Bools:
        type(self).measured += 1
        return np.broadcast_to(np.arange(change.shape[1]) < type(self).measured, change.shape)


def test_tokens_join_at_refresh_steps(engine: Engine, model: FamilyModel) -> None:
    _Growing.measured = 0
    follow_rule(engine, _Growing(AFTER, 0.0))
    edit_job = job(model, "joins", fresh_seed())
    final = edit(engine, edit_job)
    rows, columns = (side // 2 for side in edit_job.moments.shape[1:])
    joined = _Growing.measured - 1
    assert joined > 0
    share = round(min(1.0, _Growing.measured / columns), 4)
    assert final.meta["region"] == {"share": share, "joined_tokens": joined * rows}
    assert np.isfinite(final.latents).all()
    dense = refresh_rows.result(engine.adapter, edit_job, None)
    assert final.latents.shape == dense.shape


def test_a_cancelled_one_leaves_nothing_behind(engine: Engine, model: FamilyModel) -> None:
    edit_job = job(model, "cancelled", fresh_seed(), num_inference_steps=400, progress=True)
    follow_rule(engine, halving_rule(engine, edit_job))
    sink = Sink()
    engine.submit(edit_job, sink)

    def narrowed() -> bool:
        edits = engine.ask(lambda: list(engine.manager.edits.values())).result()
        return any(one.region is not None for one in edits)

    eventually("it has found its region", narrowed)
    engine.cancel("cancelled")
    assert sink.error().code == "CANCELLED"


def test_without_room_for_its_step_cache_it_is_dense(
    engine: Engine, model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.cache is not None
    monkeypatch.setattr(engine.cache.store.memory, "book", lambda nbytes, spare=False: False)
    edit_job = job(model, "full", fresh_seed())
    follow_rule(engine, halving_rule(engine, edit_job))
    final = edit(engine, edit_job)
    np.testing.assert_array_equal(
        final.latents, refresh_rows.result(engine.adapter, edit_job, None)
    )
    assert final.meta["dense_for"] == "memory"


def test_a_region_keeps_its_tokens_and_takes_those_that_change_later() -> None:
    rng = fresh_rng()
    shape = tuple(rng.integers(1, 12, 2))
    first, second = rng.uniform(size=(2, *shape))
    rule = RegionRule(1, 0.6)
    region = rule.region(first)
    later = rule.region(second, region)
    for place in np.ndindex(shape):
        assert region[place] == (first[place] >= 0.6)
        assert later[place] == (region[place] or second[place] >= 0.6)
