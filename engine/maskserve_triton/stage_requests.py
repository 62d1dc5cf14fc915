"""What a worker's encoder and decoder ask a stage service for, beside what edits ask of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskserve_common.contracts.parameters import parameters
from maskserve_common.errors import EngineFailed

REVISION = "stages_revision"
"""Parameter of a request that a worker sends on: the digest of the stages that it is made for."""
PRIMING_PROMPT = b'{"op":"priming_prompt"}'
"""REQUEST that asks the encoder for its file of that name, as CONDITIONING; its pictures have no
pixels."""
NO_PIXELS: NDArray[np.uint8] = np.zeros((0, 0, 3), np.uint8)


def check_revision(request: Any, own: Callable[[], str]) -> None:
    """Refuse a request of a worker whose model has other stages; a worker's own ask nothing.

    Raises:
        EngineFailed: it is one.
    """
    requested_revision = parameters(request).get(REVISION)
    if requested_revision is not None and requested_revision != own():
        raise EngineFailed("the stage service has the encoder and decoder of another model")
