"""`make demo` prints what it measured, and shows each edit beside its rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from maskserve_benchmarks.demo import (
    _COLUMNS,
    DemoEdit,
    DemoFailed,
    Measured,
    Outcome,
    parse,
    report,
    serve_options,
    show,
    view_of,
)
from maskserve_benchmarks.demo_burst import (
    ALL_TOKENS,
    DIFFUSERS,
    EDITS,
    MASKSERVE,
    ONE_CALL,
    ROUNDS,
    Burst,
    burst_rounds,
)
from maskserve_benchmarks.demo_sheet import psnr
from maskserve_client import EditResult

SOURCE, MASK = Image.new("RGB", (64, 48), "navy"), Image.new("L", (64, 48))
MASK.paste(255, (16, 8, 48, 40))
META: dict[str, Any] = {
    "total_tokens": 250, "steps": 20, "computed_tokens": 3500, "cache": "own",
    "window": {"box": [8, 0, 56, 48], "scale": 2.0},
}  # fmt: skip


def outcome(name: str, seconds: tuple[float, float, float]) -> Outcome:
    painted = SOURCE.copy()
    painted.paste("red", (20, 12, 44, 36))
    by_system = {
        column: Measured(painted, time) for column, time in zip(_COLUMNS, seconds, strict=True)
    }
    return Outcome(DemoEdit(name, "a red star"), EditResult(painted, b"", META), by_system)


def test_the_table_has_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [outcome("first edit", (0.5, 1.0, 2.0)), outcome("another prompt", (0.25, 1.0, 1.5))]
    report(tmp_path, SOURCE, MASK, outcomes)
    lines = capsys.readouterr().out.splitlines()
    assert "| first edit | 0.50 s | 1.00 s (2.0x) | 2.00 s (4.0x) | own | 70% |" in lines[2]
    assert "| another prompt | 0.25 s | 1.00 s (4.0x) | 1.50 s (6.0x) |" in lines[3]
    with Image.open(tmp_path / "edits.png") as picture:
        colours = np.asarray(picture).reshape(-1, 3)
    assert (colours == (255, 0, 0)).all(1).sum() > 6 * 100 * 100


def test_the_model_saw_a_part_of_the_photograph() -> None:
    assert view_of(META, SOURCE) == ((8, 0, 56, 48), (96, 96))
    assert view_of({}, SOURCE) == ((0, 0, 64, 48), (64, 48))


def test_a_pixel_outside_the_mask_that_differs_is_a_fault(tmp_path: Path) -> None:
    show(tmp_path, SOURCE, MASK, outcome("", (1, 1, 1)).result)
    for painted, problem in ((SOURCE, "nothing inside"), (Image.new("RGB", (64, 48)), "outside")):
        with pytest.raises(DemoFailed, match=problem):
            show(tmp_path, SOURCE, MASK, EditResult(painted, b"", META))


def test_a_run_forgets_the_entries_of_the_run_before(tmp_path: Path) -> None:
    """The first edit of a second run was a hit."""
    old = tmp_path / "entries" / "old"
    old.mkdir(parents=True)
    options = serve_options(parse(["--out", str(tmp_path)]))
    assert options.entries == old.parent
    assert not old.exists()


def test_the_prompts_are_the_models_or_the_users() -> None:
    names = [edit.name for edit in parse([]).edits]
    assert names == ["first edit", "another prompt", "with the LoRA 'hollow'"]
    edits = parse(["--model", "assets/models/demo-edit"]).edits
    assert len({edit.prompt for edit in edits}) == len(edits) == 2
    assert [edit.prompt for edit in parse(["--prompt", "a", "--prompt", "b"]).edits][:2] == [
        "a",
        "b",
    ]


def test_eight_edits_at_once_count_by_their_median_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = burst_rounds()
    assert [len(turn.edits) for turn in rounds] == [EDITS] * (1 + ROUNDS)
    prompts = {edit.prompt for turn in rounds for edit in turn.edits}
    assert len(prompts) > EDITS * ROUNDS, "few prompts are known from rounds before"
    seconds = {MASKSERVE: 0.5, ALL_TOKENS: 1.0, DIFFUSERS: 4.0, ONE_CALL: 2.0}
    black = np.zeros((128, 128, 3), np.uint8)
    for turn, factor in zip(rounds, (100.0, 3.0, 1.0, 0.5), strict=True):  # the first warms up
        for side, time in seconds.items():
            turn.pictures[side] = [black + np.uint8(side == MASKSERVE)] * EDITS
            turn.seconds[side] = factor * time
        turn.metas.extend([{**META, "cache": "hit"}] * EDITS)
    report(tmp_path, SOURCE, MASK, [outcome("first edit", (0.5, 1.0, 2.0))], Burst(rounds))
    printed = capsys.readouterr().out
    row = "| 16.0 edits/s | 8.0 edits/s (2.0x) | 2.0 edits/s (8.0x) | hit | 70% | 48.1 dB |"
    assert f"| eight edits at once {row}" in printed.splitlines()
    assert "in one call at 4.0 edits/s (4.0x)" in printed
    with Image.open(tmp_path / "edits.png") as picture:
        assert picture.height > 2 * 150


def test_the_likeness_of_equal_pictures_is_high() -> None:
    assert psnr(np.asarray(SOURCE), np.asarray(SOURCE)) > 100
