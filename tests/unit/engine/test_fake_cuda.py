"""Launches and copies of a step on a CUDA device, counted without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from maskserve_benchmarks.published_models import SD21
from maskserve_benchmarks.steps.replay import plan_of_kinds
from maskserve_benchmarks.steps.unet_rig import UNETS, UnetBench, build_unet
from maskserve_common.observations import Observations
from maskserve_engine.base.device_clock import Span, mark
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.cache.loader import Copying
from maskserve_engine.cache.reader import EntryReader
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.conditioning import UnetBlend
from maskserve_engine.families.unet.forward import PackedPasses
from maskserve_engine.families.unet.latents import PackedLatents
from maskserve_engine.families.unet.rows import Guidance
from maskserve_engine.loop.local_executor import LocalExecutor, RowRecord
from maskserve_engine.loop.measured_costs import MeasuredCosts, QueuedStep, StepTimes
from maskserve_engine.loop.status_publisher import new_counters
from maskserve_engine.planning.cost_model import H100, estimate
from maskserve_engine.requests.executor import Read, StepInput
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_studies.kernels.kernel_counts import (
    CASES,
    MIXED,
    TABLE,
    UNET_CASES,
    Case,
    UnetCase,
    count,
    fake_bench,
    steady_steps,
    unet_entry_change,
    unet_step,
)
from maskserve_studies.kernels.launch_log import Log
from tests.fakes.jobs import config_of, encode_case, guided, random_case, unet_case
from tests.fakes.tiny_unet import samplers

pytestmark = pytest.mark.each_value

COMMITTED = json.loads(TABLE.read_text(encoding="utf-8"))
SMALL = {
    **SD21,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (320, 640),
    "attention_head_dim": (5, 10),
    "layers_per_block": 1,
}
"""A UNet with two levels of SD 2.1, for what is the same in each of its layers."""
KEEPS = (
    "keep_tokens.", "extrapolation.", "moments.", "latents.", "batch.",
)  # fmt: skip
"""Modules whose launches, at a refresh step, are a step cache's and the sampler's."""
LAUNCHES_SMALL = 31
"""Launches of its step with a halo; recorded, of each row's."""
ONE_OF_A_SORT = (
    "kv int4, 4 rows, mixed",
    "kv int8, 3 rows beside a dense one",
    "mixed plan, int8, 4 rows, mixed",
    "kv int8, 1 guided row",
    "kv int8, 2 rows beside a priming one",
    "kv int8, 1 row, fp8, graphs",
    "SD 2.1, kv int8, 4 rows, mixed",
)
"""Cases of the table that each run counts. Slow runs count the others, whose rows, weights and
formats are each in one of these. Rows of one graph that differ, and a UNet's halo, are counted
below, with fewer blocks.
"""


def cases_of(table: Sequence[Any]) -> list[Any]:
    return [
        pytest.param(
            case, id=case.name, marks=[pytest.mark.slow] * (case.name not in ONE_OF_A_SORT)
        )
        for case in table
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of SMALL among the models that steps are counted of."""
    monkeypatch.setitem(UNETS, "small", SMALL)
    return "small"


@pytest.mark.parametrize("case", cases_of(CASES))
def test_a_steady_step_copies_nothing_and_launches_no_more_than_the_table_says(case: Case) -> None:
    assert count(case).per_block <= COMMITTED[case.name]["per_block"] + 0.1
    if not case.primes:
        for blocks in ((4, 1), (1, 4)) if case.kind == "mixed" else ((1, 1),):
            assert [log.copies for log in steady_steps(case, blocks)] == [[], []]


@pytest.mark.parametrize(
    "preset",
    [
        "kontext-1024",
        "klein-4b-1024",
        "klein-9b-kv-1024",
        "qwen-image-1024",
        "qwen-edit-1024",
        "qwen-2511-1024",
        "qwen-2.1-1024",
        "z-image-1024",
    ],
)
def test_a_steady_step_of_other_models_of_true_width_copies_nothing(preset: str) -> None:
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int4", preset)
        for kind in ("kv",) if bench.shown_tokens else ("kv", "project"):
            bench.fill_entry(kind)
            rows = [bench.row(ratio, seed) for seed, ratio in enumerate((0.11, 0.2, None))]
            for _ in range(2):
                with cuda.watch() as log:
                    bench.step(rows, kind)
            assert not log.copies


# The case "kv int8, 1 row, fp8, graphs" counts fp8's.
@pytest.mark.parametrize("weights", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_recorded_flux_step_asks_for_two_launches_a_block(weights: str) -> None:
    """One places entries, one is the piece of a graph behind it; further rows ask for none."""

    def launches(recorded: bool, rows: int, blocks: tuple[int, int]) -> int:
        case = Case("", MIXED[:rows], weights=weights, recorded=recorded)
        _, steady = steady_steps(case, blocks)
        assert steady.copies == []
        return steady.launches

    small, more, plain = (
        launches(*args) for args in ((True, 1, (1, 1)), (True, 1, (2, 2)), (False, 1, (2, 2)))
    )
    assert more - small == 4
    assert plain > 4 * (more - small) + small
    assert launches(True, 2, (1, 1)) <= small + 1


@pytest.mark.parametrize("rows", [1, 2])
def test_a_recorded_step_with_loras_asks_for_as_many_launches_as_one_without(rows: int) -> None:
    """Any LoRAs of its bucket of ranks replay it; the tables of others go in transfers that nobody
    waits for.
    """
    plain, with_loras = (
        steady_steps(Case("", MIXED[:rows], loras=loras, recorded=True), (1, 1))[1]
        for loras in (0, rows)
    )
    assert with_loras.copies == []
    assert with_loras.kernels["a graph"] == plain.kernels["a graph"] > 0
    assert with_loras.launches == plain.launches
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int8")
        recorder = Graphs.on(DEVICE, torch.bfloat16)
        bench.weights = replace(bench.weights, graphs=recorder, placed_bytes=0)
        bench.fill_entry("kv")
        batch = [bench.row(ratio, seed) for seed, ratio in enumerate(MIXED[:rows])]
        for ranks in (16, 16, 9):
            for row in batch:
                row.recorded, row.adapters = True, ((bench.lora(ranks), 0.8),)
            for _ in range(3):
                with cuda.watch() as log:
                    bench.step(batch, "kv")
                assert [copy for copy in log.copies if "waits" in copy] == []
                assert ranks == 16 or log.kernels["a graph"] == plain.kernels["a graph"]


@dataclass
class Added:
    """Residuals of a ControlNet that are there."""

    residual: Tensor

    @property
    def passes(self) -> tuple[Added]:
        return (self,)

    @property
    def for_lookahead(self) -> Added:
        return self

    def after(self, number: int) -> Tensor | None:
        return None if number % 2 else self.residual


@pytest.mark.parametrize("rows", [1, 2])
def test_a_recorded_step_with_controlnets_asks_for_one_more_piece_a_block(rows: int) -> None:
    """And for one addition wherever a row has a residual. A place without any costs the piece."""

    def launches(blocks: tuple[int, int], *, controlled: bool) -> int:
        with FakeCuda() as cuda:
            bench = fake_bench(blocks, "int8")
            recorder = Graphs.on(DEVICE, torch.bfloat16)
            bench.weights = replace(bench.weights, graphs=recorder, placed_bytes=0)
            bench.fill_entry("kv")
            batch = [bench.row(ratio, seed) for seed, ratio in enumerate(MIXED[:rows])]
            for row in batch:
                row.recorded = True
                if controlled:
                    residual = torch.empty(row.computed, bench.weights.width, device=DEVICE)
                    row.residuals = Added(residual.bfloat16())
            for _ in range(4):
                with cuda.watch() as log:
                    bench.step(batch, "kv")
        assert log.copies == []
        return log.launches

    for blocks in ((1, 1), (2, 2)):
        plain, more = (launches(blocks, controlled=controlled) for controlled in (False, True))
        assert more - plain == sum(blocks) + rows * sum(blocks) // 2


def test_a_step_between_refresh_steps_copies_nothing_and_adds_a_kernel_a_block() -> None:
    """The one that places values is the one that places entries; one more adds their change."""

    def launches(blocks: tuple[int, int], *, with_anchors: bool) -> int:
        with FakeCuda() as cuda:
            bench = fake_bench(blocks, "int8")
            bench.fill_entry("kv")
            make = bench.refreshing_row if with_anchors else bench.row
            rows = [make(ratio, seed) for seed, ratio in enumerate(MIXED[:2])]
            for step in (3, 4):
                with cuda.watch() as log:
                    bench.between(rows, step)
        assert log.copies == []
        return log.launches

    (anchor_launches, more), (plain, more_plain) = (
        [launches(blocks, with_anchors=with_anchors) for blocks in ((1, 1), (2, 2))]
        for with_anchors in (True, False)
    )
    assert more - anchor_launches <= more_plain - plain + 2


def test_flux_steps_of_other_kernels_are_not_recorded() -> None:
    """These are steps with priming rows and projected blocks."""
    for case in (
        Case("", (0.1,), primes=True, recorded=True),
        Case("", (0.1,), "project", recorded=True),
    ):
        _, steady = steady_steps(case, (1, 1))
        assert "a graph" not in steady.kernels


@pytest.mark.parametrize("kind", ["kv", pytest.param("dense", marks=pytest.mark.slow)])
def test_any_number_of_loras_adds_two_kernels_per_product(kind: str) -> None:
    """16 per double block, 4 per single one; a steady step copies nothing.

    And more in a double block, which plain products do without: GELU of both streams, and where
    rows are not alike these joined before they are brought into their order.
    """
    more = 3 if kind == "kv" else 2
    plain = Case("none", (*MIXED[:3], None), kind)

    def launches(case: Case, blocks: tuple[int, int]) -> int:
        first, steady = steady_steps(case, blocks)
        assert first.copies + steady.copies == []
        return steady.launches

    one, four = replace(plain, loras=1), replace(plain, loras=4)
    added = [launches(one, blocks) - launches(plain, blocks) for blocks in ((1, 1), (2, 1))]
    assert added == [20 + more, 36 + 2 * more]
    assert launches(four, (1, 1)) == launches(one, (1, 1))


def test_who_joins_with_a_lora_is_never_waited_for() -> None:
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        rows = [bench.row(ratio, seed) for seed, ratio in enumerate(MIXED[:4])]
        for row in rows[:3]:
            row.adapters = ((bench.lora(16), 0.8),)
        with cuda.watch() as log:
            for batch in (rows[:2], rows, rows[2:], [rows[3]], [rows[0]]):
                bench.step(batch, "kv")
    assert log.kernels["maskserve.expand.default"] > 0
    assert [copy for copy in log.copies if "waits" in copy] == []


@pytest.mark.parametrize("case", cases_of(UNET_CASES))
def test_a_unet_step_copies_nothing_and_launches_no_more_than_the_table_says(
    case: UnetCase,
) -> None:
    log, _ = unet_step(case)
    assert log.copies == []
    assert log.launches <= COMMITTED[case.name]["step"]


@pytest.mark.parametrize(
    ("halo", "between"), [(0, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_each_row_with_a_tile_replays_a_step_that_costs_the_host_little(
    halo: int, between: bool
) -> None:
    """Four of them launch a fourth of what a step of all of them launches kernel by kernel."""
    case = UnetCase(
        "tiles", "sdxl-1024", MIXED[:4], halo=halo, guided=True, between_refreshes=between
    )
    one, two, four, plain = (
        unet_step(replace(case, ratios=MIXED[:rows], recorded=recorded))[0]
        for rows, recorded in ((1, True), (2, True), (4, True), (4, False))
    )
    assert one.launches <= 190
    by_row = two.launches - one.launches
    assert by_row <= 190
    assert four.launches <= two.launches + 2 * by_row <= plain.launches // 4
    assert all(log.copies == [] for log in (one, two, four, plain))


@pytest.mark.parametrize("blends", [False, True])
@pytest.mark.parametrize(
    ("name", "launches"), [("ddim", 13), ("euler", 13), ("dpm2m", 14), ("pndm", 18)]
)
def test_a_sampler_launches_as_much_for_any_number_of_guided_cached_rows(
    name: str, launches: int, blends: bool, small: str
) -> None:
    """Base models, which blend, take no condition and launch three more."""
    sampler = samplers()[name]
    with FakeCuda() as cuda, torch.inference_mode():
        model = fake_weights(build_unet(small, torch.bfloat16, torch.device("meta")))
        bench = UnetBench(
            small, torch.bfloat16, DEVICE, "int8", model=model, steps=9, sampler=sampler
        )
        bench.fill_entry("kv")
        rows = [bench.row(0.11, seed) for seed in range(4)]
        for row in rows:
            row.guidance = Guidance(row.prompt, 7.5)
            picture = row.latents.bfloat16()
            if blends:
                row.blend = UnetBlend(picture[:1], picture, picture, soft=False)
            else:
                row.condition = picture
        for batch in (rows, rows[:1]):
            latents = PackedLatents(batch)
            answers = [torch.stack([row.latents.bfloat16()] * 2) for row in batch]
            for _ in range(4):
                with cuda.watch() as log:
                    latents.samples()
                    latents.advance(answers)
                assert log.copies == []
                assert log.launches == launches + (3 if blends else 0)


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_row_that_turns_to_another_entry_reads_all_of_its_maps_by_one_kernel(
    recorded: bool, small: str
) -> None:
    """And its table of addresses goes in a transfer that nobody waits for."""
    case = UnetCase("tiles", small, MIXED[:2], halo=4, recorded=recorded)
    steady, with_change = unet_entry_change(case)
    assert steady.copies == []
    assert not recorded or steady.launches <= LAUNCHES_SMALL * len(case.ratios)
    assert with_change.launches == steady.launches + 2
    assert with_change.kernels["maskserve.read_rings.default"] == 2
    assert len(with_change.copies) == 2
    assert "waits" not in "".join(with_change.copies)


@pytest.mark.parametrize("halo", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_loras_adds_two_kernels_per_layer_of_a_unet(halo: int, small: str) -> None:
    """Convolutions too, of which the library would launch three for each pass with a LoRA."""
    ratios = MIXED[:1] if halo else MIXED[:2]
    case = UnetCase("LoRAs", small, ratios, halo=halo, guided=True, recorded=False)
    log, _ = unet_step(replace(case, loras=len(ratios)))
    assert log.copies == []
    recorded, plain = (
        unet_step(replace(case, loras=loras, recorded=True))[0] for loras in (len(ratios), 0)
    )
    assert recorded.copies == []
    assert recorded.launches == plain.launches
    convolved, multiplied, expanded = (
        log.kernels[f"maskserve.{name}.default"] for name in ("shrink_map", "shrink", "expand")
    )
    # 4 blocks with queries, keys and values as one product and 5 others, two ends of each stack,
    # and what 8 ResNets read of the time, which two layers embed; the prompts' keys and values are
    # kept. Of ResNets two convolutions, and another where the width changes; two that scale, and
    # the first and the last.
    assert (convolved, multiplied) == (8 * 2 + 5 + 2 + 2, 4 * 6 + 4 * 2 + 8 + 2)
    assert expanded == convolved + multiplied
    assert log.kernels["convolution.default"] == convolved


def test_a_recorded_refresh_step_of_a_unet_launches_what_step_caches_keep(small: str) -> None:
    """Each row has keys and values, stacks' ends, and what lies round its tile."""

    def refresh(ratios: Sequence[float], *, recorded: bool) -> Log:
        with FakeCuda() as cuda:
            model = fake_weights(build_unet(small, torch.bfloat16, torch.device("meta")))
            bench = UnetBench(small, torch.bfloat16, DEVICE, "int8", 0, model, 9)
            if recorded:
                recorder = Graphs.on(DEVICE, torch.bfloat16)
                bench.weights, bench.buckets = replace(bench.weights, graphs=recorder), True
            schedule = RefreshSchedule(frozenset({0}), "int8", text=False)
            rows = [
                bench.row(ratio, seed, guided=True, schedule=schedule)
                for seed, ratio in enumerate(ratios)
            ]
            for _ in range(4):
                with cuda.watch() as log:
                    bench.step(rows, "kv")
        assert log.copies == []
        return log

    for ratios in (MIXED[:1], MIXED[:2]):
        plain, pieces = (refresh(ratios, recorded=recorded) for recorded in (False, True))
        kept_launches = sum(
            count for place, count in plain.places.items() if place.startswith(KEEPS)
        )
        assert 0 < pieces.kernels["a graph"] < 40 * len(ratios)
        copied = 8 * len(ratios)  # inputs
        assert pieces.launches <= kept_launches + pieces.kernels["a graph"] + copied


def test_a_refresh_step_of_sdxl_keeps_each_part_and_each_map_by_one_launch() -> None:
    """Once for each pass. Plain operations launch 7,671."""
    log, blocks = unet_step(UnetCase("", "sdxl-1024", (0.11,), guided=True, refreshes=True))
    assert log.copies == []
    ends, maps = 11, 48
    stores = (
        log.kernels["maskserve.keep_tokens.default"],
        log.kernels["maskserve.keep_ring.default"],
    )
    assert stores == (2 * (blocks + ends), 2 * maps)
    assert log.launches <= 2 * sum(stores)


def test_who_joins_and_leaves_is_never_waited_for() -> None:
    """Packing anew sends its indices in transfers that the host does not wait for."""
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        rows = [bench.row(ratio, seed) for seed, ratio in enumerate((*MIXED[:3], None))]
        with cuda.watch() as log:
            for batch in (rows[:2], rows[:3], rows, rows[1:], [rows[3]], [rows[0]]):
                bench.step(batch, "kv")
    assert log.launches > 0
    assert [copy for copy in log.copies if "waits" in copy] == []


@pytest.mark.parametrize("semantics", ["fill", "inpaint"])
def test_a_row_is_admitted_with_one_copy_that_nobody_waits_for(
    semantics: str, tiny_fill: Path, tiny_inpaint: Path
) -> None:
    """`.to(device)` of each tensor makes 7 to 13."""
    config = config_of(tiny_fill if semantics == "fill" else tiny_inpaint)
    real, encoder = load_adapter(config), load_encoder(config)
    assert isinstance(real, FluxAdapter)
    settings = {} if semantics == "fill" else guided(np.random.default_rng(1))
    job = encode_case(encoder, random_case(np.random.default_rng(1), **settings), "edit")
    schedule, blocks = real._preparation.schedule(job), (frozenset({"kv"}),) * real.blocks
    prompt, anchors = encoder.encode_prompt(""), real.anchors(64, 4, 1)
    with FakeCuda() as cuda:
        with torch.device("meta"):
            model = FluxTransformer2DModel.from_config(real.model.config)
        adapter = FluxAdapter(real.spec, fake_weights(model), real.sampler)
        adapter._preparation.schedule = lambda job: schedule  # type: ignore[method-assign]
        adapter.dense_row(job)  # its size's rotary factors are made once
        makers: tuple[Callable[[], object], ...] = (
            lambda: adapter.dense_row(job),
            lambda: adapter.cached_row(job, 7),
            lambda: adapter.priming_row(job, anchors, prompt, 7, blocks, "int8"),
        )
        for make in makers:
            with cuda.watch() as log:
                make()
            assert len(log.copies) == 1, log.copies
            assert "waits" not in log.copies[0]


@pytest.mark.parametrize("halo", [0, 2])
def test_a_unet_row_is_admitted_and_packed_with_copies_that_nobody_waits_for(
    tiny_unets: dict[str, Path], halo: int
) -> None:
    """`nonzero` on the device, and `.to(device)` of each index, wait."""
    cache = {"entry_kind": "kv", "conv_halo": halo}
    config = config_of(tiny_unets["sdxl-base"], cache=cache)
    real, encoder = load_adapter(config), load_encoder(config)
    assert isinstance(real, UnetAdapter)
    settings = {"guidance_scale": 7.5, "mask_ring": 0}
    plain = encode_case(encoder, unet_case(np.random.default_rng(1), **settings), "edit")
    job = real.prepare_template(real.prepare(plain), 7)
    _, height, width = job.moments.shape
    depth = len(real.model.down_blocks)
    with FakeCuda() as cuda:
        adapter = UnetAdapter(
            real.spec, fake_weights(real.model.to("meta")), real.sampler, exact_vae=False,
            halo=halo,
        )  # fmt: skip
        with cuda.watch() as log, torch.inference_mode():
            row: Any = adapter.cached_row(job, 7)
            row.entry = object()
            PackedPasses(row.passes(), (height, width), depth, DEVICE)
        assert len(log.copies) == 2, log.copies
        assert "waits" not in "".join(log.copies)


def test_what_a_step_took_is_known_without_waiting_for_it() -> None:
    """Steps, and their waits for entries, are booked once the device has done them."""
    counters, observed = new_counters(), Observations()
    with FakeCuda() as cuda:
        bench = fake_bench((1, 1), "int8")
        bench.fill_entry("kv")
        row = bench.row(0.11, 0)
        handle = row.entry
        assert handle is not None
        handle.loader.mover.device = DEVICE
        late = torch.cuda.Event()
        late.record()
        arrived = handle.load.arrived[0, "kv"]
        arrived.copying = Copying(late, ())
        parts: Any = SimpleNamespace(
            device=DEVICE,
            blocks=2,
            step=lambda rows, plan, reads, exchange: bench.step(rows, plan.kinds),
        )
        executor = LocalExecutor(parts, parts)
        reader = cast(EntryReader, SimpleNamespace(entry=handle))
        executor.rows["edit"] = RowRecord(None, cast(EditJob, None), row, reader)
        reads, plan = (Read("edit", whole=False, required=False),), plan_of_kinds(("kv", "kv"))
        costs = MeasuredCosts(estimate(H100))
        times = StepTimes(costs, handle.loader.take_moves, counters, observed)
        with cuda.watch() as log:
            for number in range(3):
                took = executor.run(StepInput(number, ("edit",), reads=reads, plan=plan))
                times.add(QueuedStep(took.span, took.stalls, None, plan.latency, 1, ()))
            times.book()
            assert (counters["steps_total"], counters["step_seconds_total"]) == (3, 0.0)
            cuda.catch_up()
            times.book()
            assert handle.stalls[0].seconds() == pytest.approx(1e-3)
        assert [copy for copy in log.copies if "waits" in copy] == []
    # Marks are a millisecond apart: the begin and end of each step, and of the wait within the
    # first: what the others read has arrived.
    assert counters["step_seconds_total"] == pytest.approx(5e-3)
    assert counters["step_load_stall_seconds_total"] == pytest.approx(1e-3)


def test_who_asks_for_a_time_too_early_is_seen() -> None:
    with FakeCuda() as cuda, cuda.watch() as log:
        begin, end = mark(DEVICE), mark(DEVICE)
        assert Span(begin, end).seconds() is None
        begin.elapsed_time(end)  # type: ignore[union-attr]
        end.synchronize()  # type: ignore[union-attr]
    assert ["waits" in copy for copy in log.copies] == [True, True]


def test_the_log_sees_what_it_is_there_for() -> None:
    with FakeCuda() as cuda, cuda.watch() as log:
        tensor = torch.zeros(4, device=DEVICE)
        (tensor * 2)[1:3].add_(1)
        torch.tensor([1.0, 2.0]).to(DEVICE)
        tensor.cpu()
        with pytest.raises(Exception, match="device"):
            tensor + torch.zeros(4)
        with pytest.raises(Exception, match="aten"):
            tensor.sum().item()
    assert log.kernels == {"zeros.default": 1, "mul.Tensor": 1, "add_.Tensor": 1, "sum.default": 1}
    assert [copy.split(" in ")[0] for copy in log.copies] == ["cpu -> cuda", "cuda -> cpu"]
    assert all("waits" in copy for copy in log.copies)


@pytest.mark.slow
def test_the_whole_model_steps() -> None:
    _, log = steady_steps(Case("all blocks", MIXED[:4]), (19, 38))
    assert log.copies == []
    assert log.launches <= 57 * (COMMITTED["kv int8, 4 rows, mixed"]["per_block"] + 0.1)
