"""`make demo` says how its edit ran."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from maskserve_benchmarks.demo import compare
from maskserve_client import EditResult

OWN = {"cache": "own", "dense_steps": 3, "computed_tokens": 3500}
HIT = {"cache": "hit", "computed_tokens": 2000}
"""META of a demo that is run again: the one before primed its template."""


class Server:
    """In the place of a client."""

    def edit(self, *arguments: Any, **settings: Any) -> EditResult:
        return answer({})


def answer(meta: dict[str, Any]) -> EditResult:
    full_meta = {"total_tokens": 250, "steps": 20, "timings_ms": {"denoise": 100.0}, **meta}
    return EditResult(Image.new("RGB", (8, 8)), b"", full_meta)


@pytest.mark.parametrize(
    ("meta", "text"), [(OWN, "3 of 20 steps computed all 250"), (HIT, "0 of 20 steps")]
)
def test_it_says_what_was_computed(
    meta: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = tmp_path / "mask.png"
    Image.new("L", (8, 8), 255).save(mask)
    options = Namespace(mask=mask, prompt="a star", seed=1)
    compare(Server(), tmp_path, options, answer(meta))  # type: ignore[arg-type]
    output = capsys.readouterr().out
    assert text in output
    assert f"{meta['computed_tokens'] / 5000:.0%} were computed" in output
