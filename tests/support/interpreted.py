"""Programs whose kernels in the Triton language are interpreted, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(program: str, *args: str) -> None:
    """Run a Python program that ends by itself where nothing in it fails.

    In a process apart: the interpreter is chosen when a kernel is defined, and inductor must not
    see it.
    """
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
