"""Parameters of a Triton request."""

from __future__ import annotations

import json
from typing import Any


def parameters(request: Any) -> dict[str, Any]:
    """Return the parameters of a Triton request; none if they are not JSON."""
    try:
        values: dict[str, Any] = json.loads(request.parameters() or "{}")
    except ValueError:
        return {}
    return values
