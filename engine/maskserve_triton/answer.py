"""The one final answer of an accepted request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from maskserve_common.errors import MaskserveError, guarded
from maskserve_triton.tensor_io import error_response, named_tensors

log = logging.getLogger("maskserve")

OnEnd = Callable[[MaskserveError | None, dict[str, Any]], None]
"""Callback, called once, with the final answer: an error, or outputs."""


def _nobody(error: MaskserveError | None, outputs: dict[str, Any]) -> None:
    pass


class Answer:
    """Sends a request's events, exactly one of them final.

    Several threads use an Answer: one waits for the pipeline, one watches for cancels. The first
    one that finishes it wins; later calls have no effect.

    TRITON-2.51: asking whether a request was cancelled crashes the server once its final response
    was sent. So sending and asking share a lock with the flag of the final response.

    TRITON-2.51: while it sends, the stub drops the tensors that nobody asked for, without Python's
    lock. If its reference were the last, it would free them there, and the process would die of a
    corrupted heap sooner or later. So `tensors` is kept until the response is out.
    """

    def __init__(self, api: Any, sender: Any, on_end: OnEnd = _nobody) -> None:
        self._api = api
        self._sender = sender
        self._on_end = on_end
        self._lock = threading.Lock()
        self._done = False

    @property
    def done(self) -> bool:
        return self._done

    def event(self, kind: str, outputs: dict[str, Any]) -> bool:
        """Send an event that others follow, of whatever kind; False when it is too late."""
        tensors = named_tensors(self._api, outputs)
        message = self._api.InferenceResponse(tensors)
        with self._lock:
            if self._done:
                return False
            self._sender.send(message)
            return True

    def finish(self, outputs: dict[str, Any]) -> bool:
        """Send the result, or an error if its tensors cannot be made; False when the request has
        been answered already.
        """
        try:
            tensors = named_tensors(self._api, outputs)
        except Exception as problem:
            return self.fail(guarded("", problem))
        return self._final(self._api.InferenceResponse(tensors), None, outputs)

    def fail(self, error: MaskserveError) -> bool:
        """Send an error as the final answer; False when there was one already."""
        return self._final(error_response(self._api, error), error, {})

    def end(self) -> None:
        """End the responses; nothing happens after a final one."""
        self._final(None, None, {})

    def cancelled(self) -> bool:
        """Whether the client has withdrawn the request and it is not answered yet.

        False while something is being sent: a thread that polls many requests must not wait for one
        client.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._done and bool(self._sender.is_cancelled())
        finally:
            self._lock.release()

    def _final(self, message: Any, error: MaskserveError | None, outputs: dict[str, Any]) -> bool:
        with self._lock:
            if self._done:
                return False
            self._done = True
            flags = self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            try:
                if message is None:
                    self._sender.send(flags=flags)
                else:
                    self._sender.send(message, flags=flags)
            except Exception as problem:
                error = guarded("", problem)
                self._send_failure(error)
        # Without the lock: the poll for cancels must not wait for a log's disk.
        self._on_end(error, outputs)
        return True

    def _send_failure(self, error: MaskserveError) -> None:
        """Send an error in place of an answer that found no room; an error needs almost none."""
        flags = self._api.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            self._sender.send(error_response(self._api, error), flags=flags)
        except Exception:
            log.exception("an answer could not be sent")


def answer_all(api: Any, requests: Iterable[Any], take: Callable[[Any, Answer], object]) -> None:
    """Pass on requests, each with its Answer; a request that cannot be taken gets its error.

    Args:
        api: triton_python_backend_utils.
        requests: requests of `execute`.
        take: takes a request and its Answer, which it may finish later.
    """
    for request in requests:
        answer = Answer(api, request.get_response_sender())
        try:
            take(request, answer)
        except Exception as error:
            answer.fail(guarded("", error))
