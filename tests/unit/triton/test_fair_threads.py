"""Threads that keys share: whose turn it is, and who gives way."""

from __future__ import annotations

import os
import threading

import pytest

from maskserve_common.shares import Full
from maskserve_triton.fair_threads import FairThreads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_give_way_and_their_process_does_not():
    threads, niceness_values, finished_event = (
        FairThreads(1, 8, "nice", 5),
        list[int](),
        threading.Event(),
    )
    process_niceness = niceness()
    threads.submit("any", lambda: (niceness_values.append(niceness()), finished_event.set()))  # type: ignore[arg-type, func-returns-value]
    assert finished_event.wait(30)
    threads.close()
    assert niceness_values == [min(19, process_niceness + 5)]
    assert niceness() == process_niceness


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
