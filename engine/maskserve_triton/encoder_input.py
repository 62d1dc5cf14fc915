"""The input of the encoder for one edit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskserve_common.contracts.keys import scope_of
from maskserve_common.contracts.request import EditRequest
from maskserve_triton.run_encodings import RunScope


class EncoderInput(NamedTuple):
    """An edit and its pictures."""

    edit: EditRequest
    pixels: NDArray[np.uint8]
    """[H, W, 3] source at model resolution; [0, 0, 3] without one."""
    edit_mask: NDArray[np.uint8]
    """[H, W], above 127 = edit."""
    controls: NDArray[np.uint8] | None = None
    """[pictures, H, W, 3] control pictures; None: there are none."""
    run: str = ""
    """Workflow run that has its encoding, or will keep it; empty: none."""
    makes: bool = False
    """Whether the run keeps its encoding, and the edit ends with it."""
    references: NDArray[np.uint8] | None = None
    """Pixels of the further references, one after the other; None: there are none."""

    @property
    def run_scope(self) -> RunScope:
        return RunScope(scope_of(self.edit.request_id), self.run)

    @property
    def pixels_ids(self) -> list[str]:
        """Names of the encodings of the source and of the further references."""
        names = (self.edit.pixels_id, *(reference.pixels_id for reference in self.edit.references))
        return list(dict.fromkeys(filter(None, names)))

    @property
    def ip_picture(self) -> NDArray[np.uint8]:
        """RGB [side, side, 3] of the IP-Adapter's picture, behind the references."""
        picture = self.edit.ip_picture
        assert picture is not None
        assert self.references is not None, "REQUEST names a picture that is missing"
        height, width = picture.size
        return self.references[-3 * height * width :].reshape(height, width, 3)

    @property
    def pictures(self) -> list[NDArray[np.uint8]]:
        """RGB [h, w, 3] of the source and of the further references; none without a source."""
        pictures = [self.pixels] if self.pixels.size else []
        begin = 0
        for height, width in self.edit.reference_sizes:
            assert self.references is not None, "REQUEST names references that are missing"
            end = begin + 3 * height * width
            pictures.append(self.references[begin:end].reshape(height, width, 3))
            begin = end
        return pictures
