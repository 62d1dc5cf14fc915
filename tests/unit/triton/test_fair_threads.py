"""Threads that keys share: whose turn it is, and who gives way."""

from __future__ import annotations

import os
import threading

import pytest

from maskserve_common.niceness import Niceness
from maskserve_common.shares import Full
from maskserve_triton.fair_threads import FairThreads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_give_way_by_their_role_and_their_process_does_not():
    """A job may end in a thread that then starts the next thread; that one would inherit."""
    threads, process = FairThreads(2, 8, "nice", Niceness.READING, short_jobs=True), niceness()
    values, barrier = list[int](), threading.Barrier(3, timeout=30)

    def first() -> None:
        values.append(niceness())
        threads.submit("any", second)
        barrier.wait()

    def second() -> None:
        values.append(niceness())
        barrier.wait()

    threads.submit("any", first)
    barrier.wait()
    threads.close()
    assert values == [min(19, process + Niceness.READING)] * 2
    assert niceness() == process


def test_a_key_that_waits_with_many_jobs_leaves_threads_to_others():
    threads, go, begun = FairThreads(2, 8, "fair"), threading.Event(), threading.Event()
    for _ in range(3):
        threads.submit("greedy", lambda: go.wait(30) and None)
    threads.submit("modest", begun.set)
    assert begun.wait(30), "a thread was left to it"
    go.set()
    threads.close()


def test_a_key_may_not_fill_the_queue():
    threads, go = FairThreads(1, 4, "fair"), threading.Event()
    for _ in range(3):
        threads.submit("greedy", lambda: go.wait(30) and None)
    with pytest.raises(Full):
        threads.submit("greedy", go.set)
    threads.submit("modest", go.set)
    go.set()
    threads.close()
