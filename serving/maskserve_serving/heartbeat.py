"""Triton's health over HTTP: alive and ready."""

from __future__ import annotations

import http.client
import threading
import urllib.error
import urllib.request

_EVERY_S = 1.0
_TIMEOUT_S = 5.0


class Heartbeat:
    """Asks a server repeatedly whether it is alive, in a thread."""

    def __init__(self, http_url: str) -> None:
        self.beats = 0
        """Number of its answers."""
        self._http_url = http_url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop asking, without waiting for an answer under way."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if _status(f"{self._http_url}/v2/health/live", _TIMEOUT_S) is not None:
                self.beats += 1
            self._stop.wait(_EVERY_S)


def is_ready(http_url: str, timeout_s: float = 2.0) -> bool:
    """Return True if the server there answers that it is ready."""
    return _status(f"{http_url}/v2/health/ready", timeout_s) == 200


def _status(url: str, timeout_s: float) -> int | None:
    """Return the HTTP status of an answer; None: there was no answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, http.client.HTTPException):  # urllib's errors are OSErrors
        return None
