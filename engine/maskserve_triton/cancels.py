"""How an edit ends without a waiting client: the front answers it, and asks the denoiser to free
its row.

The front's watcher sees a client that leaves and a deadline that passes. For a cancel by id,
`control` asks the fronts, which know each edit from acceptance to answer. The engine cannot decide
it: an edit that is being encoded has not reached it, and one that is being decoded has left it.
Each front listens at a socket in the worker's runtime folder; a message is an edit's id, the answer
whether the front has withdrawn it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from maskserve_common.errors import Cancelled, EngineFailed, MaskserveError
from maskserve_common.files.sockets import short_path
from maskserve_common.logs import about
from maskserve_triton.call import Call, Calls
from maskserve_triton.pipeline import ask_denoiser

log = logging.getLogger("maskserve")

_NAME = "cancels"
_WITHDRAWN, _UNKNOWN = b"1", b"0"
_MAX_ID_BYTES = 1024
_TIMEOUT_S = 5.0
_TELL_EVERY_S = 0.05
_TELLING_THREADS = 4


def cancel_edit(
    runtime_dir: str | os.PathLike[str], request_id: str, timeout_s: float = _TIMEOUT_S
) -> bool:
    """Ask the fronts to withdraw an edit; return False if none of them has it, or it is answered.

    Raises:
        EngineFailed: a front does not answer.
    """
    folder = Path(runtime_dir) / _NAME
    fronts = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    withdrawn = [_ask(folder, front, request_id, timeout_s) for front in fronts]
    return any(withdrawn)


def _ask(folder: Path, front: str, request_id: str, timeout_s: float) -> bool:
    try:
        with _socket() as asking, short_path(folder) as short:
            asking.settimeout(timeout_s)
            asking.connect(f"{short}/{front}")
            # Bytes that are no text name no edit: "?" is in no request id.
            asking.send(request_id.encode("utf-8", "replace")[:_MAX_ID_BYTES])
            return asking.recv(1) == _WITHDRAWN
    except (ConnectionError, FileNotFoundError):
        return False  # it has ended, and with it its edits
    except TimeoutError:
        raise EngineFailed(f"{front} does not answer") from None


class Withdrawals:
    """The edits of one front that are withdrawn."""

    def __init__(
        self, api: Any, runtime_dir: str | os.PathLike[str], front: str, calls: Calls
    ) -> None:
        self._api, self._calls = api, calls
        self._due: dict[Call, float] = {}
        """Time at which to repeat the withdrawal of an edit that is still in the pipeline to the
        denoiser; infinity while it is being sent."""
        self._pool = ThreadPoolExecutor(_TELLING_THREADS, f"{front}-cancels")
        self._listener = CancelListener(runtime_dir, front, self.withdraw_by_id)

    def withdraw_by_id(self, request_id: str) -> bool:
        """Withdraw an edit by id; return False if it is answered or not in this front."""
        error = Cancelled("the edit was cancelled")
        withdrawn = [self.withdraw(call, error) for call in self._calls.tries_of(request_id)]
        return any(withdrawn)

    def withdraw(self, call: Call, error: MaskserveError) -> bool:
        """Answer an edit with `error` and have its row freed; False when it was answered already.

        Waits while something is sent to this client, and for no other.
        """
        with call.withdrawing:
            was_withdrawn = call.withdrawn
            # Said before the client hears of it: its next edit may have the same id.
            call.withdrawn = True
            answered = call.answer.fail(error)
            call.withdrawn = was_withdrawn or answered
        if answered:
            self._report(call)
        return answered

    def repeat(self, now: float) -> None:
        """Repeat due withdrawals to the denoiser: an edit that had not reached it was not found.
        Call it regularly, from one thread.
        """
        for call, retry_at in list(self._due.items()):
            if now >= retry_at:
                self._report(call)

    def close(self) -> None:
        self._listener.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _report(self, call: Call) -> None:
        self._due[call] = math.inf
        self._pool.submit(self._ask_denoiser, call)

    def _ask_denoiser(self, call: Call) -> None:
        try:
            if call not in self._calls:
                self._due.pop(call, None)  # it has ended, and the id may be another edit's by now
                return
            ask_denoiser(self._api, {"op": "cancel", "request_id": call.request_id})
        except MaskserveError as error:
            log.warning("cancel: %s", error, extra=about(call.request_id))
        except Exception as error:
            log.error("cancel: %s", error, exc_info=error, extra=about(call.request_id))
        if call in self._due:
            self._due[call] = time.monotonic() + _TELL_EVERY_S


class CancelListener:
    """The front's end: withdraws edits that `control` names, in a thread of its own."""

    def __init__(
        self, runtime_dir: str | os.PathLike[str], front: str, withdraw: Callable[[str], bool]
    ) -> None:
        folder = Path(runtime_dir) / _NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / front
        self._path.unlink(missing_ok=True)  # of a front that was killed
        self._withdraw = withdraw
        self._listening = _socket()
        with short_path(folder) as short:
            self._listening.bind(f"{short}/{front}")
        self._listening.listen()
        self._thread = threading.Thread(target=self._run, name=f"{front}-{_NAME}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Withdraw no more; nothing happens the second time."""
        self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                try:
                    self._answer(connection)
                except OSError:
                    pass  # it has asked and gone away
                except Exception as error:
                    # No surprise is a reason to answer nobody any more.
                    log.error("a cancel could not be answered: %s", error, exc_info=error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        request_id = connection.recv(_MAX_ID_BYTES).decode("utf-8", "replace")
        connection.send(_WITHDRAWN if self._withdraw(request_id) else _UNKNOWN)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
