"""The state of an edit in the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_engine.families.registry import load_encoder
from maskserve_engine.planning.flops import Totals
from maskserve_engine.requests.execution_plan import EditWork, ExecutionMode, ExecutionPlan
from maskserve_engine.requests.state import EditTimes, RequestState
from tests.fakes.jobs import config_of, encode_case, guided, random_case

NOTHING = Totals(0, np.zeros((1, 6)), np.zeros((1, 6)), (0.0,), 0.0, (0.0,))
MODEL: Any = None
"""No test here reads it."""


@pytest.mark.parametrize(("mode", "computed"), [("dense", 16), ("cached", 3)])
def test_a_negative_prompt_counts_its_pass_of_the_model_too(
    tiny_inpaint: Path, mode: ExecutionMode, computed: int
) -> None:
    """Scheduler, status record and patience go by the work that a step is."""
    encoder = load_encoder(config_of(tiny_inpaint))
    rng = np.random.default_rng(0)
    for settings, passes in (({}, 1), (guided(rng), 2)):
        job = encode_case(encoder, random_case(rng, **settings), "edit")
        edit = RequestState(
            job,
            sink=print,
            work=EditWork(16, 3, 4, NOTHING, MODEL, passes=passes),
            times=EditTimes(0.0),
            deadline=None,
            plan=ExecutionPlan(mode, "hit"),
        )
        ticket, status = edit.make_ticket(), edit.status()
        assert edit.step_tokens == passes * computed
        assert ticket.active_tokens == status.active_tokens == passes * computed
        assert ticket.total_tokens == status.total_tokens == passes * 16
        assert edit.work.mask_ratio == 3 / 16
        begun = replace(edit, plan=ExecutionPlan(mode, "hit", dense_steps=1))  # of four
        assert begun.make_ticket().active_tokens == round(passes * (16 + 3 * computed) / 4)


def test_a_step_counts_as_what_it_computed_and_not_as_what_it_was_to_leave_out() -> None:
    """Beside a template the steps with text compute a ring of their own; without room for what
    others would read, a step that was to leave both out computes them.
    """
    between, refresh = (replace(NOTHING, rows=rows) for rows in (1, 2))
    plain = EditWork(16, 3, 4, NOTHING, MODEL)
    work = replace(plain, between=between, refresh=refresh, plain=plain)
    assert work.reading(text=False) is between
    assert work.reading(text=True) is refresh
    assert work.without_schedule() is plain.without_schedule() is plain
    assert plain.reading(text=False) is plain.reading(text=True) is NOTHING
