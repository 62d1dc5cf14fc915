"""docs/models.md's table of counts is what is counted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from maskserve_core.models import flux, flux2, qwen_image, qwen_image21, z_image
from maskserve_core.planning.entry_bytes import FORMATS, entry_bytes, still_bytes
from maskserve_core.planning.flops import ModelWork
from maskserve_core.planning.own_anchors import own_bytes, own_count
from maskserve_harness.published_models import (
    FLUX_DEV,
    KLEIN_4B,
    KLEIN_9B,
    QWEN_21,
    QWEN_EDIT_SHOWN,
    QWEN_IMAGE,
    QWEN_PLUS_SHOWN,
    Z_IMAGE,
)

ROOT = Path(__file__).parents[4]
SIZE = (128, 128, 0)
WORK = {
    "FLUX.1 dev, for comparison": flux.count(FLUX_DEV, *SIZE, recorded=False, references=0),
    "FLUX.1 Kontext": flux.count(FLUX_DEV, *SIZE, recorded=False, references=1),
    "FLUX.2 klein 4B": flux2.count(KLEIN_4B, *SIZE, recorded=False, references=1),
    "FLUX.2 klein 9B": flux2.count(KLEIN_9B, *SIZE, recorded=False, references=1),
    "FLUX.2 klein 9B-KV, dense over its own cache": flux2.count(
        KLEIN_9B, *SIZE, recorded=False, references=1, exact=True
    ),
    "Qwen-Image, 64 text tokens": qwen_image.count(QWEN_IMAGE, *SIZE, recorded=False, references=0),
    "Qwen-Image-Edit, 64 text tokens": qwen_image.count(
        QWEN_IMAGE, *SIZE, recorded=False, references=1
    ).looking_at(QWEN_EDIT_SHOWN),
    "Qwen-Image-Edit-2509 and -2511, 64 text tokens": qwen_image.count(
        QWEN_IMAGE, *SIZE, recorded=False, references=1
    ).looking_at(QWEN_PLUS_SHOWN),
    "Qwen-Image-2.1, 64 text tokens, dense over its own cache": qwen_image21.count(
        qwen_image21.as_flux(QWEN_21), *SIZE, recorded=False, references=1, exact=True
    ),
    "Z-Image, 64 text tokens": z_image.count(
        z_image.as_flux(Z_IMAGE), *SIZE, recorded=False, references=0
    ),
}


@pytest.mark.parametrize("name", WORK)
def test_the_table_is_what_is_counted(name: str) -> None:
    work: ModelWork = WORK[name]
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    line = next(
        line for line in text.splitlines() if line.startswith(f"| {name} |") and " / " in line
    )
    told = [float(number) for number in re.findall(r"\d+\.\d+", line.removeprefix(f"| {name}"))]
    length = 64 if "64 text" in name else 512
    rows = [work.row_at(m, length) for m in (0.05, 0.11, 0.2, 0.35)]
    dense = work.step_flops([work.row_at(1.0, length)], "dense")
    limits = [dense / work.step_flops([row], "kv") for row in rows]
    fmt = FORMATS["int4"]
    sizes = [n / 2**30 for n in (entry_bytes(work, "kv", fmt), still_bytes(work, fmt)) if n]
    rounded = [round(each, 1) for each in (dense / 1e12, *limits)]
    assert told == [*rounded, *(round(size, 2) for size in sizes)]


@pytest.mark.parametrize(
    ("name", "steps", "leaves_text"),
    [
        ("Qwen-Image", 50, True),
        ("Qwen-Image-Edit", 50, True),
        ("Qwen-Image-Edit-2509 and -2511", 40, True),
        ("Qwen-Image-2.1", 40, False),
        ("Z-Image", 50, False),
    ],
)
def test_the_table_of_whole_edits_is_what_is_counted(
    name: str, steps: int, leaves_text: bool
) -> None:
    [work] = [each for own, each in WORK.items() if own.startswith(f"{name}, 64 text tokens")]
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    line = next(each for each in text.splitlines() if each.startswith(f"| {name}, {steps} |"))
    dense, anchors = work.step_flops([work.row_at(1.0, 64)], "dense"), own_count(steps, 0.35)

    def gains(count: int, text: float) -> list[float]:
        """Of an edit with so many dense steps, whose others compute so many text tokens."""
        found = []
        for ratio in (0.05, 0.11, 0.2, 0.35):
            row = replace(work.row_at(ratio, 64), text=text, text_read=64 - text)
            others = (steps - count) * work.step_flops([row], "kv")
            found.append(round(steps * dense / (count * dense + others), 1))
        return found

    kept = [(work.tokens[0] - 0.11 * 4096 + 64 * leaves_text,)]
    held = own_bytes(work, kept, FORMATS["int8"], slopes=True) / 2**30
    numbers = re.findall(r"\d+\.\d+", line.removeprefix(f"| {name},"))
    told = [float(number) for number in numbers]
    between = 0.0 if leaves_text else 64.0
    assert told == [*gains(1, 64.0), *gains(anchors, between), round(held, 2)]


def test_exact_references_are_read_by_all_tokens_and_made_once() -> None:
    """Diffusers' first step computes them besides, each seeing references alone."""
    with_own = WORK["FLUX.2 klein 9B-KV, dense over its own cache"]
    without = flux2.count(KLEIN_9B, *SIZE, recorded=False, references=0)
    whole = with_own.row_at(1.0, 512)
    pairs = (4096 + 512) * 4096 * 4.0 * 4096 * len(with_own.blocks)
    apart = with_own.step_flops([whole], "dense") - without.step_flops([whole], "dense")
    assert apart == pytest.approx(pairs)
    alone = without.step_flops([without.row_at(1.0, 0)], "dense")
    assert with_own.still_flops == pytest.approx(alone)
    assert without.still_flops == 0.0


def test_a_context_is_no_part_of_a_mask_and_of_what_attends() -> None:
    """(N + R + T) / (T + m N), as all that is not attention is linear in the tokens computed."""
    work = WORK["FLUX.1 Kontext"]
    [whole] = work.tokens
    assert (whole, work.context) == (8192, 4096)
    row = work.row_at(0.11, 512)
    assert row.active == (0.11 * 4096,)
    dense, cached = (work.step_flops([row], kind) for kind in ("dense", "kv"))
    assert dense / cached == pytest.approx((whole + 512) / (512 + 0.11 * 4096), rel=0.01)
