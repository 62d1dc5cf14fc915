"""The denoiser's CPU threads: a pool that nobody needs slows every step down."""

from __future__ import annotations

import subprocess
import sys

import pytest

from maskserve_harness.checkout import CHECKOUT

_COUNT = """
import os, threading
import torch
from maskserve_core.config_file import config_of
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_engine.start.assembly import load_engine
from maskserve_engine.loop.engine import Engine
from maskserve_harness.checkout import DEMO_MODEL

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads({threads})
config = config_of({{"model": {{"path": str(DEMO_MODEL), "torch_threads": {configured}}}}})
hide_unused_libraries(config, text=False)
before = native()
engine = load_engine(config)
engine.start()
engine.warm_up()
print(native() - before, engine.ask(torch.get_num_threads).result())
engine.close(5.0)
"""


# Two processes that load a model, for speed alone; test_prepared.py has threads of preparing.
@pytest.mark.slow
@pytest.mark.parametrize(("threads", "configured"), [(3, 0), (1, 3)])
def test_the_thread_that_takes_the_steps_is_the_only_one_with_a_pool(
    threads: int, configured: int
) -> None:
    alone = _count(threads=1, configured=1)
    assert alone[1] == 1
    assert _count(threads, configured) == (alone[0] + 2, 3)


def _count(threads: int, configured: int) -> tuple[int, int]:
    """Threads that loading and stepping left behind, not Python's own, and those of a step."""
    code = _COUNT.format(threads=threads, configured=configured)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    native, step = done.stdout.split()
    return int(native), int(step)
