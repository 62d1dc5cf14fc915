"""Finds the HTTP and the gRPC address of a server from either of the two.

A router and a worker have gRPC on the port after HTTP's. The port itself is asked which of them it
is.
"""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

from maskserve_client.wire import DEFAULT_URL, address
from maskserve_common.errors import InvalidRequest

DEFAULTS = ("localhost:8080", "localhost:9000")
"""Addresses to try if none is given: the HTTP ports of a router and of a worker."""
_TIMEOUT_S = 2.0
_SCHEMES = ("http", "https")


def grpc_address(url: str, context: ssl.SSLContext | None = None) -> str:
    """Return HOST:PORT of gRPC.

    Args:
        url: either address, with or without a scheme; empty: the first of `DEFAULTS` that answers.
        context: TLS context if the server speaks TLS.

    Raises:
        InvalidRequest: `url` is not an address.
    """
    url = url or next((candidate for candidate in DEFAULTS if _speaks_http(candidate)), DEFAULT_URL)
    if urlsplit(url).scheme in _SCHEMES:
        parts = urlsplit(url)
        if parts.path.strip("/") or not parts.hostname:
            raise _no_address(url)
        if parts.port is None:  # a proxy in front takes both
            return f"{_bracketed(parts.hostname)}:{443 if parts.scheme == 'https' else 80}"
        return _neighbour(parts.netloc, 1)
    host_port = address(url)
    http = host_port == url and _speaks_http(host_port, context)
    return _neighbour(host_port, 1) if http else url


def http_address(url: str, context: ssl.SSLContext | None = None) -> str:
    """Return http[s]://HOST:PORT; see `grpc_address`."""
    url = url or next((candidate for candidate in DEFAULTS if _speaks_http(candidate)), DEFAULTS[0])
    if urlsplit(url).scheme in _SCHEMES:
        return url
    host_port = address(url)
    lower_address = _neighbour(host_port, -1)
    chosen_address = (
        lower_address
        if not _speaks_http(host_port, context) and _speaks_http(lower_address, context)
        else host_port
    )
    return f"{'https' if context else 'http'}://{chosen_address}"


def _speaks_http(host_port: str, context: ssl.SSLContext | None = None) -> bool:
    """Return True if HTTP answers at HOST:PORT."""
    parts = urlsplit(f"//{host_port}")
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _no_address(host_port) from None
    connection = (
        http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        if context is None
        else http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    )
    try:
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _neighbour(host_port: str, by: int) -> str:
    """Return HOST:PORT with the port moved by `by`."""
    try:
        parts = urlsplit(f"//{host_port}")
        return f"{_bracketed(parts.hostname or '')}:{(parts.port or 0) + by}"
    except ValueError:
        raise _no_address(host_port) from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _no_address(url: str) -> InvalidRequest:
    return InvalidRequest("url", f"{url} is not an address", f"HOST:PORT, as {DEFAULTS[0]}")
