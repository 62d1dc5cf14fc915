"""Acks: a front acknowledges each event to the denoiser, so that the denoiser may send the next.

TRITON-2.51: the stub deadlocks if two responses of one call arrive in quick succession, both after
the first (docs/adr/0006-cancel-and-death.md). Three threads then wait in a circle. The one that
waits for the call's responses has woken with their lock and waits for Python's. The stub's, with
the second response, waits for the responses' lock and holds a lock of all calls. One that returns
from a new call holds Python's lock and waits for that of all calls. So if a call has several
responses, the denoiser sends the next only after an ack of the last.

Acks are lines in a named pipe of the worker's runtime folder; each names a call by its key.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maskserve_triton.answer import Answer

log = logging.getLogger("maskserve")

ACKS = "acks"
"""Request parameter: the key under which acknowledgements of its events arrive."""

_NAME = "acks"
_FINAL = "final"
_READ_BYTES = 65536
_OVER = " over"
_CLOSE = b"\n"
_POLL_S = 1.0
_LOST_S = 30.0


class FlowControl:
    """Sends an event after an ack of the last; a newer event then replaces one that still waits.

    So a call never has two responses under way. If the client is slower than the steps, it gets the
    newest events instead of a queue of old ones. The final event replaces all waiting ones; the end
    of the responses follows separately, after its ack.

    Args:
        answer: answer of the request.
        ended: called once, when the request has ended.
    """

    def __init__(self, answer: Answer, ended: Callable[[], None]) -> None:
        self._answer, self._ended = answer, ended
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[str, Any]] = {}
        """Kind of event -> its newest one, in sending order."""
        self._sending = False
        self._sealed = False
        """Whether the final event was given; no more events are accepted."""
        self._released = False
        self._over = False
        self._sent = time.monotonic()
        """Time at which the newest event was sent."""

    def event(self, kind: str, outputs: dict[str, Any]) -> None:
        """Send an event that others follow, now or later or, if a newer one comes, never."""
        self._put(kind, outputs)

    def finish(self, outputs: dict[str, Any]) -> None:
        """Send the final event; later ones are dropped."""
        self._put(_FINAL, outputs)

    def acknowledge(self) -> None:
        """The event under way has arrived: send the next."""
        with self._lock:
            self._sending = False
        self._go_on()

    def waits_s(self) -> float:
        """Seconds since the present event was sent without an ack; 0: there is none."""
        with self._lock:
            waits = self._sending and not self._released
            return time.monotonic() - self._sent if waits else 0.0

    def release(self) -> None:
        """Nobody takes events any more: from now on none waits, so that the request ends."""
        with self._lock:
            self._released = True
        self._go_on()

    def _put(self, kind: str, outputs: dict[str, Any]) -> None:
        with self._lock:
            if self._sealed:
                return
            if kind == _FINAL:
                self._sealed = True
                self._waiting.clear()
            self._waiting.pop(kind, None)
            self._waiting[kind] = outputs
        self._go_on()

    def _go_on(self) -> None:
        """Send one event or, once released, all; and then the end."""
        while (event := self._next()) is not None:
            self._answer.event(*event)
        with self._lock:
            ends = self._sealed and not self._over and not self._holds()
            self._over = self._over or ends
        if ends:
            self._answer.end()
            self._ended()

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        with self._lock:
            if not self._waiting or (self._sending and not self._released):
                return None
            self._sending, self._sent = True, time.monotonic()
            kind = next(iter(self._waiting))
            return kind, self._waiting.pop(kind)

    def _holds(self) -> bool:
        return bool(self._waiting) or (self._sending and not self._released)


class AckSender:
    """Sender of a front's acknowledgements of one call."""

    def __init__(self, runtime_dir: str | os.PathLike[str]) -> None:
        self.key = uuid.uuid4().hex
        self._pipe = Path(runtime_dir) / _NAME

    def acknowledge(self) -> None:
        """The newest event has arrived. Waits while the pipe is full."""
        self._write(self.key)

    def over(self) -> None:
        """End the call: its further events are not waited for."""
        self._write(self.key + _OVER)

    def _write(self, line: str) -> None:
        try:
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                return  # the denoiser is gone
            raise
        try:
            os.set_blocking(pipe, True)
            os.write(pipe, f"{line}\n".encode())  # short lines are written whole
        except BrokenPipeError:
            pass
        finally:
            os.close(pipe)


class AckReceiver:
    """The denoiser's end: reports each ack to the call with its key, in a thread of its own.

    Args:
        runtime_dir: runtime folder of the worker.
        poll_s: seconds between two checks for lost events.
    """

    def __init__(self, runtime_dir: str | os.PathLike[str], poll_s: float = _POLL_S) -> None:
        self._poll_s = poll_s
        path = Path(runtime_dir) / _NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a denoiser that was killed
        os.mkfifo(path, 0o600)
        # Open for both ways, it has no end when no front has it open.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._controls: dict[str, FlowControl] = {}
        self._thread = threading.Thread(target=self._run, name="acks", daemon=True)
        self._thread.start()

    def keep(self, key: str, call: FlowControl) -> None:
        """Report each ack for `key` to `call`, until `drop`."""
        self._controls[key] = call

    def drop(self, key: str) -> None:
        self._controls.pop(key, None)

    def close(self) -> None:
        os.write(self._file, _CLOSE)
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        partial_line, next_look = b"", 0.0
        while True:
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._poll_s
                self._release_lost()
            if not select.select([self._file], [], [], self._poll_s)[0]:
                continue
            *lines, partial_line = (partial_line + os.read(self._file, _READ_BYTES)).split(b"\n")
            for line in lines:
                if not line:
                    return
                self._take(line.decode("ascii", "replace"))

    def _release_lost(self) -> None:
        """Stop waiting for an event that Triton lost: its edit would never end."""
        for call in list(self._controls.values()):
            if call.waits_s() > _LOST_S:
                log.warning("an event has not arrived for %g s; its edit goes on", _LOST_S)
                _run_safely(call.release)

    def _take(self, line: str) -> None:
        call = self._controls.get(line.removesuffix(_OVER))
        if call is not None:  # else it has ended
            _run_safely(call.release if line.endswith(_OVER) else call.acknowledge)


def _run_safely(report: Callable[[], None]) -> None:
    try:
        report()
    except Exception:
        # One call's trouble is no other call's.
        log.exception("an event could not be sent")
