"""Count the kernels that a step launches, by case, with the engine's own code on a fake CUDA
device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.steps.replay import in_memory
from maskserve_benchmarks.steps.step_rig import Bench, build_model
from maskserve_benchmarks.steps.unet_rig import UnetBench, build_unet
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.packing import sparse_layout
from maskserve_engine.batch.padding import padded_packing
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.mmdit.blocks import precomputed_steps
from maskserve_engine.families.mmdit.rows import FlowPrimingRow, FlowRow
from maskserve_engine.families.unet.rows import UnetRow
from maskserve_engine.layers.fp8 import FP8, Fp8Linear
from maskserve_engine.layers.linear import Linear, PlainLinear, map_linears
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from maskserve_studies.kernels.launch_log import WEIGHTS, Log

TABLE = CHECKOUT / "docs" / "benchmarks" / "kernels.json"
"""The committed counts."""
DOUBLE, SINGLE = 19, 38
"""Numbers of double and single blocks of FLUX.1-dev."""
TOKENS, WIDTH = 4096, 3072
"""Image tokens at 1024x1024, and the model's width."""
BYTES = {"model": 2.0, "int8": 1.0, "float8": 1.0, "int4": 0.5 + 2 / 32}
"""Bytes per stored number; int4 has a scale of 2 bytes per 32 numbers."""
STEPS = 28
"""Default number of steps of an edit."""
MIXED = (0.1, 0.2, 0.3, 0.11, 0.05, 0.35, 0.15, 0.25)
"""Mask ratios of the rows of a mixed batch."""


@dataclass(frozen=True)
class Case:
    """A steady step of FLUX.1-dev at 1024x1024."""

    name: str
    ratios: tuple[float | None, ...]
    """Mask ratio of each row; None is a dense row."""
    kind: str = "kv"
    """Kind of all blocks; `mixed`: dense, project and kv in turn."""
    format: str = "int8"
    guided: bool = False
    primes: bool = False
    """Whether a priming row runs in the batch, too."""
    weights: str = "bf16"
    """Form of the blocks' weights: `bf16` or `fp8`."""
    loras: int = 0
    """Number of rows with a LoRA, counted from the first; each of them has its own, of rank 16."""
    recorded: bool = False
    """Whether steps run as CUDA graphs where that is possible."""


CASES = (
    Case("dense, 1 row", (None,)),
    Case("dense, 4 rows", (None,) * 4),
    *(Case(f"kv {f}, 1 row", (0.11,), format=f) for f in ("model", "int8", "float8", "int4")),
    Case("kv int8, 4 rows, mixed", MIXED[:4]),
    Case("kv int8, 5 rows, mixed", MIXED[:5]),
    Case("kv int8, 8 rows, mixed", MIXED),
    Case("kv int4, 4 rows, mixed", MIXED[:4], format="int4"),
    Case("kv int8, 3 rows beside a dense one", (0.1, 0.2, None, 0.11)),
    Case("project int8, 1 row", (0.11,), "project"),
    Case("project int8, 4 rows, mixed", MIXED[:4], "project"),
    Case("project int8, 5 rows, mixed", MIXED[:5], "project"),
    Case("mixed plan, int8, 1 row", (0.11,), "mixed"),
    Case("mixed plan, int8, 4 rows, mixed", MIXED[:4], "mixed"),
    Case("dense, 1 row, fp8", (None,), weights="fp8"),
    Case("kv int8, 1 row, fp8", (0.11,), weights="fp8"),
    Case("kv int8, 4 rows, mixed, fp8", MIXED[:4], weights="fp8"),
    Case("dense, 1 guided row", (None,), guided=True),
    Case("kv int8, 1 guided row", (0.11,), guided=True),
    Case("kv int8, 2 rows beside a priming one", (0.1, 0.2), primes=True),
    Case("dense, 1 row, graphs", (None,), recorded=True),
    Case("kv int8, 1 row, graphs", (0.11,), recorded=True),
    Case("kv int8, 1 row, fp8, graphs", (0.11,), weights="fp8", recorded=True),
    Case("kv int8, 2 rows, mixed, graphs", MIXED[:2], recorded=True),
    Case("kv int8, 1 guided row, graphs", (0.11,), guided=True, recorded=True),
)


@dataclass(frozen=True)
class UnetCase:
    """A steady step of a whole UNet at its native size. A row takes one pass, or two if it is
    guided.
    """

    name: str
    preset: str
    ratios: tuple[float | None, ...]
    kind: str = "kv"
    format: str = "int8"
    halo: int = 0
    guided: bool = False
    """Whether each row takes two passes."""
    recorded: bool = True
    """Whether steps run as CUDA graphs where that is possible."""
    loras: int = 0
    """Number of rows with a LoRA of rank 16 on every layer, counted from the first."""
    between_refreshes: bool = False
    """Whether the step is one between the rows' refresh steps."""
    refreshes: bool = False
    """Whether it is a refresh step."""


SDXL_GUIDED = UnetCase("SDXL, kv int8, 1 guided row", "sdxl-1024", (0.11,), guided=True)
UNET_CASES = (
    replace(SDXL_GUIDED, name="SDXL, kv int8, 1 guided row, no graphs", recorded=False),
    SDXL_GUIDED,
    UnetCase("SDXL, kv int8, 4 guided rows, mixed", "sdxl-1024", MIXED[:4], guided=True),
    UnetCase("SD 2.1, dense, 1 row", "sd21-768", (None,)),
    UnetCase("SD 2.1, kv int8, 1 row", "sd21-768", (0.11,)),
    UnetCase("SD 2.1, kv int8, 4 rows, mixed", "sd21-768", MIXED[:4]),
    UnetCase("SD 2.1, project int8, 1 row", "sd21-768", (0.11,), "project"),
    UnetCase("SD 2.1, kv int8, 1 row, halo 4", "sd21-768", (0.11,), halo=4),
    UnetCase("SDXL, kv int8, 1 guided row, halo 4", "sdxl-1024", (0.11,), halo=4, guided=True),
    UnetCase(
        "SDXL, kv int8, 4 guided rows, mixed, halo 4", "sdxl-1024", MIXED[:4], halo=4, guided=True
    ),
    UnetCase(
        "SDXL, own int8, 1 guided row", "sdxl-1024", (0.11,), guided=True, between_refreshes=True
    ),
    UnetCase(
        "SDXL, own int8, 4 guided rows, mixed",
        "sdxl-1024",
        MIXED[:4],
        guided=True,
        between_refreshes=True,
    ),
    UnetCase("SDXL, refresh step, 1 guided row", "sdxl-1024", (0.11,), guided=True, refreshes=True),
    UnetCase("SDXL, dense, 1 row", "sdxl-1024", (None,)),
    UnetCase("SDXL, kv int8, 1 row", "sdxl-1024", (0.11,)),
)


@dataclass(frozen=True)
class Counts:
    """Mean numbers of kernels of one step."""

    double: float
    """Kernels per double block."""
    single: float
    fixed: float
    """Kernels outside the blocks."""

    @property
    def step(self) -> int:
        return round(DOUBLE * self.double + SINGLE * self.single + self.fixed)

    @property
    def per_block(self) -> float:
        """Return the kernels of the whole step per block, including those outside the blocks."""
        return round(self.step / (DOUBLE + SINGLE), 1)


def count(case: Case) -> Counts:
    """Count with steps of models of few blocks; blocks of one kind launch the same kernels."""
    period = 3 if case.kind == "mixed" else 1
    base, double, single = (
        mean_launches(case, (1 + d * period, 1 + s * period)) for d, s in ((0, 0), (1, 0), (0, 1))
    )
    per_double, per_single = (double - base) / period, (single - base) / period
    return Counts(per_double, per_single, base - per_double - per_single)


def mean_launches(case: Case, blocks: tuple[int, int]) -> float:
    """Return the mean launches of the steps that share the vectors of the first one."""
    (first, later_step), steps = steady_steps(case, blocks), steps_of(case)
    return (first.launches + (steps - 1) * later_step.launches) / steps


def steps_of(case: Case) -> int:
    """Return the number of an edit's steps whose vectors are computed together."""
    passes = len(case.ratios) * (2 if case.guided else 1) + case.primes
    return min(STEPS, precomputed_steps(passes))


GROUPS = {
    WEIGHTS: ("weights",),
    "products": ("linear.", "fp8.write"),
    "attention": ("attention.",),
    "entries": ("scatter_kv.", "forward._hidden"),
    "heads and order": ("qk_norm_rope.", "forward.attend", "packing."),
    "norms and gates": ("blocks.", "modulation.", "fp8."),
}
"""Prefixes of the places whose bytes belong to each group. The longest match wins; a place without
a match belongs to `outside`."""
NEEDED = (WEIGHTS, "products", "attention")
"""Groups whose bytes must all move, whatever is fused. Each entry must also be read once."""


def moved_bytes(case: Case) -> Counter[str]:
    """Return the bytes that a step of the whole model moves, by group. The method is that of
    `count`.
    """
    base, double, single = (mean_bytes(case, blocks) for blocks in ((1, 1), (2, 1), (1, 2)))
    whole: Counter[str] = Counter()
    for group in {*base, *double, *single}:
        of_double, of_single = double[group] - base[group], single[group] - base[group]
        whole[group] = base[group] + (DOUBLE - 1) * of_double + (SINGLE - 1) * of_single
    return whole


def mean_bytes(case: Case, blocks: tuple[int, int]) -> Counter[str]:
    """Return the mean bytes by group, over the steps that share the vectors of the first one."""
    (first, later_step), steps = steady_steps(case, blocks), steps_of(case)
    mean: Counter[str] = Counter()
    for log, times in ((first, 1), (later_step, steps - 1)):
        for place, nbytes in log.nbytes.items():
            mean[_group(place)] += nbytes * times // steps
    return mean


def _group(place: str) -> str:
    begins = [(begin, group) for group, begins in GROUPS.items() for begin in begins]
    fits = [candidate for candidate in begins if place.startswith(candidate[0])]
    return max(fits, key=lambda candidate: len(candidate[0]))[1] if fits else "outside"


def entry_bytes(case: Case) -> int:
    """Return the bytes of the entries that a step of the whole model reads, each counted once."""
    cached_share = sum(1.0 - ratio for ratio in case.ratios if ratio is not None)
    parts = {"kv": 2, "project": 1}.get(case.kind, 0)
    return round(cached_share * TOKENS * WIDTH * parts * (DOUBLE + SINGLE) * BYTES[case.format])


@cache  # counts and copies of a case come from the same steps
def steady_steps(case: Case, blocks: tuple[int, int]) -> tuple[Log, Log]:
    """Return the logs of two steps of rows that were packed before: one that computes the vectors
    of later steps, and one that does not.
    """
    with FakeCuda() as cuda:
        bench = fake_bench(blocks, case.format)
        if case.weights == "fp8":
            bench.weights = map_linears(bench.weights, _in_fp8)
        if case.recorded:
            recorder = Graphs.on(DEVICE, torch.bfloat16)
            bench.weights = replace(bench.weights, graphs=recorder, placed_bytes=0)
        bench.fill_entry({"mixed": "both"}.get(case.kind, case.kind))
        rows = make_rows(bench, case)
        step = partial(bench.step, rows, kinds_of(case, bench.blocks))
        for _ in range(3 if case.recorded else 1):  # the second records, the third runs
            step()
        for row in rows:
            row.step = 0
        logs = []
        for _ in range(2):
            if case.primes:
                bench.batch = None  # each anchor has its own tokens, so pack anew
            with cuda.watch() as log:
                step()
            logs.append(log)
    return logs[0], logs[1]


def _in_fp8(at: str, product: Linear) -> Linear:
    """Return a block's product with weights in torchao's FP8; other products are unchanged."""
    if "_blocks." not in at or not isinstance(product, PlainLinear):
        return product
    weight = torch.empty(product.weight.shape, dtype=FP8, device=DEVICE)
    scale = torch.empty(len(weight), 1, device=DEVICE)
    return Fp8Linear(weight, scale, product.bias, torch.bfloat16)


def unet_step(case: UnetCase) -> tuple[Log, int]:
    """Return the log of a step of rows packed before, and the model's number of blocks."""
    with FakeCuda() as cuda:
        bench, rows = _unet_rows(case)
        return _steady(cuda, bench, rows, case.kind), bench.blocks


def unet_entry_change(case: UnetCase) -> tuple[Log, Log]:
    """Return the logs of such a step, and of a step at which all rows turn to another entry."""
    with FakeCuda() as cuda:
        bench, rows = _unet_rows(case)
        steady = _steady(cuda, bench, rows, case.kind)
        for row in rows:
            assert row.selection is not None
            row.entry = in_memory(bench.entry, row.selection, whole=True)
        with cuda.watch() as with_change:
            bench.step(rows, case.kind)
    return steady, with_change


def _unet_rows(case: UnetCase) -> tuple[UnetBench, list[UnetRow]]:
    model = fake_weights(build_unet(case.preset, torch.bfloat16, torch.device("meta")))
    steps, plan = (
        (9, RefreshSchedule(frozenset({0}), case.format, text=False))
        if case.between_refreshes or case.refreshes
        else (1, None)
    )
    bench = UnetBench(case.preset, torch.bfloat16, DEVICE, case.format, case.halo, model, steps)
    if case.recorded:
        recorder = Graphs.on(DEVICE, torch.bfloat16)
        bench.weights, bench.buckets = replace(bench.weights, graphs=recorder), True
    bench.fill_entry(case.kind)
    rows = [
        bench.row(ratio, seed, guided=case.guided, schedule=plan)
        for seed, ratio in enumerate(case.ratios)
    ]
    for row in rows[: case.loras]:
        row.adapters = ((bench.lora(16), 0.8),)
    if case.between_refreshes:
        bench.anchor(rows, case.kind)
    return bench, rows


def _steady(cuda: FakeCuda, bench: UnetBench, rows: list[UnetRow], kind: str) -> Log:
    for _ in range(3):  # the first step asks for each kernel, the second records them
        with cuda.watch() as log:
            bench.step(rows, kind)
    return log


def fake_bench(blocks: tuple[int, int], format: str, preset: str = "flux-1024") -> Bench:
    """Return a preset's model with `blocks` double and single blocks; call this inside FakeCuda."""
    for layout in (sparse_layout, padded_packing):
        layout.cache_clear()  # its tensors belong to the earlier device
    model = fake_weights(build_model(preset, blocks, torch.bfloat16, torch.device("meta")))
    return Bench(preset, blocks, torch.bfloat16, DEVICE, format, model, STEPS)


def make_rows(bench: Bench, case: Case) -> list[FlowRow | FlowPrimingRow]:
    rows: list[FlowRow | FlowPrimingRow] = []
    for seed, ratio in enumerate(case.ratios):
        row = bench.row(ratio, seed)
        row.recorded = case.recorded
        if seed < case.loras:
            row.adapters = ((bench.lora(16), 0.8),)
        rows.append(bench.guided(row) if case.guided else row)
    return [*rows, bench.priming_row()] if case.primes else rows


def kinds_of(case: Case, blocks: int) -> Sequence[str]:
    if case.kind != "mixed":
        return (case.kind,) * blocks
    return [("dense", "project", "kv")[i % 3] for i in range(blocks)]
