"""The part of an edit's source that a text encoder sees, where prompts are about a picture.

The picture's tokens stand before the prompt and the encoder is causal, so they are the same beside
any prompt. A template therefore keeps their activations, as it keeps those of its own tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from maskserve_common.config import ConfigError
from maskserve_common.config_file import read_json

Size = tuple[int, int]
LONGEST = 200
"""Largest ratio of a picture's sides: the processor refuses longer ones."""
_GRID = 32
"""Pixels of which the sides of a picture of fixed area are multiples."""


@dataclass(frozen=True, slots=True)
class EncoderPicture:
    """Size of a picture in tokens, as a vision model's processor cuts it."""

    cell: int
    """Pixels of a token along one side."""
    least: int
    most: int
    """Most pixels of the picture that is cut."""
    area: int = 0
    """Pixels to which the picture is resized before; 0: its size follows from the denoiser's."""
    divisor: int = 1
    """Number by which the denoiser's sides are divided."""
    replaced: bool = False
    """Whether the denoiser has the picture's latents in place of these tokens."""

    @classmethod
    def of(cls, folder: Path, area: int = 0, divisor: int = 1) -> EncoderPicture:
        """Read the values from a processor's folder. transformers writes them into one file with
        the rest, and before version 5 into a separate one; it reads them in this order.

        Raises:
            ConfigError: a file is unreadable, or a value is missing.
        """
        whole = folder / "processor_config.json"
        processor = read_json(whole).get("image_processor") if whole.is_file() else None
        if not isinstance(processor, dict):
            processor = read_json(folder / "preprocessor_config.json")
        size = processor.get("size") or {}
        try:
            return cls(
                int(processor["patch_size"]) * int(processor["merge_size"]),
                int(processor.get("min_pixels") or size["shortest_edge"]),
                int(processor.get("max_pixels") or size["longest_edge"]),
                area,
                divisor,
            )
        except KeyError as error:
            name = error.args[0]
            raise ConfigError(f"[model] path: {folder.name}: {name} is missing") from error

    def size(self, height: int, width: int) -> Size:
        """Return the (height, width) at which the processor gets a picture of this size."""
        if not self.area:
            return height // self.divisor, width // self.divisor
        wide = math.sqrt(self.area * width / height)
        high = wide * height / width
        return round(high / _GRID) * _GRID, round(wide / _GRID) * _GRID

    def tokens(self, height: int, width: int) -> int:
        """Return the number of the picture's tokens in a prompt."""
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
