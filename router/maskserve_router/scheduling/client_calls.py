"""The life of an edit or a workflow run: under way by its id, cancelled by it, ended in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from maskserve_common.contracts.due_times import OK
from maskserve_common.errors import Cancelled, InvalidRequest, MaskserveError
from maskserve_common.logs import about
from maskserve_common.servers.failure import Failure
from maskserve_router.key_holder import EditCounts
from maskserve_router.messages.client_call import ClientCall
from maskserve_router.messages.failures import guarded
from maskserve_router.workers.stream_buffer import StreamBuffer

log = logging.getLogger("maskserve.router")
_LONGEST_ERROR = 300
"""Most characters of an error in the log."""
C = TypeVar("C", bound=ClientCall)


class ClientCalls(Generic[C]):
    """Calls of one kind that are under way, by request id. Use it from the event loop only."""

    def __init__(self) -> None:
        self._calls: dict[str, C] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, request_id: str) -> C | None:
        return self._calls.get(request_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel a call in any phase. Return False: none with this id is under way."""
        call = self._calls.get(request_id)
        return call is not None and call.cancel()

    @contextmanager
    def under_way(self, call: C) -> Iterator[None]:
        """Register a call for the block. Raises InvalidRequest: its id is in use."""
        if call.request_id in self._calls:
            raise InvalidRequest(
                "SETTINGS.request_id", "names an edit that is in flight", "a fresh id"
            )
        self._calls[call.request_id] = call
        try:
            yield
        finally:
            del self._calls[call.request_id]


async def messages_of(
    call: ClientCall, work: Coroutine[Any, Any, Any], buffer: StreamBuffer
) -> AsyncGenerator[bytes, None]:
    """Do the work of a call and yield the messages that it puts into `buffer`.

    When the generator ends or is closed, the work has ended.

    Raises:
        Cancelled: the call was cancelled by its id.
        Exception: the work failed.
    """
    call.work = asyncio.create_task(work)
    call.work.add_done_callback(buffer.end)
    if call.cancelled:
        call.work.cancel()
    try:
        async for message in buffer:
            yield message
        try:
            call.work.result()
        except asyncio.CancelledError:
            raise Cancelled(f"the {call.kind} was cancelled") from None
    finally:
        call.work.cancel()
        await asyncio.gather(call.work, return_exceptions=True)


@contextmanager
def logged(
    call: ClientCall,
    ended: Callable[[str, MaskserveError | Failure | None], Mapping[str, Any]],
) -> Iterator[None]:
    """Count a call for its owner when the block ends, and write its log line.

    Args:
        call: the call.
        ended: called with the code and the error, if there is one; returns further fields of the
            line.

    Raises:
        EngineFailed: instead of an exception that is no error for clients.
    """
    error: MaskserveError | Failure | None = None
    try:
        yield
    except (MaskserveError, Failure) as known:
        error = known
        raise
    except Exception as surprise:
        error = guarded(call.request_id, surprise)
        raise error from None
    except BaseException:
        error = Cancelled("the client left")
        raise
    finally:
        code = OK if error is None else error.code
        seconds = time.monotonic() - call.arrival
        served = call.owner.served.setdefault(call.message.head.model_name, EditCounts())
        served.add(seconds, succeeded=error is None)
        fields = {
            "code": code,
            "client": call.owner.name,
            "seconds": round(seconds, 4),
            **ended(code, error),
        }
        if error is not None:
            text = error.details if isinstance(error, Failure) else str(error)
            fields["error"] = text[:_LONGEST_ERROR]
        extra = {**about(call.request_id), "event": call.kind, "fields": fields}
        log.info("%s %s", call.kind, code, extra=extra)
