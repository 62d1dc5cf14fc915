"""Errors of a row's lookaheads, measured at no cost where the row arrives at a refresh step.

A lookahead computes a refresh step in advance, from the latents that the row expects there. The row
then takes that step with its real latents, so the model answers twice for the computed tokens. The
difference between the two answers is large where keys and values bend more than the step cache
interpolates, and such edits are far from dense ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskserve_engine.batch.transfer import HostCopy


class LookaheadErrors:
    """Relative errors |v - v_ahead| / |v| by refresh step. v is the model's answer for the computed
    tokens, v_ahead the lookahead's.

    No step waits for them: norms are computed on the device and copied to the host asynchronously.
    """

    def __init__(self) -> None:
        self._ahead: dict[int, Tensor] = {}
        """Lookaheads' answers, by the refresh steps at which the row has not arrived."""
        self._norms: dict[int, HostCopy] = {}
        """[2] norms of difference and answer, by refresh step."""

    def for_new_cache(self) -> LookaheadErrors:
        """Return the errors so far, for a step cache that begins anew."""
        errors = LookaheadErrors()
        errors._norms = dict(self._norms)
        return errors

    def expect(self, refresh_step: int, answer: Tensor) -> None:
        """Keep a lookahead's answer for the computed tokens; `answer` may not change later."""
        self._ahead[refresh_step] = answer

    def arrive(self, step: int, answer: Tensor) -> None:
        """Measure the error of a lookahead, if `step` is its refresh step.

        Args:
            step: number of the row's step.
            answer: the model's answer, of the shape that `expect` got; it is only read.
        """
        ahead = self._ahead.pop(step, None)
        if ahead is not None:
            norms = [
                torch.linalg.vector_norm(tensor, dtype=torch.float32)
                for tensor in (answer - ahead, answer)
            ]
            self._norms[step] = HostCopy(torch.stack(norms))

    def by_step(self) -> dict[int, float]:
        """Return the errors, by refresh step. Waits until the device has computed them."""
        arrays = {step: norms.array() for step, norms in sorted(self._norms.items())}
        return {
            step: float(difference / norm) if norm else 0.0
            for step, (difference, norm) in arrays.items()
        }
