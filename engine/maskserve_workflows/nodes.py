"""All node types. `edit` runs on workers, the others on node servers.

On a node server, the class of a model runs its nodes (`maskserve_engine/nodes`, `pictures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from maskserve_common.contracts.settings import Click, EditSettings
from maskserve_workflows.node_types import DECLARED, EDIT, NodeType, node
from maskserve_workflows.ports import Mask, Picture, Pictures, Regions, Verdict, Verdicts, Words

LIGHT: Final = "pictures"
"""The model of nodes that have no weights: every node server runs it."""
Share = Annotated[float, Meta(ge=0, le=1)]
Pixels = Annotated[int, Meta(ge=0, le=512)]


class MaskMatch(NamedTuple):
    """A mask, and the model's verdict on it."""

    mask: Mask
    verdict: Verdict


class Best(NamedTuple):
    """The best of several pictures."""

    picture: Picture
    verdict: Verdict


@node(model=EDIT, price_s=1.0, deterministic=False, settings=EditSettings)
def edit(
    image: Picture,
    mask: Mask,
    prompt: Words | str,
    control: Picture | None = None,
    **settings: Any,
) -> Picture:
    """Repaint the picture where the mask is white. Settings are those of an edit; without a `seed`
    each call draws one.
    """
    raise NotImplementedError


@node(model="find", price_s=0.1)
def find(picture: Picture, name: Words | str, *, threshold: Share = 0.5) -> Mask:
    """Find the object of this name in the picture. If there is none, the run ends with an error."""
    raise NotImplementedError


@node(model="find", price_s=0.1)
def shows(
    picture: Picture, mask: Mask, name: Words | str, *, threshold: Share = 0.5, enough: Share = 0.2
) -> Verdict:
    """Check that the object of this name is in the mask, and fills at least the share `enough` of
    it.
    """
    raise NotImplementedError


@node(model="likeness", price_s=0.1)
def resembles(picture: Picture, text: Words | str, *, enough: Share = 0.25) -> Verdict:
    """Compare the picture with the text by CLIP's cosine, which passes from `enough` on."""
    raise NotImplementedError


@node(model="verify", price_s=1.0, deterministic=False)
def agrees(picture: Picture, statement: Words | str, *, enough: Share = 0.7) -> Verdict:
    """Ask the operator's vision-language model whether the statement is true of the picture: a
    score from 0 to 1, which passes from `enough` on.
    """
    raise NotImplementedError


@node(model="segment", price_s=0.3)
def segment(
    picture: Picture, *, points: tuple[Click, ...] = (), box: tuple[float, ...] = ()
) -> MaskMatch:
    """Select the region under clicks (x, y, and 1, or 0 for a point outside of it) and in a box
    (left, top, right, bottom). The verdict is the model's own estimate of the fit. An empty region
    ends the run with an error.
    """
    raise NotImplementedError


@node(model="enlarge", price_s=0.3)
def enlarge(picture: Picture) -> Picture:
    """Double the picture's sides."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def split(mask: Mask, *, smallest: Share = 0.001, apart: Pixels = 16) -> Regions:
    """Split the mask into its connected parts, largest first, without parts below the share
    `smallest` of the picture. Edits of parts may run side by side if their boxes are `apart` pixels
    from one another.
    """
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def outline(picture: Picture) -> Picture:
    """Draw the edges in the picture, white on black."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def invert(mask: Mask) -> Mask:
    """Invert the mask."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def compose(picture: Picture, parts: Pictures) -> Picture:
    """Put the changes of each part into the picture; where two parts changed a pixel, the later one
    counts.
    """
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def crop(picture: Picture, mask: Mask, *, around: Pixels = 16) -> Picture:
    """Cut out the mask's bounding box and `around` pixels on each side."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def paste(picture: Picture, part: Picture, mask: Mask, *, around: Pixels = 16) -> Picture:
    """Put a part back into the picture, in the place where `crop` cut it out by this mask."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def pad(
    picture: Picture, *, left: Pixels = 0, top: Pixels = 0, right: Pixels = 0, bottom: Pixels = 0
) -> Picture:
    """Grow the picture by this many pixels on each side, and repeat its border there."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.001)
def best(pictures: Pictures, verdicts: Verdicts) -> Best:
    """Choose the picture with the highest verdict, or the first of equal ones."""
    raise NotImplementedError


NODE_TYPES: Final[Mapping[str, NodeType]] = MappingProxyType(DECLARED)
"""All node types, by name."""
