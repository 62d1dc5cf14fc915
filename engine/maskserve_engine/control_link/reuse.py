"""Reuse of residuals: those that a step may add without waiting for its own (`adapters: fast`).

On a slow link residuals take a step to arrive. So a row requests them one step ahead, with latents
that its sampler extrapolates. Their only error comes from the change of the model's answer in that
step. Katz (§5) uses the latents of the step before instead
(docs/adr/0039-control-one-step-ahead.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SentRequest(NamedTuple):
    number: int
    step: int
    """Step whose timestep and scales the nets were given."""
    computed: int
    """Tokens that the base was to compute in that step."""
    slot: int
    """Slot of the residuals (`slots`)."""
    extrapolated: bool
    """Whether the latents were extrapolated."""


class Reuse:
    """The requests of one row whose residuals some step may still add.

    Args:
        scales: scale of each of the row's controls, by step; 0: it adds nothing.
        fast: whether residuals are requested one step ahead; otherwise each step adds residuals of
            its own latents.
    """

    def __init__(self, scales: Sequence[tuple[float, ...]], *, fast: bool) -> None:
        self._fast, self._scales = fast, scales
        self._sent: dict[int, SentRequest] = {}
        """Requests by their step."""
        self._slot = 0
        """Slot of the latest request."""

    @property
    def numbers(self) -> set[int]:
        """Numbers of the requests whose answers some step may still add."""
        return {sent.number for sent in self._sent.values()}

    def acts(self, step: int) -> bool:
        return any(self._scales[step])

    def keep(self, sent: SentRequest) -> None:
        self._sent[sent.step], self._slot = sent, sent.slot

    def free_slot(self, step: int, added: SentRequest | None) -> int:
        """Return a free slot for a request.

        Args:
            step: step of the request: one that begins, or the one after it.
            added: request whose residuals the beginning step adds and still has to read.
        """
        used_slots = {sent.slot for sent in self._sent.values() if sent.step > step}
        used_slots |= set() if added is None else {added.slot}
        other_slot = 1 - self._slot
        return self._slot if other_slot in used_slots else other_slot

    def at(self, step: int, computed: int, failed: Callable[[int], bool]) -> SentRequest | None:
        """Return the earlier request whose residuals a step may add; None: it needs residuals of
        its own, for example when a control's scale has changed or other tokens are computed.

        Args:
            step: step that begins; requests of earlier steps are forgotten.
            computed: tokens that the base computes in it.
            failed: whether the answer to a request is known to have failed.
        """
        self._sent = {at: sent for at, sent in self._sent.items() if at >= step - 1}
        if not self._fast or not self.acts(step):
            return None
        # The first step cannot extrapolate, so the second step adds the first one's residuals.
        sent = self._sent.get(step) or self._sent.get(step - 1)
        if sent is None or sent.computed != computed or failed(sent.number):
            return None
        return sent if self._scales[step] == self._scales[sent.step] else None

    def needs_present(self, step: int, added: SentRequest | None) -> bool:
        """Whether a step that begins requests residuals of its own latents; `added` is the result
        of `at`.
        """
        return added is None and self.acts(step)

    def needs_extrapolated(self, step: int, computed: int) -> bool:
        """Whether a step that begins also requests residuals for the step after it."""
        later = step + 1
        if not self._fast or later >= len(self._scales) or not self.acts(later):
            return False
        sent = self._sent.get(later)
        return sent is None or sent.computed != computed
