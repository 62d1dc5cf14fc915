"""The scripts that docs/workflows.md holds beside the shipped definitions."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from maskserve_client import EditResult, InvalidRequest, ScoredMask
from tests.fakes.pictures import encode

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    code
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/workflows.md").read_text(), re.S)
    if "Masks(" in code
]


class Shapes:
    """A router of one picture: an edit paints what it masks in its prompt's colour, and masks are
    what is of the colour that is asked for.
    """

    def __init__(self, url: str) -> None:
        self.colours = {"red star": (255, 0, 0), "a blue heart": (0, 0, 255)}

    def edit(self, image: Any, mask: Any, prompt: str, seed: int = 5, **_: Any) -> EditResult:
        pixels = np.array(image)
        if seed == 5:  # others paint nothing
            pixels[np.asarray(mask) > 127] = self.colours[prompt]
        return EditResult(Image.fromarray(pixels), encode(pixels), {})

    def find(self, image: Image.Image, text: str) -> ScoredMask:
        white = (np.asarray(image) == self.colours[text]).all(axis=2)
        if not white.any():
            raise InvalidRequest("mask_from", f"{text} is not found")
        return ScoredMask(encode(white.astype(np.uint8) * 255), None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_beside_the_definitions_do_what_these_do(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photo, mask = np.zeros((16, 24, 3), np.uint8), np.zeros((16, 24), np.uint8)
    photo[2:6, 2:6] = photo[9:14, 12:20] = (255, 0, 0)
    mask[2:6, 2:6] = 255
    Image.fromarray(photo).save("edited.png")  # as the command above the scripts leaves it
    Path("assets/demo").mkdir(parents=True)
    Image.fromarray(mask).save("assets/demo/mask.png")
    assert len(SCRIPTS) == 2
    stubs = {"Client": Shapes, "Masks": Shapes, "InvalidRequest": InvalidRequest, "Image": Image}
    more = {"io": io, "np": np, "ndimage": ndimage, "ThreadPoolExecutor": ThreadPoolExecutor}
    exec(re.sub(r"^from maskserve_client import .*$", "", script, flags=re.M), {**stubs, **more})
    edited = np.asarray(Image.open("edited.png"))
    blue = (edited == (0, 0, 255)).all(axis=2)
    assert blue[2:6, 2:6].all()
    assert (edited == (255, 0, 0)).all(axis=2).any() == ("seed" in script)
