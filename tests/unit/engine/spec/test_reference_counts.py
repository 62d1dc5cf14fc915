"""Work that references add to a model."""

from __future__ import annotations

import pytest

from maskserve_benchmarks.published_models import FLUX_DEV, KLEIN_9B
from maskserve_engine.families.flux import spec as flux
from maskserve_engine.families.flux2 import spec as flux2
from maskserve_engine.spec.family import StepPicture

SIDE = 128


def test_exact_references_are_read_by_all_tokens_and_made_once() -> None:
    """Diffusers' first step computes them besides, each seeing references alone."""
    with_own = flux2.count(KLEIN_9B, StepPicture(SIDE, SIDE, references=1, exact=True))
    without = flux2.count(KLEIN_9B, StepPicture(SIDE, SIDE))
    whole = with_own.row_at(1.0, 512)
    pairs = (4096 + 512) * 4096 * 4.0 * 4096 * len(with_own.blocks)
    step_flops = with_own.step_flops([whole], "dense") - without.step_flops([whole], "dense")
    assert step_flops == pytest.approx(pairs)
    alone = without.step_flops([without.row_at(1.0, 0)], "dense")
    assert with_own.still_flops == pytest.approx(alone)
    assert without.still_flops == 0.0


def test_a_context_is_no_part_of_a_mask_and_of_what_attends() -> None:
    """(N + R + T) / (T + m N), as all that is not attention is linear in the tokens computed."""
    work = flux.count(FLUX_DEV, StepPicture(SIDE, SIDE, references=1))
    [whole] = work.tokens
    assert (whole, work.context) == (8192, 4096)
    row = work.row_at(0.11, 512)
    assert row.active == (0.11 * 4096,)
    dense, cached = (work.step_flops([row], kind) for kind in ("dense", "kv"))
    assert dense / cached == pytest.approx((whole + 512) / (512 + 0.11 * 4096), rel=0.01)
