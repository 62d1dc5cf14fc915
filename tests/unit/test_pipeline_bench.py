"""What `bench pipeline` makes of its figures; the figures themselves are the machine's."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maskserve_harness.benchmarks.page import write_page
from maskserve_harness.benchmarks.pipeline import Case, bars
from maskserve_harness.benchmarks.pipeline_tiers import _GAP, _runs, travels

HIDDEN = Case(0.1, 0.9, 280.0, 170.0, 160.0, 150.0, 149.0, 148.0, 1.01, 1.01, 0.94)
BOUND = replace(HIDDEN, load_to_compute=2.0, ours_over_ideal=1.5)


def test_each_bar_can_be_missed_and_holds_for_its_own_cases() -> None:
    assert list(bars([HIDDEN, BOUND]).values()) == [True, True, True]
    slow = replace(HIDDEN, ours_over_ideal=1.06, ours_over_predicted=1.2)
    assert list(bars([slow, BOUND]).values()) == [False, True, True]
    wrong = replace(BOUND, ours_over_predicted=1.11)
    assert list(bars([HIDDEN, wrong]).values()) == [True, False, True]
    late = replace(BOUND, ours_over_greedy=1.06)
    assert list(bars([HIDDEN, late]).values()) == [True, True, False]


def test_runs_cover_the_tokens_and_no_gap_wider_than_allowed() -> None:
    rng = np.random.default_rng()
    ids = np.flatnonzero(rng.random(500) < rng.uniform(0.02, 0.9))
    covered = np.concatenate([np.arange(begin, end) for begin, end in _runs(ids)])
    assert set(ids) <= set(covered)
    more = set(covered) - set(ids)
    assert all(np.abs(ids - each).min() < _GAP for each in more)
    assert len(covered) == len(set(covered))


def test_whole_blocks_move_what_the_mask_leaves_out_too() -> None:
    (half,) = travels((0.5,), 1)
    assert half.whole_bytes == pytest.approx(1 / (1 - half.mask_ratio), rel=2e-3)
    assert half.gathered_bytes <= half.runs_bytes <= half.whole_bytes
    assert half.gathered_pages >= 1.0


def test_a_page_says_which_command_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench x", "--out", "a b"])
    page = tmp_path / "page.md"
    write_page(page, "Title", "Text.\n", [[{"a": 1.23456, "b": "c"}]], tmp_path / "p.png")
    text = page.read_text(encoding="utf-8")
    assert "`python scripts/bench x --out 'a b'`" in text
    assert "| a | b |\n| --- | --- |\n| 1.235 | c |" in text
    assert "![Title](p.png)" in text
