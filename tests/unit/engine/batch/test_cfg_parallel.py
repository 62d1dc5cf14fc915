"""Passes dealt to two ranks give what one process gives (design §8). Ranks are threads here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.cfg_parallel import assign_passes
from maskserve_engine.batch.sequence_parallel import GangExchange
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.batch.transfer import mapped
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.layers.low_rank import Factors
from tests.fakes.jobs import config_of, encode_case, guided, random_case, unet_case
from tests.fakes.tiny_unet import EACH_SORT, samplers
from tests.support.cached_rows import KINDS, Primed, assert_equal, cached
from tests.support.examples import examples
from tests.support.ranks import Rank, by_ranks

pytestmark = pytest.mark.spread("unet", "number")

Kinds = tuple[str, ...]


@given(st.lists(st.lists(st.floats(0.5, 50.0), min_size=1, max_size=2), min_size=1, max_size=8),
       st.integers(2, 4))  # fmt: skip
@examples(200)
def test_passes_are_dealt_evenly_and_those_of_a_row_apart(
    rows: list[list[float]], count: int
) -> None:
    ranks = iter(assign_passes(rows, count, [None] * len(rows)))
    loads = [0.0] * count
    for row in rows:
        row_ranks = [next(ranks) for _ in row]
        assert len(set(row_ranks)) == len(row_ranks)
        for rank, cost in zip(row_ranks, row, strict=True):
            loads[rank] += cost
    assert next(ranks, None) is None
    assert max(loads) - min(loads) <= max(cost for row in rows for cost in row) + 1e-9


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(1, 2)), min_size=1, max_size=8),
       st.lists(st.floats(0.5, 50.0), min_size=16, max_size=16))  # fmt: skip
@examples(100)
def test_passes_that_stay_go_where_they_go_alone(
    rows: list[tuple[str, int]], costs: list[float]
) -> None:
    """Whatever is beside them, and whatever they cost: 0 and 1 of two ranks."""
    cost_iter = iter(costs)
    with_costs = [[next(cost_iter) for _ in range(passes)] for _, passes in rows]
    ranks = iter(assign_passes(with_costs, 2, [name for name, _ in rows]))
    for name, passes in rows:
        assert [next(ranks) for _ in range(passes)] == list(
            assign_passes([[1.0] * passes], 2, [name])
        )


class Model:
    def __init__(self, folder: Path, halo: int = 0, entries: str = "shared") -> None:
        of_cache: dict[str, Any] = {"conv_halo": halo, "entry_kind": "kv"} if halo else {}
        of_cache["cfg_entries"] = entries
        config = config_of(folder, model={"outside_noise": "edit"}, cache=of_cache)
        self.encoder: Encoder = load_encoder(config)
        self.adapter: Any = load_adapter(config)
        self.unet = self.encoder.spec.family == "unet"

    def job(self, seed: int, *, two: bool, **settings: Any) -> EditJob:
        """An edit of one or two passes; all are of one size."""
        rng = np.random.default_rng(seed)
        if self.unet:
            case = unet_case(rng, guidance_scale=7.5 if two else 1.0, **settings)
        else:
            case = random_case(rng, **(guided(rng) if two else {}), **settings)
        mask = np.zeros((48, 40), np.uint8)
        mask[8 : 12 + 4 * (seed % 5), 4 : 20 + seed % 9] = 255
        pixels = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
        case = replace(case, pixels=pixels, mask=mask)
        job = encode_case(self.encoder, case, f"edit-{seed}")
        assert (job.negative is not None) == two
        return job

    def lora(self) -> Any:
        torch.manual_seed(5)
        factors = {
            name: Factors(torch.randn(2, p.shape[1]), torch.randn(p.shape[0], 2) * 0.02)
            for name, p in self.adapter.places.items()
            if "transformer_blocks" in name
        }
        return self.adapter.low_rank(factors)

    def plans(self) -> list[Kinds]:
        return [(kind,) * self.adapter.blocks for kind in KINDS]


@pytest.fixture(scope="module")
def flux(tiny_inpaint: Path) -> Model:
    return Model(tiny_inpaint)


@pytest.fixture(scope="module", params=EACH_SORT)
def unet(request: pytest.FixtureRequest, tiny_unets: dict[str, Path]) -> Model:
    return Model(tiny_unets[request.param])


def check_mix(model: Model, kinds: Kinds, seed: int) -> None:
    """Rows of one and two passes, dense and cached, some with a LoRA, which leave at other steps,
    equal those that one process steps; ranks have the same bytes.
    """
    jobs = [
        model.job(seed + n, two=flag, num_inference_steps=4 + n % 3, strength=1.0)
        for n, flag in enumerate((True, False, True, True, False))
    ]
    primed = [Primed(model.adapter, model.encoder, job, stride=2) for job in jobs[:3]]
    lora = model.lora()

    def run(rank: Rank) -> list[Any]:
        rows: list[Any] = [cached(rank.replay, *pair) for pair in zip(jobs, primed, strict=False)]
        rows += [rank.adapter.dense_row(job) for job in jobs[3:]]
        for number in (2, 3):
            rank.adapter.attach(rows[number], jobs[number], ((lora, 0.7),))
        rank.replay.step(rows, kinds, None)  # begun by each alone
        return rank.run(rows, kinds)

    [expected] = by_ranks(model.adapter, 1, run)
    ranks = by_ranks(model.adapter, 2, run, deals=True)
    for results in ranks:
        for one, other in zip(results, expected, strict=True):
            assert_equal(one, other)
    for one, other in zip(*ranks, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("number", range(3))
def test_a_mixed_batch_of_flux_equals_that_of_one_process(flux: Model, number: int) -> None:
    check_mix(flux, flux.plans()[number], 10 * number)


@pytest.mark.parametrize("number", range(3))
def test_a_mixed_batch_of_unets_equals_that_of_one_process(unet: Model, number: int) -> None:
    check_mix(unet, unet.plans()[number], 10 * number)


@pytest.mark.parametrize("entries", ["shared", "own"])
def test_rows_with_a_tile_equal_those_of_one_process(
    tiny_unets: dict[str, Path], entries: str
) -> None:
    model = Model(tiny_unets["sd-fill"], halo=1, entries=entries)
    check_mix(model, ("kv",) * model.adapter.blocks, 7)


def check_anchors(model: Model, *, text: bool) -> None:
    """Each rank keeps what its passes leave. Where one takes a step alone, it is an anchor, and the
    next one that both take is another; so do rows of one process that forget as often.
    """
    kinds = plan_of_kinds(("kv",) * model.adapter.blocks)
    plan = RefreshSchedule(frozenset({0, 4, 8}), "model", text)
    jobs = [
        model.job(30 + n, two=flag, num_inference_steps=9 + 2 * n, strength=1.0)
        for n, flag in enumerate((True, False, True))
    ]
    forgets = 6
    """The step that the first rank takes alone."""

    def run(rank: Rank) -> tuple[list[Any], list[list[bool]]]:
        rows = [rank.adapter.refreshing_row(job, plan) for job in jobs]
        readers = [StepCacheReader(row, rank.adapter.entry_blocks) for row in rows]
        read: list[list[bool]] = []
        for step in range(max(row.steps for row in rows)):
            live = [(row, r) for row, r in zip(rows, readers, strict=True) if step < row.steps]
            anew = step in (forgets, forgets + 1)
            dealt = rank.all is not None
            entries = [
                None if anew or step in plan.dense else reader.entry_at(step, by_rank=dealt)
                for _, reader in live
            ]
            read.append([entry is not None for entry in entries])
            if anew:
                for row, _ in live:
                    carried = mapped(rank.adapter.carried(row), torch.Tensor.clone)
                    rank.adapter.follow(row, carried, step)
            is_match = step == forgets
            step_kinds = kinds if any(read[-1]) else None
            rank.adapter.step(
                [row for row, _ in live], step_kinds, entries, None if is_match else rank.all
            )
            if dealt and not is_match and step < forgets:  # what is kept is in parts
                assert not any(reader.entry_at(step) for _, reader in live)
        return [row.result().array() for row in rows], read

    [(expected, read)] = by_ranks(model.adapter, 1, run)
    assert [sum(step) for step in read[:8]] == [0, 3, 3, 3, 3, 3, 0, 0]
    ranks = by_ranks(model.adapter, 2, run, deals=True)
    for results, steps in ranks:
        assert steps == read
        for one, other in zip(results, expected, strict=True):
            assert_equal(one, other)
    for one, other in zip(ranks[0][0], ranks[1][0], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("text", [True, False])
def test_anchors_that_rows_of_flux_have_are_those_of_one_process(flux: Model, text: bool) -> None:
    check_anchors(flux, text=text)


def test_anchors_that_rows_of_unets_have_are_those_of_one_process(unet: Model) -> None:
    check_anchors(unet, text=True)


def test_one_row_of_one_pass_is_computed_by_one_rank(flux: Model, unet: Model) -> None:
    for model in (flux, unet):
        job = model.job(3, two=False, num_inference_steps=3, strength=1.0)

        def run(rank: Rank, job: EditJob = job) -> tuple[Any, int]:
            row = rank.adapter.dense_row(job)
            rank.replay.step([row], (), rank.all)
            share = rank.adapter._batch._share
            return rank.run([row], ())[0], 1 if share is None else len(share.passes)

        [(expected, _)] = by_ranks(model.adapter, 1, run)
        ranks = by_ranks(model.adapter, 2, run, deals=True)
        for result, _ in ranks:
            assert_equal(result, expected)
        assert [passes for _, passes in ranks] == [1, 0]


def test_what_travels_is_what_the_model_answers(flux: Model, unet: Model) -> None:
    """So it is for FLUX also where ranks would share tokens if its rows had one pass."""
    for model, deals in ((flux, True), (flux, False), (unet, True)):
        job = model.job(4, two=True, num_inference_steps=3, strength=1.0)

        def run(rank: Rank, job: EditJob = job) -> tuple[int, int]:
            row = rank.adapter.dense_row(job)
            rank.replay.step([row], (), rank.all)
            assert isinstance(rank.all, GangExchange)
            return rank.all.sent, row.latents.nbytes

        for by_rank, answer in by_ranks(model.adapter, 2, run, deals=deals):
            assert by_rank == answer


def test_more_ranks_than_two_share_tokens(flux: Model) -> None:
    job = flux.job(5, two=True, num_inference_steps=3, strength=1.0)

    def run(rank: Rank) -> Any:
        return rank.run([rank.adapter.dense_row(job)], ())[0]

    [expected] = by_ranks(flux.adapter, 1, run)
    heads = flux.adapter.spec.denoiser["num_attention_heads"]
    for by_rank in by_ranks(flux.adapter, min(4, heads), run):
        assert_equal(by_rank, expected)


def test_rows_that_record_are_refused(flux: Model, unet: Model) -> None:
    class Two:
        rank, count, deals = 0, 2, True

    for model in (flux, unet):
        primed = Primed(model.adapter, model.encoder, model.job(1, two=True))
        primed.row.step = 0
        with pytest.raises(ValueError, match="rows that record what they compute"):
            model.adapter.step([primed.row], None, None, Two())


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize("variant", ["sd-base", "sdxl-fill"])
def test_a_row_goes_on_elsewhere_as_if_it_had_stayed(
    tiny_unets: dict[str, Path], variant: str, name: str
) -> None:
    """Bit for bit, whatever its sampler remembers; after any step."""
    model = Model(tiny_unets[variant])
    of_folder = model.adapter
    model.adapter = UnetAdapter(
        of_folder.spec, of_folder.model, samplers()[name], exact_vae=of_folder.exact_vae
    )
    job = model.job(6, two=True, num_inference_steps=6, strength=1.0)
    stays, *rows = (model.adapter.dense_row(job) for _ in range(2))
    while stays.step < stays.steps:
        model.adapter.step([stays], None)
    (row,) = rows
    while row.step < row.steps:
        model.adapter.step([row], None)
        dense_row = model.adapter.dense_row(job)
        carried = mapped(model.adapter.carried(row), torch.Tensor.clone)
        model.adapter.follow(dense_row, carried, row.step)
        row = dense_row
    assert np.array_equal(row.result().array(), stays.result().array())
