"""A signal ends the wait for it, at whichever instruction of the wait it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from maskserve_serving.stop_signals import StopSignals

Handler = Callable[[int, FrameType | None], object]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, previous_handlers, strict=True):
        signal.signal(number, handler)


def ended(
    wait: Callable[[], object], handler: Handler, at: int, patience_s: float
) -> tuple[bool, bool]:
    """Whether a wait ends in so long, and whether it got as far as its instruction `at`.

    There the handler is called within it, as a signal's is.
    """
    remaining = at
    called = False

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal remaining, called
        frame.f_trace_opcodes = True
        if event == "opcode" and not called:
            remaining -= 1
            if remaining < 0:
                called = True
                sys.settrace(None)
                handler(signal.SIGTERM, None)
        return trace

    def waits() -> None:
        sys.settrace(trace)
        try:
            wait()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    thread.join(patience_s)
    return not thread.is_alive(), called


def ends_at_every_instruction(
    make: Callable[[], tuple[Callable[[], object], Handler]], patience_s: float
) -> bool:
    """Args: `make`: a wait and the handler that ends it, new ones at each call."""
    for at in range(400):
        over, called = ended(*make(), at, patience_s)
        if not over:
            return False
        if not called:
            return at > 10
    raise AssertionError("the wait has more instructions than were tried")


def test_it_ends() -> None:
    def make() -> tuple[Callable[[], object], Handler]:
        stop = StopSignals()
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        return lambda: stop.wait(0.02), handler

    assert ends_at_every_instruction(make, patience_s=60)


def test_an_event_does_not() -> None:
    def make() -> tuple[Callable[[], object], Handler]:
        stop = threading.Event()
        return lambda: stop.wait(0.02), lambda *_: stop.set()

    assert not ends_at_every_instruction(make, patience_s=2)


def test_each_further_signal_is_told() -> None:
    signals: list[int] = []
    stop = StopSignals(at_once=lambda: signals.append(1))
    assert not stop.is_set()
    assert not stop.wait(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    assert stop.is_set()
    assert stop.wait()
    assert signals == [1, 1]


def test_a_process_is_told() -> None:
    program = (
        "from maskserve_serving.stop_signals import StopSignals\n"
        "stop = StopSignals(); print('waits', flush=True); print(stop.wait())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    waits = subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True
    )
    assert waits.stdout is not None
    assert waits.stdout.readline() == "waits\n"
    waits.send_signal(signal.SIGTERM)
    assert waits.communicate(timeout=60) == ("True\n", None)
    assert waits.returncode == 0
