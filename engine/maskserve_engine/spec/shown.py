"""What a text encoder is shown of an edit's source, where prompts are about a picture.

The picture's tokens stand before the prompt and the encoder is causal: it says the same of them
beside any prompt. So a template keeps what they are to the denoiser, as it does its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maskserve_common.config import ConfigError

Size = tuple[int, int]
LONGEST = 200
"""A picture's side, in others: the processor refuses longer ones."""
_GRID = 32
"""Pixels of which the sides of a picture of a fixed area are multiples."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture as a vision model's processor cuts it into tokens."""

    cell: int
    """Pixels of a token along one side."""
    least: int
    most: int
    """Pixels of the picture that is cut."""
    area: int = 0
    """Pixels to which it is brought before; 0: it is what the denoiser sees."""
    replaced: bool = False
    """Whether the denoiser has the picture's latents in place of these tokens."""

    @classmethod
    def of(cls, processor: Mapping[str, Any], area: int = 0) -> Shown:
        """Of what a processor's folder says of pictures; ConfigError if it does not say it."""
        size = processor.get("size") or {}
        try:
            return cls(
                int(processor["patch_size"]) * int(processor["merge_size"]),
                int(processor.get("min_pixels") or size["shortest_edge"]),
                int(processor.get("max_pixels") or size["longest_edge"]),
                area,
            )
        except KeyError as error:
            name = error.args[0]
            raise ConfigError(f"[model] path: processor: {name} is missing") from error

    def size(self, height: int, width: int) -> Size:
        """(height, width) in which a picture of so many pixels is given to the processor."""
        if not self.area:
            return height, width
        wide = math.sqrt(self.area * width / height)
        high = wide * height / width
        return round(high / _GRID) * _GRID, round(wide / _GRID) * _GRID

    def tokens(self, height: int, width: int) -> int:
        """Of such a picture, among those of a prompt."""
        if self.replaced:
            return 0
        height, width = self.size(height, width)
        rows, columns = (round(side / self.cell) for side in (height, width))
        cut = rows * columns * self.cell**2
        if cut > self.most:
            share = math.sqrt(height * width / self.most) * self.cell
            rows, columns = (max(1, math.floor(side / share)) for side in (height, width))
        elif cut < self.least:
            share = math.sqrt(self.least / (height * width)) / self.cell
            rows, columns = (math.ceil(side * share) for side in (height, width))
        return rows * columns
