"""Count the files and functions of the product that one edit enters, with all stages in one
process.

scripts/bench code_path --json
scripts/bench code_path --calls 30      # the functions entered most often
scripts/bench code_path --files         # each file with its calls and functions

The edit has 4 steps of the demo model and runs dense, or reads its template's entries. Turns of the
engine's loop that neither run a command nor take a step do not count: they show other processes
that the engine lives, however long the edit takes to encode. Each kind runs three times and the
run with the fewest calls counts, because the engine's threads also do other work.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.edits.direct import Direct
from maskserve_common.config_file import config_of
from maskserve_common.imaging.images import encode_png
from maskserve_engine.base.mailbox import Inbox
from maskserve_engine.loop.engine import Engine
from maskserve_engine.loop.step_runner import StepRunner

STEPS = 4
_KINDS = {"dense": "off", "cached": "require"}
_TIMES = 3


class _Turn(threading.local):
    """The present turn of the engine's loop, on the thread that takes it."""

    calls: Counter[CodeType] | None = None
    """Calls of the turn so far; None: this thread takes no turn now."""
    is_idle = True
    """Whether it has neither run a command nor taken a step."""


class CallCounter:
    """Counts calls of the product's functions in every thread that starts after it, except those of
    idle turns of the engine's loop.
    """

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()
        self._turn = _Turn()
        self._counting = False

    def __enter__(self) -> CallCounter:
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def count(self, work: Any) -> Counter[CodeType]:
        """Return the calls made while `work` runs."""
        self._calls = Counter()
        self._counting = True
        work()
        self._counting = False
        return Counter({code: n for code, n in self._calls.items() if _is_product(code)})

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code, turn = frame.f_code, self._turn
        if event == "call":
            if code is _TURN:
                turn.calls, turn.is_idle = Counter(), True
            if self._counting:
                calls = self._calls if turn.calls is None else turn.calls
                calls[code] += 1
                turn.is_idle = turn.is_idle and not _is_command_or_step(frame)
        elif event == "return" and code is _TURN and turn.calls is not None:
            if self._counting and not turn.is_idle:
                self._calls.update(turn.calls)
            turn.calls = None


_TURN, _STEP, _COMMANDS = (
    function.__code__ for function in (Engine.run_once, StepRunner.step, Inbox.run)
)


def _is_command_or_step(frame: FrameType) -> bool:
    """Return whether this call is a step, or a command from the inbox."""
    caller = frame.f_back
    return frame.f_code is _STEP or (caller is not None and caller.f_code is _COMMANDS)


def _is_product(code: CodeType) -> bool:
    """Return whether this is a function of the product; comprehensions do not count."""
    path = Path(code.co_filename)
    inside = any(path.is_relative_to(CHECKOUT / room) for room in ("engine", "model_repository"))
    return inside and (not code.co_name.startswith("<") or code.co_name == "<lambda>")


def measure() -> dict[str, Counter[CodeType]]:
    """Return how often each function was entered, by kind of edit."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
    mask = np.zeros((128, 128), np.uint8)
    mask[40:80, 40:72] = 255
    edit = (encode_png(pixels), encode_png(mask), "a red star")
    counts_by_kind = {}
    with CallCounter() as counter:
        worker = Direct(config_of({"model": {"path": str(DEMO_MODEL)}}))
        worker.engine.cache.prompt = lambda: worker.encoder.priming_prompt()
        for kind, cache in _KINDS.items():
            settings = {"num_inference_steps": STEPS, "cache": cache, "seed": 1}
            worker.edit(edit, settings)  # primes the template, and fills caches
            counts = [counter.count(lambda a=settings: worker.edit(edit, a)) for _ in range(_TIMES)]
            counts_by_kind[kind] = min(counts, key=Counter.total)
        worker.engine.close(grace_s=1.0)
    return counts_by_kind


def summary(calls: Counter[CodeType]) -> dict[str, int]:
    return {"files": len(by_file(calls)), "calls": calls.total()}


def by_file(calls: Counter[CodeType]) -> dict[str, Counter[CodeType]]:
    """Return the calls of each file, the file with most calls first."""
    files: dict[str, Counter[CodeType]] = {}
    for code, n in calls.items():
        files.setdefault(code.co_filename, Counter())[code] = n
    return dict(sorted(files.items(), key=lambda file: -file[1].total()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    parser.add_argument("--calls", type=int, default=0, help="functions to list")
    parser.add_argument("--files", action="store_true", help="list the files")
    options = parser.parse_args()
    counts_by_kind = measure()
    if options.json:
        dense = {f"dense_{name}": n for name, n in summary(counts_by_kind["dense"]).items()}
        print(json.dumps({**summary(counts_by_kind["cached"]), **dense}))
        return 0
    for kind, calls in counts_by_kind.items():
        print(f"{kind}: {summary(calls)['files']} files, {summary(calls)['calls']} calls")
        for code, n in calls.most_common(options.calls):
            path = Path(code.co_filename).relative_to(CHECKOUT)
            print(f"  {n:6} {path}:{code.co_firstlineno} {code.co_qualname}")
        for name, of_file in by_file(calls).items() if options.files else ():
            file = Path(name)
            lines = len(file.read_text(encoding="utf-8").splitlines())
            print(
                f"  {of_file.total():6} calls of {len(of_file):3} functions, {lines:4} lines: "
                f"{file.relative_to(CHECKOUT)}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
