"""The ways in which models use an edit's source and mask. A family's `PIPELINES` name one of
them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Semantics:
    """A model's use of source and mask."""

    name: str
    masked_picture: bool
    """Whether the mask, and the source with the masked area blanked, are inputs of the model."""
    blends: bool
    """Whether latents outside the mask follow the noised source, step by step. The mask is then
    sampled once per latent."""
    reference: bool = False
    """Whether the source's latents follow the edited ones as further image tokens, which no step
    moves and no mask covers: the context."""
    sampled: bool = False
    """Whether the context is a draw of the VAE's posterior, as blended latents are; else its
    mode."""
    exact: bool = False
    """Whether the context sees neither text nor noise nor time: its keys and values are computed
    once."""

    @property
    def context(self) -> bool:
        """Whether references are among the tokens that a dense step computes."""
        return self.reference and not self.exact

    def __str__(self) -> str:
        return self.name


FILL = Semantics("fill", masked_picture=True, blends=False)
INPAINT = Semantics("inpaint", masked_picture=False, blends=True)
REFERENCE = Semantics("reference", masked_picture=False, blends=True, reference=True)
SAMPLED_REFERENCE = Semantics(
    "sampled reference", masked_picture=False, blends=True, reference=True, sampled=True
)
EXACT_REFERENCE = Semantics(
    "exact reference", masked_picture=False, blends=True, reference=True, exact=True
)
