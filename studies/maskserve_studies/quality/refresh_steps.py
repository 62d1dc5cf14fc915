"""Edits with refresh steps, compared with dense edits, by refresh schedule, format and computed
tokens. Rivals that must be worse are among the choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_benchmarks.steps.replay import WithoutLookahead, plan_of_kinds
from maskserve_common.config import Config
from maskserve_common.contracts.reuse_levels import refresh_count
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshLine, RefreshSchedule, StepCacheReader
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.planning.flops import RowTokens
from maskserve_engine.planning.refresh_steps import refresh_steps
from maskserve_engine.spec.model_spec import ModelSpec, known_stride
from maskserve_studies.quality.choices import FLUX_STEPS, FLUX_TEXT, CacheChoice
from maskserve_studies.quality.choices import flux as published_flux
from maskserve_studies.quality.metrics import by_class, compare
from maskserve_studies.quality.systems import BATCH, Picture, Rig


@dataclass(frozen=True, slots=True)
class RefreshChoice:
    """One way to run rows with refresh steps."""

    dense: tuple[int, ...]
    format: str = "int8"
    text: bool = True
    """Whether steps between refresh steps leave out the text."""
    leaves_ring: bool = False
    """Whether steps between refresh steps leave out the ring."""
    ring: int = 1
    reach: float = 1.0
    """How far to extrapolate along the line: 0 keeps the last refresh step's values, 2 goes twice
    as far."""
    halo: int = 0
    """`[cache] conv_halo` for UNets; 0: the default."""
    power: float | None = None
    """Power of sigma over which values lie on lines; None: the family's."""
    bends: bool | None = None
    """Whether to extrapolate with second order; None: as the family does."""
    lookahead: bool = False
    """Whether lookahead computes all refresh steps except the first."""

    @property
    def name(self) -> str:
        suffix = " foreseen" if self.lookahead else ""
        words = [f"{{{','.join(map(str, self.dense))}}}{suffix}", self.format]
        words += [] if self.text else ["text computed"]
        words += ["ring left out"] * self.leaves_ring
        words += [] if self.ring == 1 else [f"ring {self.ring}"]
        words += [f"halo {self.halo}"] if self.halo else []
        words += [] if self.reach == 1.0 else [f"{self.reach:g} times as far"]
        words += [] if self.power is None else [f"over sigma to the power of {self.power:g}"]
        words += [] if self.bends is None else ["bent" if self.bends else "straight"]
        return ", ".join(words)


def served_choice(
    rig: Rig, job: EditJob, count: int = 0, *, lookahead: bool = True
) -> RefreshChoice:
    """Return the choice that a worker makes for an edit where no error places its refresh steps.

    Args:
        rig: rig of the model.
        job: any edit.
        count: number of refresh steps; 0: the worker's default.
        lookahead: whether lookahead computes all refresh steps except the first.
    """
    spec, sigmas = rig.adapter.spec, [sigma for sigma, _ in rig.adapter.sigmas(job)]
    count = count or refresh_count(len(sigmas), known_stride(Config(), spec))
    with_lookahead = lookahead and count > 1
    if with_lookahead:
        anchors = refresh_steps(count, sigmas, spec.refresh.evenly_over, spec.refresh.growth)
    else:
        anchors = _steps_without_lookahead(count, sigmas, spec.refresh.evenly_over)
    return RefreshChoice(
        tuple(sorted(anchors)),
        text=spec.refresh.leaves_text
        or spec.family == "unet",  # the text is not among a UNet's tokens
        leaves_ring=spec.refresh.leaves_text and spec.refresh.ring is not None,
        lookahead=with_lookahead,
    )


def choices(rig: Rig, job: EditJob) -> list[RefreshChoice]:
    """Return the choices to compare, the default first; `reach` makes the rivals.

    Args:
        rig: rig of the model.
        job: any edit.
    """
    # The text can be left out only if it takes part in the image's attention.
    spec, steps = rig.adapter.spec, rig.steps
    joint = spec.family != "unet"
    largest_count = 2 if steps <= 4 else 4 if steps <= 8 else 5
    served_default = served_choice(rig, job)
    count = len(served_default.dense)
    even = replace(served_default, dense=tuple(-(-n * steps // count) for n in range(count)))
    counts = range(largest_count, 0, -1)
    candidates = [
        served_default,
        *[replace(served_default, reach=reach) for reach in (0.0, 2.0)],
        even,
        *[
            served_choice(rig, job, count, lookahead=with_lookahead)
            for with_lookahead in (True, False)
            for count in counts
        ],
        *[replace(served_default, leaves_ring=False, ring=ring) for ring in (2, 1, 0)],
        *([replace(served_default, text=False)] if joint and spec.refresh.leaves_text else []),
        *([] if joint else [replace(served_default, halo=halo) for halo in (64, 4)]),
        *[replace(served_default, power=power) for power in (1.0, 1.5, 2.0, 3.0)],
        replace(served_default, bends=not spec.refresh.second_order),
        *[replace(served_default, format=format) for format in ("model", "int4")],
    ]
    return list(dict.fromkeys(candidates))


def flux_flop_speedup(choice: RefreshChoice) -> float:
    """Return dense FLOPs over the choice's FLOPs: FLUX.1-dev at 1024x1024, 28 steps, a square mask
    of 0.11.
    """
    whole, between = flux_step_flops(choice)
    share = len(choice.dense) / FLUX_STEPS
    cached_share = 1 - (1 / FLUX_STEPS if choice.lookahead else share)
    return whole / (share * whole + cached_share * between)


def flux_step_flops(choice: RefreshChoice) -> tuple[float, float]:
    """Return FLOPs of a dense step of that edit, and of one between the choice's refresh steps."""
    work = published_flux()
    grid = math.isqrt(work.tokens[0])
    ring = 0 if choice.leaves_ring else choice.ring
    active = (float(round(math.sqrt(0.11) * grid) + 2 * ring) ** 2,)
    whole = work.step_flops([work.row_at(1.0, FLUX_TEXT)], "dense")
    computed = 0 if choice.text else FLUX_TEXT
    row_tokens = RowTokens(active, computed, text_read=FLUX_TEXT - computed)
    return whole, work.step_flops([row_tokens], "kv")


def edit_with_refreshes(
    rig: Rig, edits: Sequence[Edit], jobs: Sequence[EditJob], choice: RefreshChoice
) -> list[Picture]:
    """Make the edits by rows with refresh steps."""
    spec, power, bends = rig.adapter.spec, choice.power, choice.bends
    if power is None:
        power = spec.refresh.evenly_over if choice.lookahead else _power_behind(spec)
    if bends is None:
        bends = choice.lookahead and spec.refresh.second_order
    schedule = RefreshSchedule if choice.lookahead else WithoutLookahead
    plan = schedule(
        frozenset(choice.dense),
        choice.format,
        choice.text,
        choice.leaves_ring,
        power,
        second_order=bends,
    )
    rows: list[Any] = []
    for job in jobs:
        settings = structs.replace(job.request.settings, mask_ring=choice.ring)
        ringed = replace(job, request=replace(job.request, settings=settings))
        rows.append(rig.adapter.refreshing_row(ringed, plan))
        rig.attach(rows[-1], ringed)
    kinds = plan_of_kinds(("kv",) * rig.adapter.blocks)
    with scaled_extrapolation(choice.reach):
        for first in range(0, len(rows), BATCH):
            batch = rows[first : first + BATCH]
            readers = [StepCacheReader(row, rig.adapter.entry_blocks) for row in batch]
            while batch[0].step < batch[0].steps:
                step = batch[0].step
                reads: Any = [None if step in plan.dense else r.entry_at(step) for r in readers]
                rig.adapter.step(batch, kinds if any(reads) else None, reads)
    return [rig.finish(edit, row.result().array()) for edit, row in zip(edits, rows, strict=True)]


def edit_from_template(
    rig: Rig,
    edits: Sequence[Edit],
    jobs: Sequence[EditJob],
    entries: Sequence[tuple[AnchorEntry, ...]],
    choice: CacheChoice,
    schedule: RefreshSchedule | None,
) -> list[Picture]:
    """Make edits that read a template and also keep activations of their own. With a refresh
    schedule they leave out their text between its refresh steps. If `choice` has a dense first
    step, that step corrects the entries (residual correction).
    """
    rows = rig.cached_rows(jobs, entries, choice, schedule)
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        while batch[0].step < batch[0].steps:
            for row in batch:
                row.leaves_out_text = (
                    schedule is not None and schedule.text and row.step not in schedule.dense
                )
            rig.replay.step(batch, ("kv",) * rig.adapter.blocks)
    return [rig.finish(edit, row.result().array()) for edit, row in zip(edits, rows, strict=True)]


def table(
    rig: Rig,
    classes: dict[str, list[Edit]],
    jobs: dict[str, list[EditJob]],
    names: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the fidelity of each choice against dense rows.

    Args:
        rig: rig of the model.
        classes: the edits of each class.
        jobs: the jobs of each class.
        names: names of the choices to compare; None: all.
    """
    dense = {name: rig.dense(edits, jobs[name]) for name, edits in classes.items()}
    joint = rig.adapter.spec.family != "unet"
    for choice in choices(rig, next(iter(jobs.values()))[0]):
        if names is not None and choice.name not in names:
            continue
        choice_rig = rig if not choice.halo else Rig(rig.folder, rig.steps, halo=choice.halo)
        pictures = {
            name: edit_with_refreshes(choice_rig, edits, jobs[name], choice)
            for name, edits in classes.items()
        }
        qualities = {name: compare(classes[name], pictures[name], dense[name]) for name in classes}
        figures: dict[str, Any] = {"choice": choice.name, "dense_steps": len(choice.dense)}
        if joint:
            figures["flux_flop_speedup"] = round(flux_flop_speedup(choice), 3)
        yield {**figures, **by_class(qualities)}


def _steps_without_lookahead(
    count: int, sigmas: Sequence[float], evenly_over: float
) -> frozenset[int]:
    """Return the first step, and the steps nearest to equal parts of sigma to a power."""
    steps, distances, chosen = len(sigmas), np.asarray(sigmas) ** evenly_over, [0]
    for number in range(1, count):
        begin = chosen[-1] + 1
        candidates = distances[begin : steps - count + number + 1]
        target = distances[0] * (1 - number / count)
        chosen.append(begin + int(np.abs(candidates - target).argmin()))
    return frozenset(chosen)


def _power_behind(spec: ModelSpec) -> float:
    """Return the power of sigma over which lines extrapolate best behind their refresh steps."""
    if spec.family == "unet":
        return 1.0
    return 3.0 if spec.semantics.blends else 2.0 if spec.semantics.reference else 1.0


@contextmanager
def scaled_extrapolation(times: float) -> Iterator[None]:
    """Scale all rows' extrapolation by `times` while the context lasts."""
    original = RefreshLine.weight
    RefreshLine.weight = lambda self, sigma: times * original(self, sigma)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RefreshLine.weight = original  # type: ignore[method-assign]
