"""The demo's cached activations outlive its worker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from maskserve_benchmarks.checkout import CHECKOUT


@pytest.mark.slow
def test_the_second_demo_reads_its_first_edit_from_disk(tmp_path: Path) -> None:
    demo = [sys.executable, str(CHECKOUT / "scripts" / "bench"), "demo", "--out", str(tmp_path)]
    outputs = [
        subprocess.run(demo, capture_output=True, text=True, check=True, timeout=300).stdout
        for _ in range(2)
    ]
    tiers = [
        re.findall(r"the first edit read [\d.]+ MiB from tier (\w+)", output) for output in outputs
    ]
    assert tiers == [["device"], ["disk"]]
