"""The script that docs/workflows.md holds beside the shipped definition `detail`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from maskserve_client import EditResult, InvalidRequest, ScoredMask
from tests.fakes.pictures import encode

ROOT = Path(__file__).parents[3]
[SCRIPT] = [
    code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/workflows.md").read_text(), re.S)
    if "Masks(" in code
]


class Shapes:
    """A router of one picture: an edit paints its mask in its prompt's colour, and a mask covers
    the pixels of the named thing's colour.
    """

    def __init__(self, url: str) -> None:
        self.colours = {"red star": (255, 0, 0), "a blue heart": (0, 0, 255)}

    def edit(self, image: Any, mask: Any, prompt: str, **_: Any) -> EditResult:
        pixels = np.array(image)
        pixels[np.asarray(mask) > 127] = self.colours[prompt]
        return EditResult(Image.fromarray(pixels), encode(pixels), {})

    def find(self, image: Image.Image, text: str) -> ScoredMask:
        white = (np.asarray(image) == self.colours[text]).all(axis=2)
        if not white.any():
            raise InvalidRequest("mask_from", f"{text} is not found")
        return ScoredMask(encode(white.astype(np.uint8) * 255), None)


def test_the_script_does_what_the_definition_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo = np.zeros((16, 24, 3), np.uint8)
    photo[2:6, 2:6] = photo[9:14, 12:20] = (255, 0, 0)
    Image.fromarray(photo).save("edited.png")  # as the command above the script leaves it
    stubs = {"Client": Shapes, "Masks": Shapes, "Image": Image, "io": io, "np": np}
    code = re.sub(r"^from maskserve_client import .*$", "", SCRIPT, flags=re.M)
    exec(code, {**stubs, "ndimage": ndimage})
    edited = np.asarray(Image.open("edited.png"))
    assert ((edited == (0, 0, 255)).all(axis=2) == (photo[..., 0] > 0)).all()
