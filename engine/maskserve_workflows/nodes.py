"""The node types that there are: `edit` runs at the workers, the others at node servers, where the
class of a model runs its nodes (`maskserve_engine/nodes`, `pictures.py`).
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


class Found(NamedTuple):
    """A mask, and how well it fits."""

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
    """The picture, repainted where the mask is white. Settings are those of an edit; `seed` is
    drawn for each where it is not given.
    """
    raise NotImplementedError


@node(model="find", price_s=0.1)
def find(picture: Picture, name: Words | str, *, threshold: Share = 0.5) -> Mask:
    """Where in the picture the thing of this name is. Nothing found is an error."""
    raise NotImplementedError


@node(model="find", price_s=0.1)
def shows(
    picture: Picture, mask: Mask, name: Words | str, *, threshold: Share = 0.5, enough: Share = 0.2
) -> Verdict:
    """Whether the thing of this name now stands in the mask, of which it must fill the share
    `enough`.
    """
    raise NotImplementedError


@node(model="likeness", price_s=0.1)
def resembles(picture: Picture, text: Words | str, *, enough: Share = 0.25) -> Verdict:
    """How much the picture is like the text, as CLIP has it: the cosine, which passes from `enough`
    on.
    """
    raise NotImplementedError


@node(model="verify", price_s=1.0, deterministic=False)
def agrees(picture: Picture, statement: Words | str, *, enough: Share = 0.7) -> Verdict:
    """Whether the picture shows what is stated, as judged by the vision-language model that the
    operator named: a score from 0 to 1, which passes from `enough` on.
    """
    raise NotImplementedError


@node(model="segment", price_s=0.3)
def segment(
    picture: Picture, *, points: tuple[Click, ...] = (), box: tuple[float, ...] = ()
) -> Found:
    """Select the region under clicks (x, y, and 1, or 0 for what is not part of it) and in a box
    (left, top, right, bottom); the verdict is how well the model says that it fits. Nothing is an
    error.
    """
    raise NotImplementedError


@node(model="enlarge", price_s=0.3)
def enlarge(picture: Picture) -> Picture:
    """The picture with its sides doubled."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def split(mask: Mask, *, smallest: Share = 0.001, apart: Pixels = 16) -> Regions:
    """The mask's parts that hang together, largest first; those below a share of the picture are
    left out. Parts whose boxes are `apart` pixels from one another may be painted side by side.
    """
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def outline(picture: Picture) -> Picture:
    """The rims of what is in the picture, white on black."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def invert(mask: Mask) -> Mask:
    """All that the mask leaves out."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def compose(picture: Picture, parts: Pictures) -> Picture:
    """The picture, with what each of the parts changed of it; where two did, the later one."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def crop(picture: Picture, mask: Mask, *, around: Pixels = 16) -> Picture:
    """The mask's bounding box and some pixels around it."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def paste(picture: Picture, part: Picture, mask: Mask, *, around: Pixels = 16) -> Picture:
    """The picture, with what `crop` cut out by this mask put back."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.005)
def pad(
    picture: Picture, *, left: Pixels = 0, top: Pixels = 0, right: Pixels = 0, bottom: Pixels = 0
) -> Picture:
    """The picture with its rim repeated so many pixels outwards."""
    raise NotImplementedError


@node(model=LIGHT, price_s=0.001)
def best(pictures: Pictures, verdicts: Verdicts) -> Best:
    """The picture with the highest verdict; of equal ones the first."""
    raise NotImplementedError


NODE_TYPES: Final[Mapping[str, NodeType]] = MappingProxyType(DECLARED)
"""All of them, by name."""
