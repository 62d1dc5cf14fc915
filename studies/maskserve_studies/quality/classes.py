"""The classes of held-out edits by which models are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from maskserve_benchmarks.demo_model.scenes import Edit
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_studies.demo_model.edit_classes import CLASSES, edits_of
from maskserve_studies.demo_model.reference_edits import (
    NAMED_CLASSES,
    named_class,
    package_photographs,
)

Scenes = Literal["drawn", "photographs", "bare"]
"""`drawn` as in training; objects on `photographs` outside the training; or these photographs
alone, `bare`."""
SCENES: tuple[Scenes, ...] = get_args(Scenes)
_SIZE = (128, 128)


def scene_classes(
    spec: ModelSpec, n: int, scenes: Scenes = "drawn", names: Sequence[str] | None = None
) -> dict[str, list[Edit]]:
    """Return `n` edits of each class that a model knows.

    Args:
        spec: spec of the model.
        n: number of edits of each class.
        scenes: pictures that are edited.
        names: classes; None: all.
    """
    photographs, bare = () if scenes == "drawn" else package_photographs(), scenes == "bare"
    if spec.semantics.reference:
        return {
            name: named_class(name, n, _SIZE, photographs, bare=bare)
            for name in names or NAMED_CLASSES
        }
    if scenes == "drawn":
        return {name: edits_of(name, n, _SIZE) for name in names or CLASSES}
    edits = named_class("both", n, _SIZE, photographs, bare=bare)
    return {scenes: [replace(edit, prompt=f"a {edit.colour} {edit.shape}") for edit in edits]}
