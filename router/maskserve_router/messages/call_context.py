"""How a request came to a listener: what goes with it as far as its log line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maskserve_router.key_holder import KeyHolder


@dataclass(frozen=True, slots=True)
class CallContext:
    """The call that brought a request."""

    client: KeyHolder
    """Holder of the key that calls."""
    size: int
    """Bytes of the request as it came."""
    headers: Mapping[str, str]
    """Headers of the call, names in lower case."""
    route: str
    """Name of the interface, for logs and metrics."""
    timeout: float | None = None
    """Seconds that the client waits."""
