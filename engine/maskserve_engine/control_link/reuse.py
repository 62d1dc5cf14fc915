"""Which residuals a row's step adds, where it need not wait for its own (`adapters: fast`).

On a slow link residuals take a step to come. So nets are asked one step ahead, with latents that
the row's own sampler has extrapolated: what comes then is off only by what the model answers anew.
Katz (§5) takes the latents of the step before instead (docs/adr/0039-control-one-step-ahead.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class SentAsk(NamedTuple):
    """Residuals that were asked for."""

    number: int
    """Of the ask."""
    step: int
    """Whose timestep and scales the nets were given."""
    computed: int
    """Tokens that the base was to compute in it."""
    slot: int
    """Where they lie (`slots`)."""
    ahead: bool
    """Whether of extrapolated latents."""


class Reuse:
    """What was asked for one row.

    Args:
        fast: whether nets are asked one step ahead; else each step adds residuals of its own
            latents.
        scales: per step, of each of the row's controls; 0: it adds nothing.
    """

    def __init__(self, scales: Sequence[tuple[float, ...]], *, fast: bool) -> None:
        self._fast, self._scales = fast, scales
        self._sent: dict[int, SentAsk] = {}
        """By their step."""
        self._slot = 0
        """Of what was asked for last."""

    @property
    def numbers(self) -> set[int]:
        """Of the asks whose answers some step may still add."""
        return {ask.number for ask in self._sent.values()}

    def acts(self, step: int) -> bool:
        """Whether any ControlNet adds anything in a step."""
        return any(self._scales[step])

    def keep(self, sent: SentAsk) -> None:
        self._sent[sent.step], self._slot = sent, sent.slot

    def free_slot(self, step: int, added: SentAsk | None) -> int:
        """Where there is room for what is asked for a step.

        Args:
            step: asked for: one that begins, or the one after it.
            added: to the one that begins, and still to be read.
        """
        used_slots = {ask.slot for ask in self._sent.values() if ask.step > step}
        used_slots |= set() if added is None else {added.slot}
        other_slot = 1 - self._slot
        return self._slot if other_slot in used_slots else other_slot

    def at(self, step: int, computed: int, failed: Callable[[int], bool]) -> SentAsk | None:
        """What a step may add of what was asked before; None: it needs residuals of its own.

        Controls that have another scale since, or tokens that nobody asked for, are such a need.

        Args:
            step: that begins; what was asked for those long past is forgotten.
            computed: tokens that the base computes in it.
            failed: whether it is known of an ask that its answer does not come.
        """
        self._sent = {at: old_ask for at, old_ask in self._sent.items() if at >= step - 1}
        if not self._fast or not self.acts(step):
            return None
        # Behind a row's first step, which had nothing to extrapolate with, the next adds the same.
        ask = self._sent.get(step) or self._sent.get(step - 1)
        if ask is None or ask.computed != computed or failed(ask.number):
            return None
        return ask if self._scales[step] == self._scales[ask.step] else None

    def wants_own(self, step: int, added: SentAsk | None) -> bool:
        """Whether nets are asked with the latents of a step that begins.

        Args:
            step: that begins.
            added: from `at`.
        """
        return added is None and self.acts(step)

    def wants_ahead(self, step: int, computed: int) -> bool:
        """Whether nets are asked for the step after one that begins."""
        later = step + 1
        if not self._fast or later >= len(self._scales) or not self.acts(later):
            return False
        ask = self._sent.get(later)
        return ask is None or ask.computed != computed
