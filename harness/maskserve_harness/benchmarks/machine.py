"""What this machine is called in reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from maskserve_core.config import cores


def processor() -> str:
    """The model of its processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def stolen_s() -> float:
    """Seconds, since the machine started and summed over its processors, in which a virtual
    machine's host ran something else although there was work; 0 where that is not told.
    """
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    except OSError:
        return 0.0
    return int(line.split()[8]) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    return f"{processor()}, {cores()} cores"
