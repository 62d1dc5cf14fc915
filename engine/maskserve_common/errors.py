"""Everything that can go wrong, as one tree.

MaskserveError
 ├── InvalidRequest     INVALID_REQUEST      the request can never succeed as it is
 ├── TemplateNotFound   TEMPLATE_NOT_FOUND   settings.template_id names nothing we keep
 ├── AdapterNotFound    ADAPTER_NOT_FOUND    settings.loras names nothing that the storage has
 ├── Refused            REFUSED              the operator's check lets the picture not pass
 ├── Overloaded         OVERLOADED           the queue is full, the worker is draining, or the
 │                                           adapters' storage does not answer
 ├── DeadlineExceeded   DEADLINE_EXCEEDED    settings.deadline_ms passed before the edit was done
 ├── Cancelled          CANCELLED            the client or an operator withdrew the edit
 └── EngineFailed       ENGINE_FAILED        the worker's fault; the same request may succeed again

Each message begins with `[CODE]`, because Triton streams carry only the message (design §3).
"""

from __future__ import annotations

import logging
import re

log = logging.getLogger("maskserve")


class MaskserveError(Exception):
    """Base of all errors a client may see. `str(error)` is the whole message with its code."""

    code = "ENGINE_FAILED"

    def __init__(self, message: str) -> None:
        message = _printable(message)
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


def _printable(text: str) -> str:
    """`text` on one line, in characters that every encoding and log takes.

    Messages repeat what clients sent: a key of lone surrogates cannot be encoded as UTF-8, and
    one with line breaks could pass for another message.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InvalidRequest(MaskserveError):
    """Bad input. The message names the field, the problem and the accepted values."""

    code = "INVALID_REQUEST"

    def __init__(self, field: str, problem: str, accepted: str = "") -> None:
        super().__init__(f"{field}: {problem}" + (f"; accepted: {accepted}" if accepted else ""))
        self.field = field


class TemplateNotFound(MaskserveError):
    code = "TEMPLATE_NOT_FOUND"


class AdapterNotFound(MaskserveError):
    code = "ADAPTER_NOT_FOUND"


class Refused(MaskserveError):
    code = "REFUSED"


class Overloaded(MaskserveError):
    code = "OVERLOADED"


class DeadlineExceeded(MaskserveError):
    code = "DEADLINE_EXCEEDED"


class Cancelled(MaskserveError):
    code = "CANCELLED"


class EngineFailed(MaskserveError):
    code = "ENGINE_FAILED"


CODES = (
    InvalidRequest.code,
    TemplateNotFound.code,
    AdapterNotFound.code,
    Refused.code,
    Overloaded.code,
    DeadlineExceeded.code,
    Cancelled.code,
    EngineFailed.code,
)

_CODE = re.compile(r"\[(" + "|".join(CODES) + r")\] ?")


def split_code(text: str) -> tuple[str, str]:
    """Return the `(code, message)` of an error text, which other processes may have wrapped.

    Triton's ensemble scheduler puts "in ensemble 'edit_pipeline', " before a step's message, so the
    code may be anywhere. A text without a code is ENGINE_FAILED.
    """
    match = _CODE.search(text)
    if match is None:
        return EngineFailed.code, text
    return match.group(1), text[match.end() :]


def internal_error(request_id: str) -> MaskserveError:
    """Return the error that a client gets for an unexpected exception; the log has the rest."""
    return EngineFailed(f"internal error (request {request_id or 'unknown'})")


def guarded(request_id: str, error: BaseException) -> MaskserveError:
    """`error` if it is meant for clients; else it is logged with its trace and hidden."""
    if isinstance(error, MaskserveError):
        return error
    extra = {"request_id": request_id}
    log.error("%s: %s", type(error).__name__, error, exc_info=error, extra=extra)
    return hidden(str(error), request_id)


def hidden(text: str, request_id: str) -> MaskserveError:
    """Return the error that a client gets in place of a foreign error text.

    TRITON-2.51: Triton's own text may help an attacker, such as the name of a region of shared
    memory when that is full. A large request is no fault of the worker, and another may have room.
    """
    if "shared memory" in text.lower():
        return Overloaded("the worker has no room in shared memory for the request")
    return internal_error(request_id)
