"""Steps that several ranks take together equal those of one (design §8).

Ranks are threads here, over real gloo groups; `bench_sp` runs them as processes.
"""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.sequence_parallel import GangExchange, share_of
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.batch.transfer import mapped
from maskserve_engine.cache.entries import AnchorEntry, Coded, encode
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.layers.low_rank import Factors
from maskserve_engine.planning.degree_costs import sent_bytes
from maskserve_engine.planning.flops import RowTokens
from tests.fakes.jobs import config_of, encode_case, guided, random_case, tolerance
from tests.fakes.pipelines import diffusers_latents
from tests.fakes.tiny_model import with_heads
from tests.support.cached_rows import KINDS, Primed, assert_equal, cached
from tests.support.draws import fresh_seed
from tests.support.ranks import CPU, Rank, by_ranks

pytestmark = pytest.mark.spread("model", "seed")

HEADS = 6
"""Four ranks have 2, 1, 2 and 1 heads."""


class Model:
    """A tiny model with more heads."""

    def __init__(self, tiny: Path, folder: Path, heads: int = HEADS, width: int = 32) -> None:
        with_heads(tiny, folder, heads, width)
        config = config_of(folder, model={"outside_noise": "edit"})
        self.folder = folder
        self.encoder: Encoder = load_encoder(config)
        adapter = load_adapter(config)
        assert isinstance(adapter, FluxAdapter)
        self.adapter = adapter

    def job(self, seed: int, **settings: Any) -> EditJob:
        rng = np.random.default_rng(seed)
        if self.encoder.spec.true_cfg and seed % 2:
            settings = {**guided(rng), **settings}
        return encode_case(self.encoder, random_case(rng, **settings), f"edit-{seed}")


MODELS = ("fill", "inpaint")


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest,
    tiny_flux: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Model:
    return Model(tiny_flux[request.param], tmp_path_factory.mktemp("heads") / request.param)


@pytest.mark.parametrize(
    ("model", "count"),
    [*((name, count) for name in MODELS for count in (2, 4)), ("reference", 4)],
    indirect=["model"],
)
def test_dense_rows_equal_diffusers(model: Model, count: int) -> None:
    from diffusers import DiffusionPipeline

    fill = model.adapter.spec.semantics.masked_picture
    pipeline: Any = DiffusionPipeline.from_pretrained(model.folder)
    pipeline.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(count)
    settings = [{}, {} if fill else guided(rng), {}]
    cases = [random_case(rng, **overrides) for overrides in settings]
    jobs = [encode_case(model.encoder, case, str(i)) for i, case in enumerate(cases)]
    expected = [diffusers_latents(pipeline, case) for case in cases]

    def run(rank: Rank) -> list[Any]:
        return rank.run([rank.adapter.dense_row(job) for job in jobs], ())

    ranks = by_ranks(model.adapter, count, run)
    for results in ranks:
        for one, other in zip(results, expected, strict=True):
            assert np.abs(one - other).max() <= tolerance(other)
    for results in ranks[1:]:  # the same bytes, so that ranks never part
        assert all(np.array_equal(a, b) for a, b in zip(results, ranks[0], strict=True))


# Each run holds both to the pipeline of one process: ours above, diffusers holds its own.
@pytest.mark.slow
def test_dense_rows_equal_diffusers_own_parallelism(tiny_fill: Path, tmp_path: Path) -> None:
    """Two processes of `enable_parallelism` (Ulysses over gloo), and two ranks of ours."""
    model = Model(tiny_fill, tmp_path / "model")
    case = random_case(np.random.default_rng(31), num_inference_steps=4)
    (tmp_path / "case").write_bytes(pickle.dumps(case))
    command = [sys.executable, "-m", "tests.support.diffusers_parallel"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    job = encode_case(model.encoder, case, "edit")
    ranks = by_ranks(model.adapter, 2, lambda rank: rank.run([rank.adapter.dense_row(job)], ()))
    for process in processes:
        errors = process.communicate(timeout=120.0)[1]
        assert process.returncode == 0, errors
    expected = np.load(tmp_path / "latents.npy")
    for (result,) in ranks:
        assert np.abs(result - expected).max() <= tolerance(expected)


def one_token(job: EditJob) -> EditJob:
    """An edit of a single token."""
    mask = np.zeros_like(job.edit_mask)
    mask[5, 7] = 255
    return replace(job, edit_mask=mask)


def lora_of(adapter: FluxAdapter) -> Any:
    torch.manual_seed(5)
    places = {n: p for n, p in adapter.places.items() if "transformer_blocks" in n}
    return adapter.low_rank(
        {n: Factors(torch.randn(2, p.shape[1]), torch.randn(p.shape[0], 2) * 0.02)
         for n, p in places.items()}
    )  # fmt: skip


MIXES = [
    (("dense",) * 3, "model"),
    *[((kind,) * 3, format) for kind in ("project", "kv")
      for format in ("model", "int8", "float8", "int4")],
    (("dense", "kv", "project"), "int8"),
    (("kv", "dense", "kv"), "int4"),
]  # fmt: skip
"""How blocks run and what entries are stored in."""


@pytest.mark.parametrize(
    ("model", "kinds", "format"),
    [(name, *mix) for name in MODELS for mix in MIXES] + [("reference", *MIXES[-2])],
    indirect=["model"],
)
def test_a_mixed_batch_equals_that_of_one_rank(
    model: Model, kinds: tuple[str, ...], format: str
) -> None:
    """Dense, cached and priming rows, one with a LoRA, some with two passes; one active token."""
    number = MIXES.index((kinds, format))
    count = (2, 4)[(number + (model.adapter.spec.semantics.masked_picture)) % 2]
    jobs = [model.job(seed, num_inference_steps=3) for seed in range(number, number + 3)]
    jobs.append(one_token(model.job(9, num_inference_steps=4, strength=1.0)))
    primed = [Primed(model.adapter, model.encoder, job, format=format) for job in jobs]
    lora = lora_of(model.adapter)

    def run(rank: Rank) -> tuple[list[Any], Any]:
        rows: list[Any] = [cached(rank.replay, *pair) for pair in zip(jobs, primed, strict=True)]
        rows.append(rank.adapter.dense_row(jobs[0]))
        rank.adapter.attach(rows[1], jobs[1], ((lora, 0.7),))
        priming = rank.adapter.priming_row(
            jobs[0], [entry.anchor for entry in primed[0].entries],
            model.encoder.encode_prompt(""), 7, [frozenset({"h", "kv"})] * 3, format,
        )  # fmt: skip
        rank.adapter.step([*rows, priming], None, [None] * 6, rank.all)
        return rank.run(rows, kinds), priming.take_entry()

    [(expected, entry)] = by_ranks(model.adapter, 1, run)
    for rank, (by_rank, rank_entry) in enumerate(by_ranks(model.adapter, count, run)):
        for one, other in zip(by_rank, expected, strict=True):
            assert_equal(one, other)
        check_entry(rank_entry, entry, share_of(HEADS, rank, count))


def check_entry(rank_entry: AnchorEntry, entry: AnchorEntry, heads: tuple[int, int]) -> None:
    """Hidden states are whole, keys and values of the rank's heads. What is rounded may differ by a
    step of the format where the numbers before it differ in their last digits.
    """
    for block, whole in zip(rank_entry.blocks, entry.blocks, strict=True):
        pairs: list[Any] = [
            (block.hidden, whole.hidden),
            *zip(
                block.part("kv"), [k.columns(*heads, HEADS) for k in whole.part("kv")], strict=True
            ),
        ]
        for pair, other in pairs:
            x, y = decoded(pair), decoded(other)
            is_match = (x - y).abs() > 1e-4 * max(1.0, float(y.abs().max()))
            assert is_match.float().mean() <= (0.0 if pair.format == "model" else 0.02)


def decoded(coded: Coded) -> torch.Tensor:
    width = coded.data.shape[1] * (2 if coded.format == "int4" else 1)
    out = torch.empty(len(coded.data), width)
    coded.into(out)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_a_random_degree_at_each_step_changes_nothing(model: Model, seed: int) -> None:
    jobs = [model.job(30 + seed, num_inference_steps=11, strength=1.0),
            model.job(40 + seed, num_inference_steps=11, strength=1.0)]  # fmt: skip
    primed = [Primed(model.adapter, model.encoder, job, stride=2) for job in jobs]
    kinds = random.Random(seed).choices(KINDS, k=3)

    def rows(rank: Rank) -> list[Any]:
        return [cached(rank.replay, jobs[0], primed[0]), rank.adapter.dense_row(jobs[1])]

    [expected] = by_ranks(model.adapter, 1, lambda rank: rank.run(rows(rank), kinds))
    travelling: list[tuple[Any, int]] = []
    barrier = threading.Barrier(4)

    def run(rank: Rank) -> list[Any]:
        dice, rank_rows = random.Random(seed), rows(rank)
        for _ in range(11):
            gang = dice.choice([range(1), range(3, 4), range(2), range(2, 4), range(4)])
            if rank.rank in gang:
                rank.replay.step(rank_rows, kinds, rank.gang(gang))
            if rank.rank == gang.start:
                travelling[:] = [(rank.adapter.carried(row), row.step) for row in rank_rows]
            barrier.wait(20.0)
            if rank.rank not in gang:
                for row, (carried, steps) in zip(rank_rows, travelling, strict=True):
                    rank.adapter.follow(row, mapped(carried, torch.Tensor.clone), steps)
            barrier.wait(20.0)
        return [row.result().array() for row in rank_rows]

    for by_rank in by_ranks(model.adapter, 4, run):
        for one, other in zip(by_rank, expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_step_caches_are_those_of_one_rank_that_forgets_as_often(model: Model, seed: int) -> None:
    """Ranks keep their heads of what an anchor leaves. Where others take the next step it is an
    anchor, as on a rank that has lost what it kept.
    """
    job = model.job(50 + 2 * seed, num_inference_steps=14, strength=1.0)
    text = bool(seed % 2)
    plan = RefreshSchedule(frozenset({0, 3, 6, 11}), "model", text)
    dice, gangs = random.Random(seed), list[range]()
    while len(gangs) < 14:
        ways = [range(1), range(3, 4), range(2), range(2, 4), range(4)]
        gang = dice.choice([way for way in ways if way not in gangs[-1:]])
        gangs += [gang] * (dice.choice([2, 4, 5]) if gangs else 2)
    kinds = plan_of_kinds(("kv",) * model.adapter.blocks)
    anchors: list[bool] = []

    def alone(rank: Rank) -> Any:
        row = rank.adapter.refreshing_row(job, plan)
        reader = StepCacheReader(row, model.adapter.blocks)
        for step in range(14):
            if step and gangs[step] != gangs[step - 1]:
                carried = mapped(rank.adapter.carried(row), torch.Tensor.clone)
                rank.adapter.follow(row, carried, step)
            entry = None if step in plan.dense else reader.entry_at(step)
            anchors.append(entry is None)
            rank.adapter.step([row], entry and kinds, [entry])
        return row.result().array()

    [expected] = by_ranks(model.adapter, 1, alone)
    assert sum(anchors) > 1
    barrier, travelling = threading.Barrier(4), list[Any]()
    has: dict[int, bool] = {}

    def run(rank: Rank) -> Any:
        row = rank.adapter.refreshing_row(job, plan)
        reader = StepCacheReader(row, model.adapter.blocks)
        for step, gang in enumerate(gangs[:14]):
            entry = None
            if rank.rank in gang and step not in plan.dense:
                share = share_of(HEADS, rank.rank - gang.start, len(gang))
                entry = reader.entry_at(step, heads=(*share, HEADS) if len(gang) > 1 else None)
            has[rank.rank] = entry is not None
            barrier.wait(20.0)
            reads = all(has[member] for member in gang)  # what one has to do without, all do
            barrier.wait(20.0)
            if rank.rank in gang:
                assert reads != anchors[step]
                source = entry if reads else None
                rank.adapter.step([row], source and kinds, [source], rank.gang(gang))
            if rank.rank == gang.start:
                travelling[:] = rank.adapter.carried(row)
            barrier.wait(20.0)
            if rank.rank not in gang:
                carried = mapped(tuple(travelling), torch.Tensor.clone)
                rank.adapter.follow(row, carried, step + 1)
            barrier.wait(20.0)
        return row.result().array()

    for by_rank in by_ranks(model.adapter, 4, run):
        assert_equal(by_rank, expected)


def test_fewer_tokens_than_ranks(model: Model) -> None:
    """Cached rows of one active token and a prompt of three."""
    job = one_token(model.job(8))
    short = {name: x[:3] if x.ndim == 2 else x for name, x in job.conditioning.items()}
    job = replace(job, conditioning=short, negative=None)
    primed = Primed(model.adapter, model.encoder, job)
    for kind in KINDS:

        def run(rank: Rank, kind: str = kind) -> Any:
            return rank.run([cached(rank.replay, job, primed)], (kind,) * 3)[0]

        [expected] = by_ranks(model.adapter, 1, run)
        for by_rank in by_ranks(model.adapter, 4, run):
            assert_equal(by_rank, expected)


FORMATS = ("model", "int8", "float8", "int4")


@pytest.mark.parametrize(
    ("heads", "width", "count"),
    [
        (3, 32, 2),
        (5, 32, 4),
        (6, 16, 2),
        # More ranks do what few do; `share_of` is held for any number, below.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((5, 32, 2), (6, 16, 4), (9, 32, 8))
        ),
    ],
)
def test_heads_that_do_not_divide(
    tiny_fill: Path, tmp_path: Path, heads: int, width: int, count: int
) -> None:
    """Dense rows and cached ones of one token and of many, in one batch, whatever their formats and
    kinds. Of heads half as wide as int4's groups of channels, ranks cut what they have decoded.
    """
    seed = fresh_seed()
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    model = Model(tiny_fill, tmp_path / "model", heads, width)
    jobs = [model.job(int(rng.integers(2**31)), num_inference_steps=3, strength=1.0)
            for _ in range(2)]  # fmt: skip
    jobs.append(one_token(jobs[0]))
    formats = ["model", "int8", *FORMATS] if heads * width % 32 == 0 else FORMATS[:3]
    for number, format in enumerate(formats):
        kinds = tuple(map(str, rng.choice(KINDS, 3))) if number > 1 else (KINDS[number],) * 3
        primed = [Primed(model.adapter, model.encoder, job, format=format) for job in jobs]

        def run(
            rank: Rank, kinds: tuple[str, ...] = kinds, primed: list[Primed] = primed
        ) -> list[Any]:
            rows: list[Any] = [cached(rank.replay, *e) for e in zip(jobs, primed, strict=True)]
            return rank.run([*rows, rank.adapter.dense_row(jobs[1])], kinds)

        [expected] = by_ranks(model.adapter, 1, run)
        for by_rank in by_ranks(model.adapter, count, run):
            for one, other in zip(by_rank, expected, strict=True):
                assert_equal(one, other)


def test_shares_differ_by_one_and_the_first_is_as_large_as_any() -> None:
    for length in range(40):
        for count in range(1, 9):
            shares = [share_of(length, rank, count) for rank in range(count)]
            sizes = [end - begin for begin, end in shares]
            assert sizes[0] == -(-length // count)
            assert min(sizes) == length // count
            tokens = [token for share in shares for token in range(*share)]
            assert tokens == list(range(length))


@pytest.mark.parametrize("kind", ["project", "kv"])
def test_a_rank_may_load_its_heads_alone(model: Model, kind: str) -> None:
    job = model.job(12, num_inference_steps=3, strength=1.0)
    primed = Primed(model.adapter, model.encoder, job, format="int8")

    def run(rank: Rank) -> Any:
        row: Any = cached(rank.replay, job, primed)
        if rank.all is not None:
            selection = row.image.unmasked.selection
            heads = share_of(HEADS, rank.rank, rank.all.count)
            row.image.unmasked.selection = selection.of_heads(*heads, HEADS)
            rank.replay.follow(row, row)
        return rank.run([row], (kind,) * 3)[0]

    [expected] = by_ranks(model.adapter, 1, run)
    for by_rank in by_ranks(model.adapter, 4, run):
        assert_equal(by_rank, expected)


def test_the_bytes_that_travel_are_those_counted(model: Model) -> None:
    """The bytes are those of the blocks and of the answer that all ranks get."""
    job, count = model.job(6, num_inference_steps=3, strength=1.0), 2
    primed = Primed(model.adapter, model.encoder, job)
    _, height, width = job.moments.shape
    work, text = model.adapter.work(height, width), len(job.conditioning["prompt_embeds"])

    for make in (lambda rank: rank.adapter.dense_row(job),
                 lambda rank: cached(rank.replay, job, primed)):  # fmt: skip

        def run(rank: Rank, make: Any = make) -> tuple[int, torch.Tensor]:
            row = make(rank)
            rank.replay.step([row], ("kv",) * 3, rank.all)
            assert isinstance(rank.all, GangExchange)
            return rank.all.sent, row.latents

        ranks = by_ranks(model.adapter, count, run)
        latents = ranks[0][1]
        row = RowTokens((float(len(latents)),), float(text))
        expected = count * sent_bytes(work, row, count, value_bytes=4)
        expected += latents.nbytes * (count - 1)
        assert sum(sent for sent, _ in ranks) == round(expected)


def test_what_ranks_cannot_share_is_refused(model: Model) -> None:
    class Many:
        rank, count, deals = 0, 8, False

    dense = model.job(2)
    with pytest.raises(ValueError, match="8 ranks cannot share 6 heads"):
        model.adapter.step([model.adapter.dense_row(dense)], None, None, Many())  # type: ignore[arg-type]
    coded = encode(torch.randn(4, 96), "int4")
    with pytest.raises(ValueError, match="int4 has one per 32"):
        coded.columns(0, 1, 2)


def test_a_silent_rank_is_an_error_and_no_hang() -> None:
    store = HashStore()
    joined = threading.Barrier(2)

    def run(rank: int) -> str:
        ranks = GangExchange(store, rank, 2, CPU, 2.0)
        x = torch.ones(3)
        ranks.all_to_all([x, x], [3, 3])
        joined.wait(20.0)
        if rank:
            return ""
        with pytest.raises(RuntimeError) as raised:
            ranks.all_to_all([x, x], [3, 3])
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run, range(2)))
    assert answers[0]
