"""How an edit runs: dense, from the cache, or after a wait for its template."""

from __future__ import annotations

from dataclasses import dataclass

from maskserve_core.contracts.entry_key import Anchor


@dataclass(frozen=True, slots=True)
class Route:
    """How an edit runs."""

    how: str
    """`dense`, `cached`, or `wait` (until its template is primed, or fetched)."""
    outcome: str
    """What META says: `hit`, `miss` or `off`."""
    key: str = ""
    """Of the template's entries, where the cache has a say."""
    anchors: tuple[Anchor | None, ...] = ()
    """Per step, when cached: the anchor whose entry it reads."""
    tier: str = ""
    """Where the template lay, when cached."""
    prime: bool = False
    """Whether the template should now be primed."""


DENSE = Route("dense", "off")
"""Without the cache."""
