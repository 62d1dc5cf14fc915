"""Slow cases in shards, each in its own run: `--slow-shard 2/6` is the second of six.

A file that starts servers (tests/e2e) stays in one shard. The cases of all other files are dealt
out one by one, because the slow ones are in few files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def shard_of(text: str) -> tuple[int, int]:
    """Number and count of shards from a text like `2/6`.

    Raises:
        pytest.UsageError: the text is not of this form.
    """
    fullmatch = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = (int(fullmatch[1]), int(fullmatch[2])) if fullmatch else (0, 0)
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--slow-shard takes a shard of how many, such as 2/6: {text!r}")
    return number, count


def split(items: Sequence[Any], number: int, count: int, e2e: Path) -> tuple[list[Any], list[Any]]:
    """Slow cases of a shard, and all other cases.

    Args:
        items: all cases, in an order that is the same in each run.
        number: of the shard, from 1.
        count: of shards.
        e2e: the folder whose files are not divided.
    """
    chosen: list[Any] = []
    files: dict[Path, int] = {}
    case = 0
    for item in items:
        if not item.get_closest_marker("slow"):
            continue
        if item.path.is_relative_to(e2e):
            place = files.setdefault(item.path, len(files))
        else:
            place = case
            case += 1
        if place % count == number - 1:
            chosen.append(item)
    chosen_ids = set(map(id, chosen))
    return chosen, [item for item in items if id(item) not in chosen_ids]
