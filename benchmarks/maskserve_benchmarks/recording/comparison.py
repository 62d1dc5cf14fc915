"""Compares two records."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

PICTURE = "picture"
"""Key of an answer's picture: encoded, in base64. Two pictures are compared by their distance."""


def differences(before: Mapping[str, Any], after: Mapping[str, Any], where: str = "") -> list[str]:
    """Return a line for each value that differs between the records.

    A slow client receives only the latest event of a stream. Events that one record lacks are
    therefore no difference if both records share one event of each kind.
    """
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        path = f"{where}{key}"
        old, new = before.get(key), after.get(key)
        if key == PICTURE:
            continue
        if key == "pixels" and {PICTURE} <= before.keys() & after.keys() and old != new:
            lines.append(f"{path}: {_apart(pixels_of(before), pixels_of(after))}")
        elif key == "events" and isinstance(old, dict) and isinstance(new, dict):
            lines += _event_differences(old, new, path)
        elif isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{path}: ")
        elif key not in before or key not in after or old != new:
            lines.append(f"{path}: {_text(before, key)} before, {_text(after, key)} now")
    return lines


def _event_differences(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    shared = [event for event in old if event in new]
    kinds = {event.split()[0] for event in (*old, *new)}
    missed = sorted(kinds - {event.split()[0] for event in shared})
    lines = [f"{path}: no {kind} that both records have" for kind in missed]
    for event in shared:
        lines += differences(old[event], new[event], f"{path}: {event}: ")
    return lines


def pixels_of(answer: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Return the pixels [H, W, 3] of an answer's picture."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer[PICTURE]))))


def _apart(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> str:
    if old.shape != new.shape:
        return f"{old.shape} before, {new.shape} now"
    levels = np.abs(old.astype(int) - new)
    return f"{(levels > 0).sum()} of {levels.size} samples differ, by up to {levels.max()} of 255"


def _text(record: Mapping[str, Any], key: str) -> str:
    return json.dumps(record[key])[:200] if key in record else "nothing"
