"""Parameters of a Triton request."""

from __future__ import annotations

import json
from typing import Any


def parameters(request: Any) -> dict[str, Any]:
    """The parameters of a Triton request; none where a client's are no text."""
    try:
        values: dict[str, Any] = json.loads(request.parameters() or "{}")
    except ValueError:
        return {}
    return values
