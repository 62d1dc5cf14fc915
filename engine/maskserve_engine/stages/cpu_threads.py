"""Number of CPU threads that a thread's operations use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from maskserve_common.config import Config


def limit_threads(config: Config, filled: int | None = None) -> None:
    """Set the CPU threads of the calling thread's operations: the configured number, or all; at
    most `filled`, the number that the operations keep busy, if known.
    """
    # A thread that has not computed yet takes the process's count when it first does; it is asked
    # before, so that it neither overwrites the setting nor finds a count of `one_cpu_thread`.
    threads = torch.get_num_threads()
    threads = config.model.torch_threads or threads
    torch.set_num_threads(threads if filled is None else min(threads, filled))


@contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Run the calling thread's operations on one CPU thread.

    Operations on several threads give their caller a pool. OpenMP counts all pools of the process,
    and with more threads than cores they stop spinning between operations: each wakes from sleep
    for each operation, and a step takes half as long again. So in the denoiser only the engine
    thread may have a pool.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
