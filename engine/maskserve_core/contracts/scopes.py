"""Whose a request id is, where clients are told apart by API keys.

A router with keys puts the client's scope before the id: `k3f0…!my-edit`. To a worker that is one
id as any other, so two clients may use the same name at a time and neither can cancel the other's
edit. META leaves the scope out. A registered template has scopes as its owners.
"""

from __future__ import annotations

import re

SCOPE = re.compile(r"[0-9a-z]{1,32}")
"""The form of a scope."""
NO_SCOPE = ""
"""Of edits that came without a router, or through one without keys: they may use every template."""
SHARED = "shared"
"""The owner that stands for every client."""


def scoped(scope: str, name: str) -> str:
    """The request id that a worker is given for a client's `name`."""
    return f"{scope}!{name}" if scope else name


def scope_of(request_id: str) -> str:
    """The scope of an id that a worker was given; NO_SCOPE if it has none."""
    return request_id.rpartition("!")[0]


def name_of(request_id: str) -> str:
    """The client's own name of an id that a worker was given."""
    return request_id.rpartition("!")[2]
