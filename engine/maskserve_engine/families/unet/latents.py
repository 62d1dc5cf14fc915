"""Packed latents of a batch's edits: the model's input, and the samplers' steps.

Rows may be at different steps. They differ in factors only (`sampler.StepFactors`), which are laid
out for the steps ahead when rows are packed. So every operation is one for all rows, and a row's
result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from maskserve_engine.batch.transfer import to_device
from maskserve_engine.families.unet.rows import UnetRow
from maskserve_engine.stages.latents import joins


class PackedLatents:
    """Latents of some rows of one shape, with their samplers' memory, while these rows are the
    same.
    """

    def __init__(self, rows: Sequence[UnetRow]) -> None:
        self._rows, self._begins = tuple(rows), tuple([row.step for row in rows])
        self._dtype = rows[0].prompt.text.dtype
        depth = max(len(row.state) for row in rows)
        self._state = torch.stack([_deepened(row.state, depth) for row in rows])
        """[R, K, C, h, w] float32."""
        self._pinned = _Images.of([_template(row) for row in rows])
        self._soft = any(row.blend is not None and row.blend.soft for row in rows)
        self._blended = _Images.of([_source(row, soft=self._soft) for row in rows])
        conditions = [row.condition for row in rows if row.condition is not None]
        self._condition = torch.stack(conditions) if conditions else None
        self._guided = any(row.guidance is not None for row in rows)
        self._inputs = self._state[:, 0]
        """[R, C, h, w] last input of the model."""
        self._lay_out(depth)

    def samples(self) -> Tensor:
        """Return [R, in_channels, h, w] input of the next step."""
        self._inputs = self._answer_at(self._state, self._at)
        if self._condition is None:
            return self._inputs
        return torch.cat((self._inputs, self._condition), 1)

    def advance(self, answers: Sequence[Tensor]) -> None:
        """Take the samplers' step, after `samples`; `answers` are [passes, C, h, w] of each row."""
        answer = torch.stack([row_answers[0] for row_answers in answers])
        if self._guided:  # an unguided row is led away from its own answer, by nothing
            away = torch.stack([row_answers[-1] for row_answers in answers])
            answer = away + self._guides * (answer - away)
        if any(row.extrapolated is not None for row in self._rows):
            row_answers = zip(self._rows, answer, strict=True)
            answer = torch.stack(
                [row.with_surroundings(row_answer) for row, row_answer in row_answers]
            )
        self._state = self._moved(answer, self._at)
        for row, *moved in zip(self._rows, self._state, self._inputs, answer, strict=True):
            row.advance(*moved)

    def extrapolated(self, answer: Tensor) -> Tensor:
        """Return [R, C, h, w] model latents of the step after the next one, if the model answers
        `answer`; no row moves.
        """
        return self._answer_at(self._moved(answer, self._at), self._at + 1)

    @property
    def _at(self) -> int:
        return self._rows[0].step - self._begins[0]

    def _lay_out(self, depth: int) -> None:
        rows, steps = self._rows, min(row.steps - row.step for row in self._rows)
        ahead = [row.schedule.factors.part(row.step, row.step + steps) for row in rows]
        guides = [1.0 if row.guidance is None else row.guidance.scale for row in rows]
        host = [
            torch.tensor(guides),
            torch.stack([step_factors.scales for step_factors in ahead], -1),
            torch.stack([step_factors.pins for step_factors in ahead], -1),
            torch.stack([step_factors.sources for step_factors in ahead], -1),
            torch.tensor(
                [[joins(row.step + at, row.steps) for row in rows] for at in range(1, steps + 1)]
            ),
        ]
        moves = [
            _widened(step_factors.moves, depth)
            for step_factors in ahead
            if step_factors.moves is not None
        ]
        if moves:
            host.append(torch.stack(moves, 2))
        device_factors = [x[..., None, None, None] for x in to_device(host, self._state.device)]
        self._guides, self._scales, self._pins, self._sources, self._joins, *linear = device_factors
        """Shapes [R, …], [S, R, …], twice [S, 2, R, …], and [S, R, …], broadcast over [C, h, w]."""
        self._moves = linear[0] if linear else None
        """[S, K + 1, R, K, …]: contribution of each state tensor, and of the answer, to the next
        state. None: the samplers are not linear."""

    def _answer_at(self, state: Tensor, at: int) -> Tensor:
        """Return [R, C, h, w] latents, scaled for the model."""
        model_input = state[:, 0] * self._scales[at]
        if self._pinned is not None:
            model_input = self._pinned.with_images(model_input, self._pins[at], self._pinned.inside)
        return model_input.to(self._dtype)

    def _moved(self, answer: Tensor, at: int) -> Tensor:
        """Return [R, K, C, h, w] state after a step, from the model's guided answer."""
        if self._moves is None:
            steps = [begin + at for begin in self._begins]
            row_moves = zip(self._rows, answer, steps, self._state[:, 0], strict=True)
            state = torch.stack(
                [row.schedule.move(*move_args)[None] for row, *move_args in row_moves]
            )
        else:
            *factors, of_answer = self._moves[at]
            state = of_answer * answer[:, None]
            for factor, part in zip(factors, self._state.unbind(1), strict=True):
                state.addcmul_(factor, part[:, None])
        if self._blended is not None:
            latents = state[:, 0]
            inside = self._blended.inside
            if self._soft:
                inside = inside >= self._joins[at]
            latents.copy_(self._blended.with_images(latents, self._sources[at], inside))
        return state


class _Images(NamedTuple):
    """Noised images that replace latents outside of masks."""

    inside: Tensor
    """[R, 1, h, w] bool, or in grey masks the float32 strength."""
    clean: Tensor
    """[R, C, h, w]."""
    noise: Tensor

    @classmethod
    def of(cls, rows: Sequence[Self | None]) -> Self | None:
        """Stack rows' images, of which some may be None; None: no row has any."""
        template_row = next((row for row in rows if row is not None), None)
        if template_row is None:
            return None
        none = cls(*map(torch.zeros_like, template_row))._replace(
            inside=torch.ones_like(template_row.inside)
        )
        return cls(*map(torch.stack, zip(*[row or none for row in rows], strict=True)))

    def with_images(self, latents: Tensor, levels: Tensor, inside: Tensor) -> Tensor:
        """Return [R, C, h, w] latents inside `inside` [R, 1, h, w], and the images, noised by [2,
        R, 1, 1, 1] signal and noise share, elsewhere.
        """
        signal, share = levels
        images = torch.addcmul(signal * self.clean, share, self.noise)
        return torch.where(inside, latents, images)


def _template(row: UnetRow) -> _Images | None:
    """Return the image that the cached tokens of a row with a template are fixed to."""
    cached = None if row.refresh_schedule is not None else row.inactive
    return (
        None
        if cached is None
        else _Images(cached.mask, cached.template.clean, cached.template.noise)
    )


def _source(row: UnetRow, *, soft: bool) -> _Images | None:
    """Return the image that latents outside the mask follow; `soft`: some row of the batch has a
    grey mask.
    """
    blend = row.blend
    if blend is None:
        return None
    return _Images(blend.mask if soft else blend.mask > 0, blend.clean, blend.noise)


def extrapolated_latents(row: UnetRow) -> Tensor | None:
    """Return [C, h, w] latents for ControlNets after the next step, if the model's last answer
    holds; None: no answer yet, or no further step.
    """
    if row.answer is None or row.step + 1 >= row.steps:
        return None
    return PackedLatents([row]).extrapolated(row.answer[None])[0]


def _deepened(state: Tensor, depth: int) -> Tensor:
    """Pad a state [K, C, h, w] with zeros to `depth` tensors."""
    return F.pad(state, (0, 0) * 3 + (0, depth - len(state)))


def _widened(moves: Tensor, depth: int) -> Tensor:
    """Pad the factors [S, K, K + 1] of a smaller state, transposed to [S, depth + 1, depth]."""
    steps, state_depth, _ = moves.shape
    wide = moves.new_zeros(steps, depth + 1, depth)
    wide[:, :state_depth, :state_depth], wide[:, depth, :state_depth] = (
        moves[:, :, :state_depth].mT,
        moves[:, :, state_depth],
    )
    return wide
