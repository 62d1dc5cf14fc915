"""The denoiser's CPU threads: a pool that nobody needs slows every step down."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_common.config_file import config_of
from maskserve_engine.families import specs as registry
from maskserve_engine.families.specs import filled_threads, load_spec
from maskserve_engine.stages.cpu_threads import limit_threads

_COUNT = """
import os, threading
import torch
from maskserve_common.config_file import config_of
from maskserve_engine.families import specs
from maskserve_engine.stages.unused_libraries import hide_unused_libraries
from maskserve_engine.start.assembly import load_engine
from maskserve_engine.loop.engine import Engine
from maskserve_benchmarks.checkout import DEMO_MODEL

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

torch.set_num_threads({threads})
specs._FILLS = {fills}
config = config_of({{"model": {{"path": str(DEMO_MODEL), "torch_threads": {configured}}}}})
hide_unused_libraries(config, text=False)
before = native()
engine = load_engine(config)
engine.start()
engine.warm_up()
print(native() - before, engine.ask(torch.get_num_threads).result())
engine.close(5.0)
"""


@pytest.mark.parametrize(
    ("configured", "filled", "threads"),
    [(0, None, 5), (3, None, 3), (0, 2, 2), (3, 2, 2), (3, 4, 3)],
)
def test_a_thread_takes_no_more_than_its_operations_fill(
    configured: int, filled: int | None, threads: int
) -> None:
    config = config_of({"model": {"path": str(DEMO_MODEL), "torch_threads": configured}})

    def limited() -> int:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(5)
        try:
            limit_threads(config, filled)
            return torch.get_num_threads()
        finally:
            torch.set_num_threads(num_threads)

    with ThreadPoolExecutor(1) as aside:
        assert aside.submit(limited).result() == threads


def test_operations_of_a_small_model_fill_one_thread() -> None:
    config = config_of({"model": {"path": str(DEMO_MODEL)}})
    shapes = CHECKOUT / "assets/models"
    for model, least, most in (
        ("demo", 1, 1),
        ("demo-unet", 1, 1),
        ("sd21-shapes", 64, 1024),
        ("flux1-fill-shapes", 1024, 8192),
    ):
        assert least <= filled_threads(config, load_spec(shapes / model)) <= most


# Processes that load a model, for speed alone; test_prepared.py has threads of preparing.
@pytest.mark.slow
@pytest.mark.parametrize(("threads", "configured"), [(3, 0), (1, 3)])
def test_the_thread_that_takes_the_steps_is_the_only_one_with_a_pool(
    threads: int, configured: int
) -> None:
    count = _count(threads=1, configured=1)
    assert count[1] == 1
    assert _count(threads, configured) == (count[0] + 2, 3)
    assert _count(threads, configured, fills=registry._FILLS) == count  # it is a small model


def _count(threads: int, configured: int, fills: float = 1.0) -> tuple[int, int]:
    """Threads that loading and stepping left behind, not Python's own, and those of a step."""
    code = _COUNT.format(threads=threads, configured=configured, fills=fills)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    native, step = result.stdout.split()
    return int(native), int(step)
