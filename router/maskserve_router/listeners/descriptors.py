"""Limits on file descriptors of this process, and the number of connections that they allow.

A listener without free descriptors accepts nobody, not even operators.
"""

from __future__ import annotations

import resource

_MOST = 65_536
_RESERVED = 256
"""Descriptors for workers, operators, name look-ups, fetched pictures and files."""
_LEAST = 16


def raise_limit() -> None:
    """Raise the limit to what the system allows, up to `_MOST`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connections(most: int) -> int:
    """Return the connections that one client port may have: `most`, or what descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max((soft - _RESERVED) // 2, _LEAST))
