"""OFT: orthogonal blocks R that rotate a layer's weight W, [out, in].

    rows      Rᵀ W    oft_blocks [n, b, b]        R = (I + Q) (I - Q)⁻¹, Q = X - Xᵀ
    columns   W Rᵀ    oft_R [n, b (b - 1) / 2]    numbers of Q above its diagonal; R by PEFT's keys

LyCORIS (diag-oft) and kohya rotate rows. Their alpha, times the layer's outputs, bounds the norm of
Q; `rescale` [out, 1] multiplies the rows then. Where a published layer of FLUX.1 joins several,
kohya's files have `oft_blocks.0`, `.1`, … for each of these. PEFT and OneTrainer rotate columns
(for OneTrainer a convolution becomes W R); a single block may serve all of them (block_share).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

COLUMNS = "oft_R"
RESCALE = "rescale"
_ROWS = "oft_blocks"
ROLES = (_ROWS, *(f"{_ROWS}.{n}" for n in range(4)), COLUMNS, RESCALE)
"""Names of the matrices behind their layer's."""


class Blocks(NamedTuple):
    """Equal blocks, one behind the other."""

    role: str
    begin: int
    """First row or column that they rotate."""
    number: int
    side: int

    @property
    def end(self) -> int:
        return self.begin + self.number * self.side


class Rotation(NamedTuple):
    """Shape of an OFT of one layer."""

    of_rows: bool
    blocks: tuple[Blocks, ...]

    @property
    def side(self) -> int:
        """The side of its largest block."""
        return max(blocks.side for blocks in self.blocks)

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether it rotates a layer of this shape; `inputs` may be flat."""
        last = self.blocks[-1]
        if self.of_rows:
            return last.end == outputs
        return last.end == inputs or (last.number == 1 and inputs % last.side == 0)

    def __str__(self) -> str:
        return f"{self.blocks[-1].end} {'rows' if self.of_rows else 'columns'}"

    def within(self, begin: int, end: int) -> tuple[Blocks, slice]:
        """Return the blocks that rotate a range of rows, and which of them.

        Raises:
            ValueError: none rotate just these; the text ends a sentence about the layer.
        """
        for blocks in self.blocks:
            first, last = begin - blocks.begin, end - blocks.begin
            if 0 <= first < last <= blocks.number * blocks.side:
                if first % blocks.side or last % blocks.side:
                    break
                return blocks, slice(first // blocks.side, last // blocks.side)
        raise ValueError("has blocks across two layers")


class PeftKeys(msgspec.Struct, frozen=True):
    """Keys of PEFT's configuration of an OFT."""

    use_cayley_neumann: bool = True
    """Whether R is the sum of the first terms of Neumann's series, not an inverse."""
    num_cayley_neumann_terms: Annotated[int, Meta(ge=1, le=100)] = 5
    coft: bool = False
    """Whether `eps` over the root of n bounds the norm of each block's Q."""
    eps: Annotated[float, Meta(ge=0.0)] = 6e-5


def rotation_of(shapes: Mapping[str, tuple[int, ...]]) -> Rotation:
    """Return the shape of an OFT from the shapes of its matrices, by their names in `ROLES`.

    Raises:
        ValueError: matrices are missing or do not fit; the text ends a sentence about the layer.
    """
    rest = dict(shapes)
    rescale = rest.pop(RESCALE, None)
    if COLUMNS in rest:
        if len(shapes) > 1:
            raise ValueError(f"has {COLUMNS} and other matrices of an OFT")
        return Rotation(False, (_of_columns(rest[COLUMNS]),))
    roles = (_ROWS,) if _ROWS in rest else (f"{_ROWS}.{n}" for n in count())
    blocks: list[Blocks] = []
    for role in roles:
        if (shape := rest.pop(role, None)) is None:
            break
        if len(shape) == 4:
            raise ValueError(f"has {role} of a BOFT, {list(shape)}, which is not served,")
        if len(shape) != 3 or shape[1] != shape[2] or min(shape) < 1:
            raise ValueError(f"has {role} in another form, {list(shape)},")
        blocks.append(Blocks(role, blocks[-1].end if blocks else 0, *shape[:2]))
    if rest or not blocks:
        raise ValueError(f"is not whole: it has no {_ROWS}")
    outputs = blocks[-1].end
    if rescale is not None and (math.prod(rescale) != outputs or rescale[0] != outputs):
        raise ValueError(f"has {RESCALE} of shape {list(rescale)} beside {outputs} rows")
    return Rotation(True, tuple(blocks))


def _of_columns(shape: tuple[int, ...]) -> Blocks:
    number, numbers = shape if len(shape) == 2 else (0, 0)
    side = (1 + math.isqrt(1 + 8 * numbers)) // 2
    if min(number, numbers) < 1 or side * (side - 1) // 2 != numbers:
        raise ValueError(f"has {COLUMNS} in another form, {list(shape)},")
    return Blocks(COLUMNS, 0, number, side)
