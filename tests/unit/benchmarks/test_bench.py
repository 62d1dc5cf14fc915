"""`scripts/bench`: one entry to everything that measures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_benchmarks.bench import COMMANDS, module_of
from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.reports import write_json


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(CHECKOUT / "scripts" / "bench")
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False
    )


def test_the_list_has_a_line_for_each() -> None:
    listed = bench("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(len(line.split()) > 4 for line in listed), "each says what it measures"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(module_of(name)).main)


def test_a_command_has_its_own_flags() -> None:
    result = bench("perf_analyzer", "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: bench perf_analyzer")


def test_an_unknown_name_is_refused_by_name() -> None:
    refused = bench("stepp")
    assert refused.returncode == 2
    assert "there is no 'stepp'" in refused.stderr
    assert bench().returncode == 2


def test_a_list_of_figures_is_a_line_of_a_report(tmp_path: Path) -> None:
    report = {"rates": [1.083, None, 2], "told": ["a [\n 1, 2\n], b", "c"], "by": [{"none": []}]}
    write_json(report, file := tmp_path / "report.json")
    assert json.loads(file.read_text()) == report
    assert '  "rates": [1.083, null, 2],\n' in file.read_text()
