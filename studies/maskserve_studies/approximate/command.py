"""Measure how near an edit is to the full edit if it starts at step K from an earlier result
(approximate caching, NIRVANA).

    python scripts/bench approximate --json approximate.json

The edits of the demo model name a colour and a shape. They are compared with the same edits run in
full: dB inside the mask, and whether the judge sees the requested object. The earlier edit has the
same picture and differs as EARLIER says. `other_picture` is another edit's result. There are two
ways to start:

- `noised`: from the earlier result, noised to the sigma of step K with this edit's own noise.
- `state`: from the earlier edit's state after K steps, with this edit's seed, as NIRVANA keeps it.

`step_interval` is the rival: the model runs in one of so many steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_benchmarks.demo_model.scenes import Edit, held_out_edits
from maskserve_benchmarks.reports import about, table, write_json
from maskserve_benchmarks.timing import hardware
from maskserve_engine.base.job import EditJob
from maskserve_engine.families.mmdit.preparation import grid_of, unpack_latents
from maskserve_studies.quality.metrics import Picture, compare, summary
from maskserve_studies.quality.systems import Rig, at_interval

STEPS: Final = 20
SKIPPED: Final = (4, 8)
"""Steps that are left out: 20 and 40 % of an edit."""
MOVED: Final = 8
"""Pixels by which the earlier mask is moved, down and right or up and left."""
OTHER_SEED: Final = 1_000_000
"""Difference between the seeds of an edit and its earlier edit."""
INTERVALS: Final = (2, 3)
COLUMNS: Final = ("psnr_in_mask", "worst_psnr_in_mask", "share_below_30", "prompt_followed")

Line = dict[str, Any]
States = dict[int, list[Tensor]]
"""[n, 4C] latents of each edit before a step. The keys are 0, the steps of SKIPPED, and STEPS for
the result.
"""


def _with_words(edit: Edit, colours: int = 0, shapes: int = 0) -> Edit:
    """The edit with another colour and shape: these many places further in the palette."""
    assert edit.colour is not None
    assert edit.shape is not None
    names = list(COLOURS)
    colour = names[(names.index(edit.colour) + colours) % len(names)]
    shape = SHAPES[(SHAPES.index(edit.shape) + shapes) % len(SHAPES)]
    return replace(edit, prompt=f"a {colour} {shape}")


def _moved(edit: Edit) -> Edit:
    """The edit with its mask moved down and right, or up and left at the picture's border."""
    mask = edit.mask
    for axis in (0, 1):
        last = np.flatnonzero(mask.any(axis=1 - axis))[-1]
        mask = np.roll(mask, MOVED if last + MOVED < mask.shape[axis] else -MOVED, axis)
    return replace(edit, mask=mask)


EARLIER: Final[dict[str, Callable[[Edit], Edit]]] = {
    "other_colour": lambda edit: _with_words(edit, colours=1),
    "moved_mask": _moved,
    "other_prompt": lambda edit: _with_words(edit, colours=3, shapes=2),
    "other_shape": lambda edit: _with_words(edit, shapes=1),
    "same": lambda edit: edit,
}
"""Makes the earlier edit from the edit that starts from it."""


class Trial:
    """Full edits, and the comparison of other results with them.

    Args:
        rig: the demo model.
        edits: each one names a colour and a shape.
    """

    def __init__(self, rig: Rig, edits: Sequence[Edit]) -> None:
        self.rig, self.edits, self.jobs = rig, edits, rig.jobs(edits)
        self.full_states = self.states(self.jobs)
        self.pictures = self._pictures(self.full_states[STEPS])

    def states(self, jobs: Sequence[EditJob], until: int = STEPS) -> States:
        """Latents of full edits, or of edits that stop before a step."""
        rows, states = [self.rig.adapter.dense_row(job) for job in jobs], {}
        for step in (boundary for boundary in (0, *SKIPPED, STEPS) if boundary <= until):
            self.rig.run(rows, (), step)
            states[step] = [row.latents.clone() for row in rows]
        return states

    def noised(self, results: Sequence[Tensor], step: int) -> list[Tensor]:
        """[n, 4C] latents before a step: results of earlier edits with these edits' noise."""
        sigmas = [self.rig.adapter.sigmas(job) for job in self.jobs]
        assert all(edit_sigmas[0][0] == 1.0 for edit_sigmas in sigmas), (
            "latents begin as noise alone"
        )
        return [
            edit_sigmas[step][0] * noise + (1.0 - edit_sigmas[step][0]) * result
            for edit_sigmas, noise, result in zip(sigmas, self.full_states[0], results, strict=True)
        ]

    def started(self, latents: Sequence[Tensor], step: int) -> list[Tensor]:
        """[n, 4C] results of these edits when they start from the given latents before a step."""
        rows = [self.rig.adapter.dense_row(job) for job in self.jobs]
        for row, start_latents in zip(rows, latents, strict=True):
            row.image.masked.latents, row.step = start_latents.clone(), step
        self.rig.run(rows, ())
        return [row.latents for row in rows]

    def line(self, latents: Sequence[Tensor], step: int, *labels: str) -> Line:
        """Figures of edits that start from the given latents before a step.

        Args:
            latents: [n, 4C] of each edit.
            step: the first step to run; 0 is the whole edit.
            labels: labels: the earlier edit, its seed, and the way to start.
        """
        earlier, seed, start = labels
        figures = {"earlier": earlier, "seed": seed, "start": start, "skipped": step / STEPS}
        return figures | self._compared(self.started(latents, step))

    def rival(self, interval: int) -> Line:
        """Figures of these edits with a `step_interval`."""
        jobs = [at_interval(job, interval) for job in self.jobs]
        rows = [self.rig.adapter.dense_row(job) for job in jobs]
        self.rig.run(rows, ())
        labels = {"earlier": "", "seed": "", "start": f"step_interval {interval}"}
        skipped = 1.0 - rows[0].steps / STEPS
        return {
            **labels,
            "skipped": round(skipped, 3),
            **self._compared([row.latents for row in rows]),
        }

    def _compared(self, latents: Sequence[Tensor]) -> dict[str, float]:
        """Compare results with the full edits."""
        figures = asdict(summary(compare(self.edits, self._pictures(latents), self.pictures)))
        return {name: round(figures[name], 3) for name in COLUMNS}

    def _pictures(self, latents: Sequence[Tensor]) -> list[Picture]:
        return [
            self.rig.finish(edit, unpack_latents(edit_latents, grid_of(job)).float().numpy())
            for edit, job, edit_latents in zip(self.edits, self.jobs, latents, strict=True)
        ]


def rotated(items: Sequence[Tensor]) -> list[Tensor]:
    """The sequence moved by one place: each edit gets the item of the next one."""
    return [*items[1:], items[0]]


def with_other_seed(job: EditJob) -> EditJob:
    return replace(job, request=replace(job.request, seed=job.request.seed + OTHER_SEED))


def every_line(trial: Trial) -> Iterator[Line]:
    """The lines of `step_interval`, then those of all starts."""
    for interval in INTERVALS:
        yield trial.rival(interval)
    results = trial.full_states[STEPS]
    for step in SKIPPED:
        yield trial.line(trial.noised(results, step), step, "same", "same", "noised")
        other_latents = trial.noised(rotated(results), step)
        yield trial.line(other_latents, step, "other_picture", "other", "noised")
    for name, earlier in EARLIER.items():
        jobs = trial.rig.jobs([earlier(edit) for edit in trial.edits])
        earlier_results = trial.states([with_other_seed(job) for job in jobs])[STEPS]
        for step in SKIPPED:
            yield trial.line(trial.noised(earlier_results, step), step, name, "other", "noised")
        if name == "same":
            continue  # an edit's own state gives the full edit
        states = trial.states(jobs, SKIPPED[-1])
        for step in SKIPPED:
            yield trial.line(states[step], step, name, "same", "state")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--n", type=int, default=48, help="edits of each case (default 48)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    trial = Trial(Rig(DEMO_MODEL, STEPS), held_out_edits(args.n))
    lines = []
    for line in every_line(trial):
        print(*line.values(), flush=True)
        lines.append(line)
    print(table(list(lines[0]), [list(line.values()) for line in lines]))
    report = {**about(hardware(torch.device("cpu"))), "steps": STEPS, "edits": args.n}
    write_json({**report, "lines": lines}, args.json)
    return 0
