"""File descriptors of this process: as many as it may have, and how many connections they bear.

A listener that cannot accept for want of one leaves everybody waiting, operators too.
"""

from __future__ import annotations

import resource

_MOST = 65_536
_RESERVED = 256
"""Of workers, operators, look-ups, pictures fetched and files."""
_LEAST = 16


def raise_limit() -> None:
    """Take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connections(wanted: int) -> int:
    """How many one of the clients' two ports may have open: `wanted`, or what descriptors bear."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max((soft - _RESERVED) // 2, _LEAST))
