"""Wrong pictures and logged errors are faults of the server to scripts/bench every_edit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from maskserve_benchmarks.edits.every_edit import EditCase, difference_of, logged_errors, mask_of
from tests.fakes.pictures import scene


def test_a_changed_pixel_outside_the_mask_is_seen_and_none_inside() -> None:
    source = scene(48, 64)
    mask = mask_of(EditCase((64, 48), "square", 0.35, steps=4, cache="auto"))
    edited = np.where(mask[..., None] > 0, 255 - source, source)
    pictures = [Image.fromarray(array) for array in (edited, source, mask)]
    assert difference_of(*pictures) == ""
    top = int(np.argmax(mask.any(axis=1)))
    edited[top - 1, 32, 1] ^= 1
    assert difference_of(Image.fromarray(edited), *pictures[1:]).startswith("1 pixels outside")
    assert "(48, 64) pixels" in difference_of(
        pictures[0].transpose(Image.Transpose.ROTATE_90), *pictures[1:]
    )


def test_errors_in_logs_are_seen(tmp_path: Path) -> None:
    lines = {
        "worker.jsonl": [
            '{"level": "INFO", "message": "ready"}',
            '{"level": "ERROR", "message": "the idle cache\'s books do not match"}',
            '{"level": "WARNING", "message": "an edit has failed", "exc": "ValueError"}',
        ],
        "worker.log": ["I1130 ready", "Traceback (most recent call last):", "  File x"],
    }
    for name, text in lines.items():
        (tmp_path / name).write_text("\n".join(text), "utf-8")
    expected = [*lines["worker.jsonl"][1:], lines["worker.log"][1]]
    assert logged_errors(tmp_path) == expected
