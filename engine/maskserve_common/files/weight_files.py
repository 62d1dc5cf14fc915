"""The files of a folder that are a model's weights.

A folder may have several *variants* of them, named as the hub's libraries name them:

    diffusion_pytorch_model.safetensors              without a variant
    diffusion_pytorch_model.fp16.safetensors         of the variant fp16
    model.fp16-00001-of-00002.safetensors            the same, in several files
    model-00001-of-00002.fp16.safetensors            the same, in the older form
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_SHARD = r"-\d+-of-\d+"
_FORM = re.compile(
    rf"[^.]+?({_SHARD})?(\.(?P<variant>[^.]+?)({_SHARD})?)?\.safetensors", re.IGNORECASE
)


class WeightFiles(NamedTuple):
    """The files that are read of a folder."""

    variant: str
    files: tuple[Path, ...]
    """Files by name; none where the folder has no safetensors files."""


def weight_files(folder: Path, variant: str = "") -> WeightFiles:
    """Return the weight files of a folder.

    Args:
        folder: folder of one model.
        variant: preferred variant. A folder without it gives its files without a variant, or else
            those of its only variant.

    Raises:
        ValueError: there are several variants, and the preferred one is not among them; the text
            ends a sentence about the folder.
    """
    files_by_variant: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        match = _FORM.fullmatch(path.name)
        files_by_variant.setdefault((match and match["variant"]) or "", []).append(path)
    for name in (variant, ""):
        if name in files_by_variant:
            return WeightFiles(name, tuple(files_by_variant[name]))
    if len(files_by_variant) > 1:
        raise ValueError(
            f"holds weights of the variants {', '.join(files_by_variant)}, and no others"
        )
    for name, files in files_by_variant.items():
        return WeightFiles(name, tuple(files))
    return WeightFiles("", ())
