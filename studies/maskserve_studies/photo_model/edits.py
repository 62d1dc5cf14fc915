"""Fixed held-out edits of photographs that training never sees, by kind.

| kind | prompt | judged by |
|---|---|---|
| `fill` | empty, "remove", … | its rim |
| `pattern` | the same | likeness to the right continuation |
| `object`, `shape` | "a cat", "a red star" | the word |
| `material`, `ground` | "a brick heart", "grass" | the word |
| `more` | "more of the same" | the object that stands beside the region |

Edit i of a kind does not depend on `n`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from PIL import Image

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_studies.photo_model.scenes import (
    HELD_OUT_PHOTOS,
    Stock,
    Textures,
    draw_example,
)
from maskserve_studies.photo_model.words import Wish, phrase

KINDS: Final = ("fill", "pattern", "object", "shape", "material", "ground", "more")
SIZE: Final = (512, 512)
_HELD_OUT_SEED: Final = 11_000_000


@dataclass(frozen=True)
class PhotoEdit(Edit):
    """An edit whose target shows its wish."""

    wish: Wish
    """The wish that the judge must see; for `more` the object."""


def photo_edits(
    kind: str, n: int, textures: Textures, size: tuple[int, int] = SIZE
) -> list[PhotoEdit]:
    """The first `n` edits of one of KINDS; `size` is height, width."""
    if kind not in KINDS:
        raise ValueError(f"kind: unknown {kind!r}; accepted: {', '.join(KINDS)}")
    stock = Stock(_photos(), textures)
    edits = []
    for i in range(n):
        rng = np.random.default_rng([_HELD_OUT_SEED, KINDS.index(kind), i])
        drawn = draw_example(rng, stock, size, "photo" if kind == "fill" else kind)
        prompt = phrase(rng, drawn.wish)
        edits.append(
            PhotoEdit(
                drawn.source, drawn.mask, prompt, None, None, drawn.answer, drawn.visible_wish
            )
        )
    return edits


@cache
def _photos() -> list[Image.Image]:
    photos = []
    for path in HELD_OUT_PHOTOS:
        with Image.open(path) as image:
            photos.append(image.convert("RGB"))
    return photos
