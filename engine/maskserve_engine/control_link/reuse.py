"""Which residuals a row's step adds, where it need not wait for its own (`adapters: fast`).

On a slow link residuals take a step to come. So nets are asked one step ahead, with latents that
the row's own sampler has extrapolated: what comes then is off only by what the model answers anew.
Katz (§5) takes the latents of the step before instead (docs/adr/0039-control-one-step-ahead.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SentRequest(NamedTuple):
    number: int
    """Number of the ask."""
    step: int
    """Step whose timestep and scales the nets were given."""
    computed: int
    """Tokens that the base was to compute in that step."""
    slot: int
    """Slot of the residuals (`slots`)."""
    extrapolated: bool
    """Whether the latents were extrapolated."""


class Reuse:
    """The asks of one row whose residuals some step may still add.

    Args:
        fast: whether nets are asked one step ahead; else each step adds residuals of its own
            latents.
        scales: scale of each of the row's controls, by step; 0: it adds nothing.
    """

    def __init__(self, scales: Sequence[tuple[float, ...]], *, fast: bool) -> None:
        self._fast, self._scales = fast, scales
        self._sent: dict[int, SentRequest] = {}
        """Asks by their step."""
        self._slot = 0
        """Slot of the latest ask."""

    @property
    def numbers(self) -> set[int]:
        """Numbers of the asks whose answers some step may still add."""
        return {ask.number for ask in self._sent.values()}

    def acts(self, step: int) -> bool:
        return any(self._scales[step])

    def keep(self, sent: SentRequest) -> None:
        self._sent[sent.step], self._slot = sent, sent.slot

    def free_slot(self, step: int, added: SentRequest | None) -> int:
        """Return a free slot for an ask.

        Args:
            step: step that is asked for: one that begins, or the one after it.
            added: ask whose residuals the beginning step adds and still has to read.
        """
        used_slots = {ask.slot for ask in self._sent.values() if ask.step > step}
        used_slots |= set() if added is None else {added.slot}
        other_slot = 1 - self._slot
        return self._slot if other_slot in used_slots else other_slot

    def at(self, step: int, computed: int, failed: Callable[[int], bool]) -> SentRequest | None:
        """Return the earlier ask whose residuals a step may add; None: it needs residuals of its
        own, as it does when a control's scale has changed or other tokens are computed.

        Args:
            step: step that begins; asks of earlier steps are forgotten.
            computed: tokens that the base computes in it.
            failed: whether the answer to an ask is known to have failed.
        """
        self._sent = {at: old_ask for at, old_ask in self._sent.items() if at >= step - 1}
        if not self._fast or not self.acts(step):
            return None
        # Behind a row's first step, which had nothing to extrapolate with, the next adds the same.
        ask = self._sent.get(step) or self._sent.get(step - 1)
        if ask is None or ask.computed != computed or failed(ask.number):
            return None
        return ask if self._scales[step] == self._scales[ask.step] else None

    def needs_present(self, step: int, added: SentRequest | None) -> bool:
        """Whether nets are asked with the latents of a step that begins; `added` is the result of
        `at`.
        """
        return added is None and self.acts(step)

    def needs_extrapolated(self, step: int, computed: int) -> bool:
        """Whether nets are asked for the step after one that begins."""
        later = step + 1
        if not self._fast or later >= len(self._scales) or not self.acts(later):
            return False
        ask = self._sent.get(later)
        return ask is None or ask.computed != computed
