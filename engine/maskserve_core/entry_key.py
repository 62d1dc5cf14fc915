"""Names of cached activations: everything that their values depend on (design §4 "Key")."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

LAYOUT_VERSION = 1
"""Raised whenever what an entry holds, or how, changes."""


@dataclass(frozen=True, slots=True)
class TemplateKey:
    """What all entries of one primed template share."""

    model_revision: str
    adapters: tuple[str, ...]
    pixels_id: str
    """Digest of the template's pixels at model resolution."""
    noise_seed: int
    """Seed of the template's own noise."""
    priming_prompt: str
    guidance: float | None
    text_tokens: int
    dtype: str
    entry_kind: str
    entry_format: str
    layout_version: int = LAYOUT_VERSION

    def digest(self) -> str:
        """32 hexadecimal digits; the name under which entries are stored."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class Anchor:
    """A timestep whose activations are kept."""

    sigma: float
    timestep: float
    input_scale: float = 1.0


def nearest_anchor(
    anchors: tuple[Anchor, ...], sigma: float, timestep: float, tolerance: float
) -> Anchor | None:
    """The anchor closest in sigma, or None when none is within `tolerance` or none scales alike.

    Not the schedule but the model's inputs decide whether an entry fits: a step of any schedule
    may use it. Ties go to the larger sigma.
    """
    best: Anchor | None = None
    for anchor in anchors:
        if abs(anchor.timestep - timestep) > tolerance * 1000.0 or anchor.input_scale != 1.0:
            continue
        distance = abs(anchor.sigma - sigma)
        if distance <= tolerance and (
            best is None or (distance, -anchor.sigma) < (abs(best.sigma - sigma), -best.sigma)
        ):
            best = anchor
    return best
