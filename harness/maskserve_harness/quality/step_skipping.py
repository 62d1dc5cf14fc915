"""FirstBlockCache's rule for a row: steps that leave all blocks but the first out when it moved
little, and add what the others last added instead.

For measuring only. Whether a row skips differs from row to row, so it takes its steps alone here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from torch import Tensor

from maskserve_engine.families.flux import batch
from maskserve_engine.families.flux.blocks import double_block, last_layer, single_block
from maskserve_engine.families.flux.forward import Packed, _State
from maskserve_engine.families.flux.vectors import Vectors
from maskserve_engine.families.flux.weights import Weights


@dataclass
class Skips:
    """How often blocks were left out."""

    steps: int = 0
    skipped: int = 0

    @property
    def share(self) -> float:
        return self.skipped / self.steps if self.steps else 0.0


class _Forward:
    """In place of `forward`, for the steps of one row."""

    def __init__(self, threshold: float, skips: Skips) -> None:
        self.threshold, self.skips = threshold, skips
        self.head: Tensor | None = None
        """What the first block added when the others were last computed."""
        self.tail: Tensor | None = None
        """What the others added then."""

    def __call__(
        self, weights: Weights, packed: Packed, vectors: Vectors, kinds: Sequence[str] = ()
    ) -> Tensor:
        state = _State(weights, packed, vectors, kinds)
        stream, before = packed.ways.narrow.image_stream, state.image
        for index, double in enumerate(weights.double_blocks):
            fill, capture = state.enter(index, double)
            state.text, state.image = double_block(
                double,
                state.text,
                state.image,
                vectors.double[index],
                state.packing,
                state.cis,
                fill,
                capture,
            )
            if index == 0:
                self.skips.steps += 1
                after, head = state.image, state.image - before
                if self.tail is not None and self._moved(head) < self.threshold:
                    self.skips.skipped += 1
                    return last_layer(weights, after + self.tail, vectors.last, stream)
        state.join_streams()
        for index, single in enumerate(weights.single_blocks, start=len(weights.double_blocks)):
            fill, capture = state.enter(index, single)
            state.image = single_block(
                single, state.image, vectors.of(index), state.packing, state.cis, fill, capture
            )
        image = state.computed_image()
        self.head, self.tail = head, image - after
        return last_layer(weights, image, vectors.last, stream)

    def _moved(self, head: Tensor) -> float:
        assert self.head is not None
        return float((head - self.head).abs().mean() / self.head.abs().mean())


@contextmanager
def skipping(threshold: float, skips: Skips) -> Iterator[None]:
    """Within it, the steps of one row skip blocks below `threshold`, booked in `skips`."""
    with mock.patch.object(batch, "forward", _Forward(threshold, skips)):
        yield
