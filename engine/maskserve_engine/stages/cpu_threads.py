"""How many CPU threads the operations of a thread take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from maskserve_common.config import Config


def limit_threads(config: Config, filled: int | None = None) -> None:
    """CPU threads of the calling thread's operations: as many as are configured, or all.

    Args:
        config: of the worker.
        filled: that the operations keep busy, if that is known: it takes no more.
    """
    # A thread that has not computed yet takes the process's count when it first does; it is asked
    # here, so that it neither overwrites what is set nor finds a count of `one_cpu_thread`.
    threads = torch.get_num_threads()
    threads = config.model.torch_threads or threads
    torch.set_num_threads(threads if filled is None else min(threads, filled))


@contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Have the calling thread compute alone.

    An operation on several CPU threads leaves its caller a pool of them. OpenMP counts all pools of
    the process, and where there are more threads than cores none of them spins any more between two
    operations: each wakes from sleep for each, and a step takes half as long again. So in the
    denoiser only the thread that takes the steps may have a pool.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
