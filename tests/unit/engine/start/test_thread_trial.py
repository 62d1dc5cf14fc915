"""How many processes share a CPU's cores is tried with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from maskserve_engine.start.thread_trial import best


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 10.9}, 1),
        ({1: 10.0, 2: 11.1}, 2),
        ({1: 10.0, 2: 12.0, 4: 13.0}, 2),
        ({1: 10.0, 2: 10.5, 4: 11.5}, 4),
        ({4: 30.0, 1: 10.0, 2: 20.0}, 4),
    ],
)
def test_more_processes_must_serve_a_tenth_more(rates: dict[int, float], expected: int) -> None:
    assert best(rates) == expected


@pytest.mark.slow  # what is made of its answer: tests/unit/serving
def test_a_model_is_tried_in_one_process_and_in_two(tmp_path: Path, tiny_fill: Path) -> None:
    config = tmp_path / "config.toml"
    tables = {"model": {"path": str(tiny_fill)}, "runtime_dir": str(tmp_path)}
    config.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "maskserve_engine.start.thread_trial", str(config)]
    ended = subprocess.run([*command, "--threads", "2"], check=True, capture_output=True)
    trial = json.loads(ended.stdout.decode().splitlines()[-1])
    assert set(trial["rows_per_s"]) == {"1", "2"}
    assert all(rate > 0 for rate in trial["rows_per_s"].values())
    assert trial["processes"] == best({int(k): v for k, v in trial["rows_per_s"].items()})
