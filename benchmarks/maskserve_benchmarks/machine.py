"""The name of this machine in reports."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

from maskserve_common.config import cores


def processor() -> str:
    """Return the model name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def stolen_s() -> float:
    """Return the seconds that a virtual machine's host ran something else while there was work,
    since the machine started and summed over its processors; 0 if the system does not report it.
    """
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def machine() -> str:
    """Return the processor, and how many of its cores this process may use."""
    return f"{processor()}, {cores()} cores"
