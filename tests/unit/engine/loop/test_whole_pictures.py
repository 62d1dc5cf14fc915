"""An engine's edits without a mask, and pictures without a source, beside masked edits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from maskserve_common.contracts.request import EditKind
from maskserve_engine.base.job import EditJob, FinalEvent, PreviewEvent
from maskserve_engine.loop.engine import Engine
from tests.fakes.jobs import tolerance
from tests.support import cached_rows
from tests.support.engines import edit, make_engine
from tests.support.family_cases import CASES, FamilyModel
from tests.support.sink import Sink

pytestmark = pytest.mark.spread("model")
NAMES = ("klein-kv", "klein", "flux-base", "qwen-image-21", "sd21-base")
"""With references, exact and not; without; and a UNet."""
KINDS: tuple[EditKind, ...] = ("edit", "generate")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    return FamilyModel(CASES[request.param], tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def engine(model: FamilyModel) -> Iterator[Engine]:
    sections = model.case.sections.get("model", {})
    keys_only = {"entry_kind": "kv"} if model.adapter.spec.encoder_picture else {}
    engine = make_engine(model.folder, model.encoder, dict(sections), own_anchors=0.4, **keys_only)
    yield engine
    engine.close(10.0)
    engine.cache.check_integrity()


def job(model: FamilyModel, seed: int, kind: EditKind, name: str, **settings: Any) -> EditJob:
    defaults = {"cache": "auto", "num_inference_steps": 6, "strength": 1.0}
    edit_job = model.job(seed, kind, **{**defaults, **settings})
    return replace(edit_job, request=replace(edit_job.request, request_id=name))


def run(engine: Engine, jobs: Sequence[EditJob]) -> list[FinalEvent]:
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    return [sink.final() for sink in sinks]


def check(model: FamilyModel, edit_job: EditJob, final: FinalEvent) -> None:
    """Check that the edit was dense, for its kind, and ended as it ends alone."""
    expected = cached_rows.result(model.replay, model.adapter.dense_row(edit_job))
    assert np.abs(final.latents - expected).max() <= tolerance(expected)
    meta = final.meta
    assert (meta["cache"], meta["dense_for"]) == ("off", edit_job.request.kind)
    assert meta["computed_tokens"] == meta["steps"] * meta["total_tokens"]


def test_nothing_counts_primes_or_reads_a_template(model: FamilyModel, engine: Engine) -> None:
    """However often the same source comes; also where settings insist on the cache."""
    jobs = [job(model, 1, kind, f"{kind}-{i}") for kind in KINDS for i in range(4)]
    jobs += [job(model, 1, kind, f"{kind}-require", cache="require") for kind in KINDS]
    for edit_job, final in zip(jobs, run(engine, jobs), strict=True):
        check(model, edit_job, final)
    counters = engine.ask(engine.cache.counters).result()
    assert not any(value for name, value in counters.items() if name.startswith(("cache_hits",
                   "cache_misses", "cache_own", "primings")))  # fmt: skip
    assert engine.templates().result() == []
    first = job(model, 1, "inpaint", "masked")
    assert edit(engine, first).meta["cache"] in ("own", "miss"), "as if no edit had come before"


def test_all_kinds_share_steps_with_hits_and_first_edits(
    model: FamilyModel, engine: Engine
) -> None:
    hit = {"cache": "require"}
    edit(engine, job(model, 1, "inpaint", "primes", **hit))
    jobs = [job(model, 1, "inpaint", "hit", num_inference_steps=20, **hit)]
    jobs += [job(model, 2, "inpaint", "first", num_inference_steps=20)]
    jobs += [job(model, seed, kind, f"{kind}-{seed}", num_inference_steps=20, preview_every=7)
             for kind in KINDS for seed in (1, 2)]  # fmt: skip
    sinks = [Sink() for _ in jobs]
    for edit_job, sink in zip(jobs, sinks, strict=True):
        engine.submit(edit_job, sink)
    finals = [sink.final() for sink in sinks]
    assert finals[0].meta["cache"] == "hit"
    assert max(final.meta["batch_mean"] for final in finals) > 1.5
    for edit_job, sink, final in list(zip(jobs, sinks, finals, strict=True))[2:]:
        check(model, edit_job, final)
        previews = [event for event in sink.events if isinstance(event, PreviewEvent)]
        assert previews, "the steps are more than those between two previews"
        assert all(event.latents.shape == final.latents.shape for event in previews)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reproducible_one_has_the_same_bits_at_any_load(
    model: FamilyModel, engine: Engine, kind: EditKind
) -> None:
    first = job(model, 1, kind, "alone", reproducible=True)
    alone = edit(engine, first)
    mates = [job(model, seed, other, f"{other}-{seed}") for other in KINDS for seed in (2, 3)]
    again = replace(first, request=replace(first.request, request_id="again"))
    *_, among = run(engine, [*mates, again])
    np.testing.assert_array_equal(among.latents, alone.latents)
    assert among.meta["dense_for"] == kind


def test_a_cancelled_generation_leaves_its_mates_alone(model: FamilyModel, engine: Engine) -> None:
    victim = job(model, 1, "generate", "victim", num_inference_steps=400, progress=True)
    mate, sinks = job(model, 2, "edit", "mate", num_inference_steps=20), (Sink(), Sink())
    engine.submit(victim, sinks[0])
    engine.submit(mate, sinks[1])
    engine.cancel("victim")
    assert sinks[0].error().code == "CANCELLED"
    check(model, mate, sinks[1].final())
