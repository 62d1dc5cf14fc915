"""The name of this machine in reports."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from maskserve_common.config import cores


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
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def machine() -> str:
    """The processor, and how many of its cores this process may use."""
    return f"{processor()}, {cores()} cores"
