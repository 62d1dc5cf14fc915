"""A start from an earlier result, small: what must be the whole edit, and what must not.

A start packs its rows at another step than the whole edit did, so kernels get other shapes: the
results are equal as of docs/design.md §8, and not bit by bit.
"""

from __future__ import annotations

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import held_out_edits
from maskserve_studies.approximate.command import SKIPPED, STEPS, Trial, rotated
from maskserve_studies.quality.systems import Rig


def test_a_start_is_the_whole_edit_at_step_0_and_from_its_own_state_alone() -> None:
    trial = Trial(Rig(DEMO_MODEL, STEPS), held_out_edits(2))
    results, step = trial.full_states[STEPS], SKIPPED[-1]
    turned_latents = rotated(results)
    for latents, begin, is_same in (
        (trial.noised(turned_latents, 0), 0, True),
        (trial.full_states[step], step, True),
        (trial.noised(turned_latents, step), step, False),
    ):
        for picture, whole in zip(trial.started(latents, begin), results, strict=True):
            bound = 1e-4 * max(1.0, float(whole.abs().max()))
            assert (float((picture - whole).abs().max()) <= bound) == is_same
