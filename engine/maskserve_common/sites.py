"""Find the web site whose page made a browser send a request, from the request's headers.

A browser lets every page send simple requests anywhere, also to ports of its own machine. `Origin`
names the page's site, and `Host` the name that the browser looked up. DNS rebinding points a page's
name at this machine after the page has loaded; such a page has the same origin, so names are
checked too. Programs other than browsers send any headers, and are not checked.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

ANY_SITE = "*"


def foreign_site(
    headers: Mapping[str, str], names: Sequence[str] | None = None, origins: Sequence[str] = ()
) -> str:
    """Return the reason why a request comes from a foreign site; empty: it does not, or no
    browser's page sent it.

    Args:
        headers: headers by name in lower case.
        names: names of the listener, as `has_name`; None: any.
        origins: further origins whose pages may send requests; `ANY_SITE` means all.
    """
    host, origin = headers.get("host"), headers.get("origin")
    if names is not None and host is not None and not has_name(host, names):
        return f"Host: {host[:100]!r} is not a name of this server"
    if origin is None or origin in origins or ANY_SITE in origins:
        return ""
    try:
        site = urlsplit(origin).netloc.lower()
    except ValueError:
        site = ""
    if site and host is not None and site == host.lower():
        return ""
    return f"Origin: {origin[:100]!r} is another site"


def has_name(host: str, names: Sequence[str]) -> bool:
    """Whether a `Host` names this machine in a way that foreign DNS cannot.

    Such names are addresses, `localhost`, a name without a dot (which only the local network
    knows), the machine's own name, and `names`; one that begins with a dot means all names below
    it.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if not name:
        return False
    if "." not in name and ":" not in name:
        return True
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        pass
    if name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    known_names = [candidate.lower() for candidate in names]
    return name in known_names or any(
        name.endswith(candidate) for candidate in known_names if candidate.startswith(".")
    )
