"""How models use an edit's source and mask, and how many first steps of a cached edit compute all
tokens for that. Each pipeline in a family's `PIPELINES` names one of these semantics.
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
    """Whether the source's latents are also further image tokens behind the edited ones: the
    context, which no step moves and no mask covers."""
    sampled: bool = False
    """Whether the context is a sample of the VAE's posterior, as blended latents are; otherwise the
    posterior's mode."""
    exact: bool = False
    """Whether the context attends to neither text nor noise and has no timestep: its keys and
    values are computed once (fixed tokens)."""

    @property
    def context(self) -> bool:
        """Whether references are among the tokens that a dense step computes."""
        return self.reference and not self.exact

    @property
    def noisy_around(self) -> bool:
        """Whether the model sees the picture round the mask only as noisy as the rest."""
        return self.blends and not self.reference

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

_PER_DENSE_STEP = 10
"""Steps that an edit must have for each dense one that its model needs: of the four of a distilled
model a dense one would take most of what caching saves."""


@dataclass(frozen=True, slots=True)
class DenseSteps:
    """First steps that compute all tokens (docs/decisions/templates.md); the largest counts.

    Priming uses the template alone, without a prompt. If the model sees the picture around the mask
    as noisy as the rest, dense first steps improve cached edits with a prompt most.
    """

    every: int = 0
    """Dense steps of any edit, however few its steps."""
    prompt: int = 0
    """Dense steps of an edit with a prompt."""
    side: int = 0
    """Dense steps of an edit whose computed tokens cover a whole side of the picture."""

    def of(self, steps: int, *, prompt: bool, side: bool) -> int:
        """Return the number of dense first steps of an edit of `steps` steps."""
        needed = max(self.prompt if prompt else 0, self.side if side else 0)
        return max(self.every, min(needed, steps // _PER_DENSE_STEP))


NO_DENSE_STEPS = DenseSteps()
