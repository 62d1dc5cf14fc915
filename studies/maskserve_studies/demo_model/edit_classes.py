"""All fixed held-out edits by class, for judging models and the ways to run them.

    for name, edits in edit_classes(16).items(): ...

| class | prompt | what the editor must use |
|---|---|---|
| `named` | "a red star" | only the mask's surroundings |
| `same`, `same_colour`, `same_shape` | as "another one" | an object far from the mask |
| `stripes`, `bar`, `corner` | empty | what lies on all sides of the mask |
| `lines`, `pieces`, `strip`, `dot`, `most` | empty or "a red star" | odd masks, hard textures |

Edit i of a class does not depend on `n`. The judge must find `Edit.colour` and `Edit.shape`; None:
only likeness to `Edit.target` or to a reference counts.
"""

from __future__ import annotations

from typing import Final

from maskserve_benchmarks.demo_model.scenes import Edit, held_out_edits
from maskserve_studies.demo_model.hard_edits import MASKS, hard_edits
from maskserve_studies.demo_model.relations import RELATIONS, relational_edits
from maskserve_studies.demo_model.structures import STRUCTURES, structure_edits

CLASSES: Final = ("named", *RELATIONS, *STRUCTURES, *MASKS)


def edits_of(name: str, n: int, size: tuple[int, int] = (128, 128)) -> list[Edit]:
    """Return the first `n` edits of one of CLASSES; `size` is height, width."""
    if name == "named":
        return held_out_edits(n, size)
    for names, make in (
        (RELATIONS, relational_edits),
        (STRUCTURES, structure_edits),
        (MASKS, hard_edits),
    ):
        if name in names:
            return make(name, n, size)
    raise ValueError(f"class: unknown {name!r}; accepted: {', '.join(CLASSES)}")


def edit_classes(n: int, size: tuple[int, int] = (128, 128)) -> dict[str, list[Edit]]:
    """Return the first `n` edits of every class; `size` is height, width."""
    return {name: edits_of(name, n, size) for name in CLASSES}
