"""The checks that every model family passes (design §4, §8): dense rows of each kind of edit
against diffusers' own pipeline, all other rows against dense ones. The table of
`tests.support.family_cases` has a row for each model; what is particular to a family is in the
family's own folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from maskserve_benchmarks.steps.replay import Replay
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.transfer import mapped
from maskserve_engine.families.adapter import EditRow
from maskserve_engine.families.registry import load_adapter
from maskserve_engine.families.specs import recorded_rows
from maskserve_engine.layers.low_rank import Factors, LowRankSet
from tests.fakes.loras import of_model, write
from tests.support import cached_rows, refresh_rows
from tests.support.cached_rows import Primed, assert_equal, result
from tests.support.family_cases import CASES, FamilyCase, FamilyModel
from tests.support.lora_oracle import read
from tests.support.ranks import check_ranks
from tests.support.refresh_rows import FirstEdits
from tests.support.replayed import Replayed, attend_on_a_cpu, update_kernels_on_a_cpu

pytestmark = pytest.mark.spread("model", sort=lambda case: case.sort)

EDITS = range(6)
"""Seeds of edits of other sizes, steps, strengths, prompts and guidance."""
SHORT = {"num_inference_steps": 3, "strength": 1.0}


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, family_model: Callable[[str], FamilyModel]
) -> FamilyModel:
    case: FamilyCase = request.param
    return family_model(case.name)


def for_each(supports: Callable[[FamilyCase], object]) -> pytest.MarkDecorator:
    """The models of the table that support a check."""
    params = [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * case.slow)
        for name, case in CASES.items()
        if supports(case)
    ]
    return pytest.mark.parametrize("model", params, indirect=True, scope="module")


@pytest.mark.each_value
@for_each(lambda case: True)
def test_dense_rows_of_any_mix_are_the_pipelines(model: FamilyModel) -> None:
    """Rows of other steps, which leave the batch one by one."""
    rows = [model.adapter.dense_row(model.job(seed)) for seed in EDITS]
    cached_rows.run(model.replay, rows, "dense")
    for seed, row in zip(EDITS, rows, strict=True):
        assert_equal(row.result().array(), model.expected(seed))


@pytest.mark.each_value
@for_each(lambda case: case.wholes)
def test_whole_edits_and_generations_of_any_mix_are_the_pipelines(model: FamilyModel) -> None:
    edits = [(seed, kind) for seed in EDITS for kind in model.case.wholes]
    rows = [model.adapter.dense_row(model.job(*edit)) for edit in edits]
    cached_rows.run(model.replay, rows, "dense")
    for edit, row in zip(edits, rows, strict=True):
        assert_equal(row.result().array(), model.expected(*edit))


@pytest.mark.each_value
@for_each(lambda case: case.references)
def test_edits_with_references_of_any_mix_are_the_pipelines(model: FamilyModel) -> None:
    """The references have other sizes than the source, and rows other numbers of them."""
    edits = [(seed, kind) for seed in EDITS[:4] for kind in model.several]
    rows = [model.adapter.dense_row(model.job(*edit, several=True)) for edit in edits]
    cached_rows.run(model.replay, rows, "dense")
    for edit, row in zip(edits, rows, strict=True):
        assert_equal(row.result().array(), model.expected(*edit, several=True))


@pytest.mark.each_value
@for_each(lambda case: True)
def test_the_kinds_of_edits_are_those_of_diffusers(model: FamilyModel) -> None:
    assert model.adapter.spec.edit_kinds == {"inpaint", *model.case.wholes}


@for_each(lambda case: case.wholes)
def test_kinds_of_edits_change_nothing_of_one_another(model: FamilyModel) -> None:
    """A masked edit without a cache, a hit, a first edit and every other kind, some with several
    references, begun at different steps.
    """
    replay, case, steps = FirstEdits(model.adapter), model.case, 6

    def rows() -> list[EditRow]:
        jobs = [model.job(seed, num_inference_steps=steps, strength=1.0) for seed in EDITS[:3]]
        mixed: list[EditRow] = [model.adapter.dense_row(jobs[0])]
        if case.kinds:
            mixed.append(cached_rows.cached(replay, jobs[1], model.primed(1)))
        if case.refresh_text is not None:
            schedule = refresh_rows.plan(0, 3, text=case.refresh_text)
            mixed.append(replay.first_edit(jobs[2], schedule))
        wholes = [(kind, seed) for kind in case.wholes for seed in (3, 4)]
        mixed += [model.adapter.dense_row(model.job(seed, kind)) for kind, seed in wholes]
        several = [model.job(5, kind, several=True) for kind in model.several]
        mixed += [model.adapter.dense_row(job) for job in several]
        if several and case.refresh_text is not None:
            job = model.job(4, several=True, num_inference_steps=steps, strength=1.0)
            mixed.append(replay.first_edit(job, refresh_rows.plan(0, 3, text=case.refresh_text)))
        return mixed

    alone = [result(replay, row, "kv") for row in rows()]
    together, begun = rows(), list[EditRow]()
    for row in together:
        begun.append(row)
        replay.step([row for row in begun if row.step < row.steps], ("kv",) * model.adapter.blocks)
    cached_rows.run(replay, together, "kv")
    for row, expected in zip(together, alone, strict=True):
        assert_equal(row.result().array(), expected)


@for_each(lambda case: case.recorded)
def test_recorded_steps_are_those_that_are_not(
    model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense edit, hits, first edits, some with LoRAs, and an edit without a mask join and leave.
    In the second round most steps were recorded in the first.
    """
    attend_on_a_cpu(monkeypatch)
    capture, case = Replayed(), model.case
    config = model.config_with(cache={"placed_bytes": 0})
    plain, recording = (cast(Any, load_adapter(config)) for _ in range(2))
    for adapter in (plain, recording):
        adapter._preparation._buckets = True
    recording.stepped = replace(recording.weights, graphs=Graphs(capture, rows=16))
    jobs = [model.job(seed, num_inference_steps=4, strength=1.0) for seed in EDITS[:5]]
    wholes = [model.job(5, kind, num_inference_steps=4) for kind in case.wholes]
    with update_kernels_on_a_cpu():
        loras = [_random_lora(plain, seed, rank) for seed, rank in ((1, 5), (2, 18))]

    def run(adapter: Any) -> list[Any]:
        replay = FirstEdits(adapter)
        rows: list[Any] = [adapter.dense_row(job) for job in jobs[:1] + wholes]
        if case.kinds:
            rows += [cached_rows.cached(replay, jobs[seed], model.primed(seed)) for seed in (1, 2)]
        if case.refresh_text is not None:
            schedule = refresh_rows.plan(0, 2, text=case.refresh_text)
            rows += [replay.first_edit(job, schedule) for job in jobs[3:]]
        for row, lora in zip(rows[1::2], loras, strict=False):
            row.adapters = ((lora, 0.5),)
        kinds, begun = ("kv",) * adapter.blocks, list[EditRow]()
        for row in reversed(rows):
            begun.append(row)
            replay.step([row for row in begun if row.step < row.steps], kinds)
        cached_rows.run(replay, rows, "kv")
        return [row.result().array() for row in rows]

    expected = run(plain)
    for _ in range(2):
        with update_kernels_on_a_cpu():
            recorded = run(recording)
        for latents, plain_latents in zip(recorded, expected, strict=True):
            assert_equal(latents, plain_latents)
    assert capture.recorded > 0
    assert recording.stepped.graphs.records, "recording was turned off"
    assert recorded_rows(model.adapter.spec, config)


def _random_lora(adapter: Any, seed: int, rank: int) -> LowRankSet:
    """A LoRA on all layers of the blocks."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32) / shape[1] ** 0.5)

    low_rank: LowRankSet = adapter.low_rank(
        {
            name: Factors(normal(rank, place.shape[1]), normal(place.shape[0], rank))
            for name, place in adapter.places.items()
            if re.search(r"(blocks|layers)\.\d+\.", name)
        }
    )
    return low_rank


@for_each(lambda case: case.all_tokens)
def test_a_cached_row_that_computes_all_tokens_is_dense(model: FamilyModel) -> None:
    for seed in (1, 2):
        job = model.job(seed, **SHORT)
        cached_rows.check_all_active(model.replay, model.encoder, job, *model.case.all_tokens)


@for_each(lambda case: case.kinds)
def test_rows_change_nothing_of_one_another(model: FamilyModel) -> None:
    seeds = EDITS[:5]
    jobs, primed = [model.job(seed) for seed in seeds], [model.primed(seed) for seed in seeds]
    for kind in model.case.kinds:
        cached_rows.check_mixed_batch(model.replay, jobs, primed, kind)


@for_each(lambda case: case.no_anchor)
def test_a_step_without_an_anchor_computes_the_template(model: FamilyModel) -> None:
    """It computes the cached tokens, too, from the template's inputs."""
    cached_rows.check_step_without_anchor(model.replay, model.job(0), model.primed(0))


@for_each(lambda case: True)
def test_cancelled_parked_and_moved_rows_change_nothing(model: FamilyModel) -> None:
    jobs = [model.job(seed, **{**SHORT, "num_inference_steps": 5}) for seed in range(4)]

    def rows() -> list[EditRow]:
        dense: list[EditRow] = [model.adapter.dense_row(job) for job in jobs]
        if model.case.kinds:
            primed = [model.primed(seed) for seed in (1, 2)]
            dense[1:3] = [
                cached_rows.cached(model.replay, job, template)
                for job, template in zip(jobs[1:3], primed, strict=True)
            ]
        return dense

    _befall(model, rows)


@for_each(lambda case: case.wholes)
def test_cancelled_parked_and_moved_rows_of_any_kind_change_nothing(model: FamilyModel) -> None:
    kinds = tuple(model.case.wholes) * 4
    several = [kind in model.several for kind in kinds]
    jobs = [
        model.job(seed, kinds[seed], several=several[seed], num_inference_steps=8)
        for seed in range(4)
    ]
    _befall(model, lambda: [model.adapter.dense_row(job) for job in jobs])


def _befall(model: FamilyModel, rows: Callable[[], list[EditRow]]) -> None:
    """In a batch of four rows that begins together, one is cancelled, one waits for three steps,
    and one goes on as a row of another process would. They end as rows that nothing befell.
    """
    undisturbed = [result(model.replay, row, "kv") for row in rows()]
    kinds = ("kv",) * model.adapter.blocks
    stays, parked, moves, cancelled = rows()
    model.replay.step([stays, parked, moves, cancelled], kinds)
    model.replay.step([stays, moves, cancelled], kinds)
    model.replay.step([moves, stays], kinds)
    carried = model.adapter.carried(moves)
    assert carried is not None
    twin = rows()[2]
    model.adapter.follow(twin, mapped(carried, torch.Tensor.clone), moves.step)
    model.replay.step([twin, stays], kinds)
    cached_rows.run(model.replay, [parked, stays, twin], "kv")
    for row, expected in zip((stays, parked, twin), undisturbed, strict=False):
        assert_equal(row.result().array(), expected)


@for_each(lambda case: case.int8)
def test_int8_weights_serve_it(model: FamilyModel) -> None:
    """Near the plain weights; and rows change nothing of one another with them, either."""
    bound = model.case.int8
    assert bound is not None
    adapter = load_adapter(model.config_with(model={"weights": "int8"}))
    assert adapter.weight_bytes < 0.7 * model.adapter.weight_bytes
    replay, jobs = Replay(adapter), [model.job(seed, **SHORT) for seed in range(2)]
    exact = result(model.replay, model.adapter.dense_row(jobs[0]))

    def rows() -> list[EditRow]:
        rows: list[EditRow] = [adapter.dense_row(job) for job in jobs]
        if model.case.kinds:
            primed = Primed(adapter, model.encoder, jobs[1])
            rows[1] = cached_rows.cached(replay, jobs[1], primed)
        return rows

    alone = [result(replay, row, "kv") for row in rows()]
    together = rows()
    cached_rows.run(replay, together, "kv")
    for row, expected in zip(together, alone, strict=True):
        assert_equal(row.result().array(), expected)
    assert 0 < np.abs(alone[0] - exact).mean() < bound * np.abs(exact).mean()


@for_each(lambda case: case.lora_oracle)
def test_loras_are_those_that_diffusers_loads(model: FamilyModel, tmp_path: Path) -> None:
    """Two of every layer beside a row without any; and one in each further form of names."""
    edits = [model.edit(seed, **SHORT) for seed in (4, 5)]
    edits += [model.edit(5, kind, num_inference_steps=4) for kind in model.case.wholes]
    edits += [model.edit(5, kind, several=True, **SHORT) for kind in model.several]
    plain = model.oracle(edits[0])
    for form in model.case.lora_forms:
        rows: list[Any] = [model.adapter.dense_row(model.encoded(edits[0]))]
        expected = [plain]
        for seed, edit in enumerate(edits, 5):
            job, file = model.encoded(edit), _lora(model, tmp_path, seed, form)
            rows.append(model.adapter.dense_row(job))
            _attach(model, rows[-1], job, file)
            with model.with_lora(file, 0.7):
                expected.append(model.oracle(edit))
        cached_rows.run(model.replay, rows, "dense")
        assert np.abs(expected[1] - plain).max() > 1e-2
        for row, latents in zip(rows, expected, strict=True):
            assert_equal(row.result().array(), latents)
        edits = edits[:1]


@for_each(lambda case: True)
def test_a_lora_that_comes_late_is_one_that_was_there(model: FamilyModel, tmp_path: Path) -> None:
    """Nothing that a row or its batch computed once, before the LoRA came, is read after: the next
    steps are those of a row that had the LoRA when it came to the same latents. The edit is guided.
    """
    file = _lora(model, tmp_path, 5, model.case.lora_forms[0])
    _check_late_lora(model, model.job(5, **SHORT), file)
    for kind in model.case.wholes:
        _check_late_lora(model, model.job(5, kind, num_inference_steps=5), file)
    for kind in model.several[-1:]:
        _check_late_lora(model, model.job(5, kind, several=True, **SHORT), file)


def _check_late_lora(model: FamilyModel, job: EditJob, file: Path) -> None:
    late, early, plain = (model.adapter.dense_row(job) for _ in range(3))
    model.adapter.step([late], None)
    carried = model.adapter.carried(late)
    assert carried is not None
    carried, step = mapped(carried, torch.Tensor.clone), late.step
    _attach(model, late, job, file)
    latents = result(model.replay, late)
    model.adapter.follow(early, carried, step)
    _attach(model, early, job, file)
    assert_equal(latents, result(model.replay, early))
    assert np.abs(latents - result(model.replay, plain)).max() > 1e-2


@for_each(lambda case: case.refresh_text is not None)
def test_refresh_steps_are_dense_steps(model: FamilyModel) -> None:
    for several in (False, True)[: 1 + bool(model.several)]:
        job = model.job(1, several=several, num_inference_steps=6, strength=1.0, mask_ring=1)
        text = bool(model.case.refresh_text)
        refresh_rows.check_dense_refresh_steps(model.adapter, job, text=text)


@for_each(lambda case: case.lines)
def test_steps_between_refresh_steps_lie_on_their_lines(model: FamilyModel) -> None:
    """A row that draws the lines by itself ends alike."""
    job = model.job(1, num_inference_steps=6, strength=1.0, mask_ring=1)
    refresh_rows.check_lines(model.adapter, job, text=bool(model.case.refresh_text))


@for_each(lambda case: case.ranks)
def test_two_ranks_compute_the_rows_of_one(model: FamilyModel) -> None:
    seeds = _whole_pictures(model, 2)
    jobs = [model.job(seed, **SHORT) for seed in seeds]
    wholes = [model.job(seed, kind, num_inference_steps=4)
              for kind in model.case.wholes for seed in seeds]  # fmt: skip
    wholes += [model.job(seeds[0], kind, several=True, **SHORT) for kind in model.several]
    for deal in model.case.ranks:
        primed = [model.primed(seed) for seed in seeds]
        for kind in model.case.kinds:
            check_ranks(model.adapter, jobs, primed, kind, wholes, deals=deal == "passes")
        check_ranks(model.adapter, [], [], "dense", wholes, deals=deal == "passes")


def _lora(model: FamilyModel, folder: Path, seed: int, form: str) -> Path:
    """The file of a random LoRA of every layer of the denoiser."""
    file = folder / f"{seed}.safetensors"
    write(file, of_model(model.denoiser, seed, form))
    return file


def _attach(model: FamilyModel, row: Any, job: EditJob, file: Path) -> None:
    factors = read(file, model.folder)["denoiser"]
    model.adapter.attach(row, job, ((model.adapter.low_rank(factors), 0.7),))


def _whole_pictures(model: FamilyModel, count: int) -> list[int]:
    """Seeds of edits whose pictures have a number of tokens that ranks can share."""
    seeds = (
        seed
        for seed in range(3, 60)
        if model.adapter.tokens(model.job(seed)).total % model.case.rank_tokens == 0
    )
    return [next(seeds) for _ in range(count)]
