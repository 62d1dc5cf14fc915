"""The headers that the router forwards to a worker: known ones with a valid form and length.

All others end here. A client's own headers would count against limits of the worker's gRPC, which
ends a call with an error that looks like a failure of the worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Metadata: TypeAlias = Sequence[tuple[str, str]]
# https://www.w3.org/TR/trace-context/: ids of zeros are not valid; later versions may be longer.
_IDS = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(f"00-{_IDS}|(?!00|ff)[0-9a-f]{{2}}-{_IDS}(-[ -~]{{0,64}})?")
_TRACESTATE = re.compile("[ -~]{0,512}")


def known_headers(headers: Mapping[str, str]) -> Metadata:
    """Return the headers to forward to a worker. A malformed trace header is left out, as W3C's
    text asks: it may be a proxy's.

    Args:
        headers: headers of the call, names in lower case.
    """
    parent, state = headers.get("traceparent", ""), headers.get("tracestate")
    if _TRACEPARENT.fullmatch(parent) is None:
        return ()
    if state is None or _TRACESTATE.fullmatch(state) is None:
        return (("traceparent", parent),)
    return (("traceparent", parent), ("tracestate", state))


def foreign_id(headers: Mapping[str, str]) -> str:
    """Return the printable part of a client's or proxy's `x-request-id`; empty: none."""
    header_id = headers.get("x-request-id", "")[:128]
    return "".join(c for c in header_id if c.isascii() and c.isprintable())
