"""Requests of a worker's encoder and decoder to a stage service that are not edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskserve_common.contracts.parameters import parameters
from maskserve_common.errors import EngineFailed

REVISION = "stages_revision"
"""Parameter of a forwarded request: the digest of the stages that it is made for."""
OTHER_STAGES = "has the encoder and decoder of another model"
"""End of the error of a service that serves another model than the worker."""
PRIMING_PROMPT = b'{"op":"priming_prompt"}'
"""REQUEST for the encoder's file of the empty prompt, returned as CONDITIONING; its pictures have
no pixels."""
NO_PIXELS: NDArray[np.uint8] = np.zeros((0, 0, 3), np.uint8)


def check_revision(request: Any, revision: Callable[[], str]) -> None:
    """Refuse a request of a worker whose model has other stages; a worker's own requests name none.

    Raises:
        EngineFailed: the stages differ.
    """
    requested_revision = parameters(request).get(REVISION)
    if requested_revision is not None and requested_revision != revision():
        raise EngineFailed(f"the stage service {OTHER_STAGES}")
