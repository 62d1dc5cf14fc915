"""A part of the run: steps with limits, and a report that is kept after each of them."""

from __future__ import annotations

import faulthandler
import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from maskserve_benchmarks.reports import write_json
from maskserve_studies.gpu_run.machine_parts import in_words

Figures = dict[str, Any]
STUCK_S = 15.0
"""Seconds after the limit of a part until its process ends, if a call into a library does not
return."""


class StepTimeout(BaseException):
    """A step took longer than its limit. No `except Exception` of what it runs keeps it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise StepTimeout in the main thread after this time. An outer limit stays in force."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise StepTimeout(f"it took more than {seconds:.0f} s")

    begin = time.monotonic()
    before = signal.signal(signal.SIGALRM, expired)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        left = max(outer_s - (time.monotonic() - begin), 0.01) if outer_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, left)


def limited_call(call: Callable[[], Any], limit_s: float, over: str) -> tuple[Any, str]:
    """Return a call's result and no reason; or None, and why it failed or took too long.

    Args:
        call: what is called.
        limit_s: its limit.
        over: the reason if no time is left.
    """
    try:
        if limit_s <= 0:
            raise StepTimeout(over)
        with time_limit(limit_s):
            return call(), ""
    except StepTimeout as error:
        return None, in_words(error)
    except Exception as error:  # libraries and drivers raise all kinds
        traceback.print_exc()
        return None, in_words(error)


class Run:
    """One part.

    Args:
        name: key of the part in the report.
        file: JSON file of the report; other parts in it stay.
        about: command, hardware and date.
        limit_s: seconds of the whole part.
    """

    def __init__(self, name: str, file: Path, about: Mapping[str, Any], limit_s: float) -> None:
        self._file, self._begin = file, time.monotonic()
        self._end = self._begin + limit_s
        self._report: Figures = {}
        if file.exists():
            self._report = json.loads(file.read_text(encoding="utf-8"))
        self.steps: dict[str, Figures] = {}
        self._part: Figures = {**about, "limit_s": limit_s, "steps": self.steps}
        self._report[name] = self._part
        faulthandler.dump_traceback_later(limit_s + STUCK_S, exit=True)

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def step(self, name: str, limit_s: float, call: Callable[[], Any]) -> Any:
        """Return the result of a call; None if it fails or takes too long, and then the report says
        why. Figures (a dictionary or a list) are kept.
        """
        begin, limit_s = time.monotonic(), min(limit_s, self.left_s())
        self.steps[name] = {"why": "the run ended during this step"}
        self.keep()
        result, why = limited_call(
            call, limit_s, f"the part's {self._part['limit_s']:.0f} s were over"
        )
        if why:
            self.steps[name] = {"why": why}
        else:
            is_figures = isinstance(result, dict | list)
            self.steps[name] = {"figures": result} if is_figures else {}
        self.steps[name]["step_s"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {json.dumps(self.steps[name])[:300]}", flush=True)
        self.keep()
        return result

    def keep(self) -> None:
        self._part["seconds"] = round(time.monotonic() - self._begin, 1)
        scratch = self._file.with_name(self._file.name + ".part")
        write_json(self._report, scratch)
        scratch.replace(self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.keep()
