"""The choice of `--devices-per-worker auto` after a trial."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomllib

from maskserve_serving.cpu_split import fastest_devices
from maskserve_serving.errors import ServeError
from maskserve_serving.options import ServeOptions


class Trial:
    """Stands for the engine's."""

    def __init__(self, out: str = "", err: str = "", code: int = 0) -> None:
        self.out, self.err, self.code = out, err, code
        self.runs: list[tuple[dict[str, Any], list[str]]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        config = tomllib.loads(Path(command[3]).read_text())
        self.runs.append((config, list(command[4:])))
        return subprocess.CompletedProcess(command, self.code, self.out.encode(), self.err.encode())


def test_what_served_most_is_taken(tmp_path: Path) -> None:
    messages: list[str] = []
    trial = Trial('a library speaks\n{"processes": 2, "rows_per_s": {"1": 90.5, "2": 120.25}}\n')
    tables = {
        "model": {"path": str(tmp_path), "torch_threads": 6},
        "cache": {"entry_format": "int4", "disk_dir": "/entries"},
        "adapters": {"store": "/loras"},
    }
    assert fastest_devices(ServeOptions("m", report=messages.append), tables, trial) == 2
    assert messages == [
        "devices per worker: 2 (rows stepped per second by processes: 1: 90.5, 2: 120.25)"
    ]
    [(config, flags)] = trial.runs
    assert flags == ["--threads", "6"]
    assert config["cache"] == {"entry_format": "int4"}
    assert "adapters" not in config


def test_on_gpus_it_is_one(tmp_path: Path) -> None:
    messages: list[str] = []
    trial = Trial('{"processes": 1, "rows_per_s": {}}')
    tables = {"model": {"path": str(tmp_path)}}
    assert fastest_devices(ServeOptions("m", report=messages.append), tables, trial) == 1
    assert messages == ["devices per worker: 1, as it has GPUs"]


@pytest.mark.parametrize(
    ("err", "code", "words"),
    [
        ("Traceback\nno memory", 1, "no memory"),
        ("", 1, "without a message"),
        ("", 0, "without a message"),
    ],
)
def test_a_model_that_cannot_be_tried_is_named(
    tmp_path: Path, err: str, code: int, words: str
) -> None:
    with pytest.raises(ServeError, match=f"--devices-per-worker auto: .*{words}"):
        fastest_devices(
            ServeOptions("m"), {"model": {"path": str(tmp_path)}}, Trial(err=err, code=code)
        )
