"""The headers that the router forwards to a worker: known ones with a valid form and length.

All others end here. A client's own headers would count against limits of the worker's gRPC, which
ends a call with an error that looks like a failure of the worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from maskserve_common.errors import InvalidRequest

Metadata: TypeAlias = Sequence[tuple[str, str]]
# https://www.w3.org/TR/trace-context/: ids of zeros are not valid; later versions may be longer.
_IDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(-[ -~]{{0,64}})?")
_TRACESTATE = re.compile("[ -~]{0,512}")


def known_headers(headers: Mapping[str, str]) -> Metadata:
    """Return the headers to forward to a worker.

    Args:
        headers: headers of the call, names in lower case.

    Raises:
        InvalidRequest: the trace header is malformed, or a client's own header (`x-`) is not ASCII
            or has a name for binary values.
    """
    for name, value in headers.items():
        if name.startswith("x-") and (name.endswith("-bin") or not value.isascii()):
            raise InvalidRequest(name[:60], "is not ASCII text", "printable ASCII")
    parent, state = headers.get("traceparent"), headers.get("tracestate")
    if parent is None:
        return ()
    if _TRACEPARENT.fullmatch(parent) is None:
        raise InvalidRequest("traceparent", "has another form", "00-TRACE-SPAN-FLAGS, hexadecimal")
    if state is None:
        return (("traceparent", parent),)
    if _TRACESTATE.fullmatch(state) is None:
        raise InvalidRequest("tracestate", "is not ASCII text", "up to 512 characters")
    return (("traceparent", parent), ("tracestate", state))


def foreign_id(headers: Mapping[str, str]) -> str:
    """Return the printable part of a client's or proxy's `x-request-id`; empty: none."""
    header_id = headers.get("x-request-id", "")[:128]
    return "".join(c for c in header_id if c.isascii() and c.isprintable())
