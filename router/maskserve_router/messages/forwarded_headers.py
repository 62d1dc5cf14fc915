"""The headers of a request that go on to a worker: known ones, of a known form and length.

All others end here. What a client makes up would count against the bounds of the worker's gRPC,
which ends a call for its headers in words that cannot be told from a failure of its own.
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
    """What goes on to a worker.

    Args:
        headers: of the call, names in lower case.

    Raises:
        InvalidRequest: the trace's header has another form, or one of the client's own (`x-`) has
            characters that are not ASCII or a name that says its value is binary.
    """
    for name, value in headers.items():
        if name.startswith("x-") and (name.endswith("-bin") or not value.isascii()):
            raise InvalidRequest(name[:60], "is no text of ASCII characters", "printable ASCII")
    parent, state = headers.get("traceparent"), headers.get("tracestate")
    if parent is None:
        return ()
    if _TRACEPARENT.fullmatch(parent) is None:
        raise InvalidRequest("traceparent", "has another form", "00-TRACE-SPAN-FLAGS, hexadecimal")
    if state is None:
        return (("traceparent", parent),)
    if _TRACESTATE.fullmatch(state) is None:
        raise InvalidRequest("tracestate", "is no text of ASCII characters", "up to 512 of them")
    return (("traceparent", parent), ("tracestate", state))


def foreign_id(headers: Mapping[str, str]) -> str:
    """The id that a client or a proxy has for a request, as far as it can be shown; empty: none."""
    header_id = headers.get("x-request-id", "")[:128]
    return "".join(c for c in header_id if c.isascii() and c.isprintable())
