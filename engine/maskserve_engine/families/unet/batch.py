"""The running batch: passes packed once for as long as the same rows go on."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from maskserve_engine.families.unet.forward import Packed, forward
from maskserve_engine.families.unet.rows import UnetPrimingRow, UnetRow

Row = UnetRow | UnetPrimingRow


class Batch:
    """Some rows of one latent shape, and what does not change between their steps.

    Args:
        model: UNet2DConditionModel.
        rows: of equal latent shape.
    """

    def __init__(self, model: Any, rows: Sequence[Row]) -> None:
        self.model, self.rows = model, tuple(rows)
        self._reading = [row.entry is not None for row in rows]
        own = [row.passes() for row in rows]
        self._passes = [len(passes) for passes in own]
        self._shape: tuple[int, ...] = ()
        self._packed: Packed | None = None
        self._inputs = [each for passes in own for each in passes]

    @classmethod
    def of(cls, model: Any, rows: Sequence[Row], last: Batch | None) -> Batch:
        """The batch of these rows: the last one, if it holds for them still."""
        return last if last is not None and last.holds(rows) else cls(model, rows)

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether it was packed for just these rows, computing the same tokens."""
        return (
            len(rows) == len(self.rows)
            and all(map(is_, rows, self.rows))
            and [row.entry is not None for row in rows] == self._reading
        )

    def step(self, kinds: Sequence[str]) -> None:
        """Take one step of every row: the model, then each row's own sampler.

        No row has moved if the model raises.
        """
        samples = [row.sample() for row in self.rows]
        sample = torch.stack(
            [each for each, count in zip(samples, self._passes, strict=True) for _ in range(count)]
        )
        if self._packed is None:
            depth = len(self.model.down_blocks)
            height, width = sample.shape[2:]
            self._packed = Packed(self._inputs, (height, width), depth, sample.device)
        answers = forward(
            self.model, self._packed, sample, self._timesteps(sample.device), kinds,
            self._captures(),
        ).split(self._passes)  # fmt: skip
        for row, answer in zip(self.rows, answers, strict=True):
            row.advance(answer)

    def _timesteps(self, device: torch.device) -> torch.Tensor:
        times = [row.timestep for row in self.rows]
        counts = torch.tensor(self._passes)
        return torch.tensor(times).repeat_interleave(counts).to(device)

    def _captures(self) -> list[tuple[int, int, Any]]:
        """(first pass, behind its last pass, recorder) of each priming row."""
        found, first = [], 0
        for row, count in zip(self.rows, self._passes, strict=True):
            if isinstance(row, UnetPrimingRow):
                found.append((first, first + count, row.capture))
            first += count
        return found
