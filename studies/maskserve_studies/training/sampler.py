"""Batches of training samples: windows of tokens cut from drawn scenes, with encoded prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxFillPipeline
from numpy.typing import NDArray

from maskserve_benchmarks.demo_model.prompts import MAX_SEQUENCE_LENGTH, every_phrase
from maskserve_studies.training.data import PROMPT_COLOURS, PROMPT_SHAPES, Part
from maskserve_studies.training.transformer import HintedBatch

EMPTY_SHARE: Final = 0.04  # share of samples with an empty prompt, which continue the region
IDENTITY_SHARE: Final = 0.06  # share of samples without mask and prompt (priming)
NAMED_SHARE: Final = 0.1  # share of relational wishes that the prompt names
_OTHER_WINDOW: Final = (5, 6)  # tokens a side round a relational scene's object: small, any
_SMALL_WINDOW: Final = 6  # tokens a side round a mask, up to which the object's is small too
_FARTHEST: Final = 21  # most rows and columns of a picture

# For each (colour, shape) number, (-1, -1) for the empty prompt: its wordings' T5 states
# (P, T, width) and pooled CLIP outputs (P, width).
Prompts = dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
At = tuple[slice, slice]


@torch.no_grad()
def encode_prompts(pipe: FluxFillPipeline) -> Prompts:
    """Encode every wording of every wish, and the empty prompt, like the pipeline."""
    texts: dict[tuple[int, int], list[str]] = {(-1, -1): [""]}
    for text, colour, shape in every_phrase():
        key = (PROMPT_COLOURS.index(colour), PROMPT_SHAPES.index(shape))
        texts.setdefault(key, []).extend([text, text.capitalize(), text.upper()])
    result = {}
    for key, prompts in texts.items():
        states, pooled, _ = pipe.encode_prompt(
            prompt=prompts, prompt_2=None, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
        result[key] = (states, pooled)
    return result


@dataclass(frozen=True)
class _Sample:
    answer: NDArray[np.float16]
    """(N, 4 channels)"""
    condition: NDArray[np.float16]
    """(N, 4 channels + mask pixels)"""
    prompt: tuple[int, int]
    """Key of Prompts."""
    answer_object: tuple[int, int]
    """Colour and shape number of the answer's object, -1 without one."""
    token_objects: NDArray[np.int64]
    """(N, 2): colour and shape number of the far object at its tokens, -1 elsewhere."""


class Sampler:
    """Draws batches of token windows from a list of parts."""

    def __init__(self, parts: list[Part], prompts: Prompts, seed: int) -> None:
        self._parts = parts
        self._prompts = prompts
        self._rng = np.random.default_rng(seed)
        self._spans = [
            np.maximum(p.box[:, 1] - p.box[:, 0], p.box[:, 3] - p.box[:, 2]) for p in parts
        ]
        self._other_spans = [
            np.maximum(p.other[:, 1] - p.other[:, 0], p.other[:, 3] - p.other[:, 2]) for p in parts
        ]

    def draw(self, tokens: int, kind: str, window: int | None) -> HintedBatch:
        """Samples of scenes of one size, about `tokens` tokens in all, text included.

        The samples are whole pictures, or windows of `window` x `window` tokens round their masks.
        A relational scene brings a second window round its object. Only scenes whose mask fits are
        used. The ids of a window begin at a random place where a picture of up to _FARTHEST rows
        and columns can hold them, so that all positions are learnt.
        """
        rng = self._rng
        number = self._pick_part(kind)
        part = self._parts[number]
        rows, columns = part.masked.shape[1:3]
        if window is None:
            ids = _ids((0, 0), (rows, columns))
            fitting = np.arange(len(part.masked))
        else:
            size = (min(window, rows), min(window, columns))
            other_side = min(_OTHER_WINDOW[window > _SMALL_WINDOW], rows, columns)
            other_size = (other_side, other_side)
            ids = self._window_ids(size, other_size if kind == "relations" else None)
            fits = (self._spans[number] <= min(size)) & (self._other_spans[number] <= other_side)
            fitting = np.flatnonzero(fits)
        count = max(1, tokens // (len(ids) + MAX_SEQUENCE_LENGTH))
        samples = []
        for i in np.sort(rng.choice(fitting, size=count)):
            at = [(slice(0, rows), slice(0, columns))]
            if window is not None:
                at = [window_at(self._rng, part.box[i], size, (rows, columns))]
                if kind == "relations":
                    at.append(window_at(self._rng, part.other[i], other_size, (rows, columns)))
            samples.append(self._sample(part, int(i), at))
        return self._batch(samples, ids)

    def draw_objects(self, tokens: int) -> HintedBatch:
        """Small windows round the objects of relational scenes alone, about `tokens` tokens
        in all.
        """
        number = self._pick_part("relations")
        part = self._parts[number]
        size = (_OTHER_WINDOW[0], _OTHER_WINDOW[0])
        fitting = np.flatnonzero(self._other_spans[number] <= size[0])
        count = max(1, tokens // (size[0] * size[1] + MAX_SEQUENCE_LENGTH))
        samples = []
        for i in np.sort(self._rng.choice(fitting, size=count)):
            at = window_at(self._rng, part.other[i], size, part.masked.shape[1:3])
            samples.append(self._sample(part, int(i), [at]))
        return self._batch(samples, _ids(self._origin(size), size))

    def _batch(self, samples: list[_Sample], ids: torch.Tensor) -> HintedBatch:
        texts = [self._wording(s.prompt) for s in samples]
        return HintedBatch(
            clean=_stack([s.answer for s in samples]),
            condition=_stack([s.condition for s in samples]),
            prompt=torch.stack([states for states, _ in texts]),
            pooled=torch.stack([pooled for _, pooled in texts]),
            ids=ids,
            answer_object=torch.tensor([s.answer_object for s in samples]),
            token_objects=torch.from_numpy(np.stack([s.token_objects for s in samples])),
        )

    def _sample(self, part: Part, i: int, at: list[At]) -> _Sample:
        rng, wishes = self._rng, part.wish.shape[1]
        masked = _cut(part.masked[i], at)
        pixels = np.unpackbits(_cut(part.mask[i], at), axis=1)
        prompt = answer_labels = (-1, -1)
        draw = rng.random()
        if draw < IDENTITY_SHARE:
            answer = _cut(part.answers[i, int(rng.integers(wishes + 1))], at)
            masked, pixels = answer, np.zeros_like(pixels)
        elif draw < IDENTITY_SHARE + EMPTY_SHARE or wishes == 0:
            answer = _cut(part.answers[i, wishes], at)
        else:
            k = int(rng.integers(wishes))
            answer = _cut(part.answers[i, k], at)
            wish = [int(number) for number in part.wish[i, k]]
            answer_labels = (wish[0], wish[1])
            prompt = answer_labels if rng.random() < NAMED_SHARE else (wish[2], wish[3])
        object_labels = np.full((*part.masked.shape[1:3], 2), -1)
        top, bottom, left, right, colour, shape = part.other[i]
        object_labels[top:bottom, left:right] = colour, shape
        condition = np.concatenate([masked, pixels.astype(np.float16)], axis=1)
        return _Sample(answer, condition, prompt, answer_labels, _cut(object_labels, at))

    def _wording(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """T5 states (T, width) and pooled output (width,) of a wording. The plainest wording comes
        often.
        """
        states, pooled = self._prompts[key]
        choice = 0 if self._rng.random() < 0.4 else int(self._rng.integers(len(states)))
        return states[choice], pooled[choice]

    def _pick_part(self, kind: str) -> int:
        """The number of a random part of `kind`, weighted by its scenes."""
        sizes = np.array([len(p.masked) if p.kind == kind else 0 for p in self._parts], np.float64)
        return int(self._rng.choice(len(sizes), p=sizes / sizes.sum()))

    def _window_ids(self, size: tuple[int, int], other: tuple[int, int] | None) -> torch.Tensor:
        """Ids (N, 3) of a window of `size` and, apart from it, of one of size `other`."""
        if other is None:
            return _ids(self._origin(size), size)
        while True:  # draw both again, because a window in the middle may leave no room
            first, second = self._origin(size), self._origin(other)
            gaps = [
                max(second[a] - first[a] - size[a], first[a] - second[a] - other[a]) for a in (0, 1)
            ]
            if max(gaps) >= 0:
                return torch.cat([_ids(first, size), _ids(second, other)])

    def _origin(self, size: tuple[int, int]) -> tuple[int, int]:
        high = _FARTHEST - size[0], _FARTHEST - size[1]
        return int(self._rng.integers(high[0])), int(self._rng.integers(high[1]))


def window_at(
    rng: np.random.Generator,
    box: NDArray[np.uint8],
    size: tuple[int, int],
    whole: tuple[int, ...],
) -> At:
    """A random window of `size` in a `whole` grid that covers `box`."""
    result = []
    for axis in (0, 1):
        first, last = int(box[2 * axis]), int(box[2 * axis + 1])
        low, high = max(0, last - size[axis]), min(first, whole[axis] - size[axis])
        begin = int(rng.integers(low, high + 1))
        result.append(slice(begin, begin + size[axis]))
    return result[0], result[1]


def _ids(origin: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
    """FLUX's image ids (rows * columns, 3) of a window."""
    ids = torch.zeros(*size, 3)
    ids[..., 1] = torch.arange(size[0])[:, None] + origin[0]
    ids[..., 2] = torch.arange(size[1])[None, :] + origin[1]
    return ids.view(-1, 3)


def _cut(grid: NDArray[Any], at: list[At]) -> NDArray[Any]:
    """The tokens (N, width) of windows of a (R, C, width) grid."""
    return np.concatenate([grid[window].reshape(-1, grid.shape[-1]) for window in at])


def _stack(tokens: list[NDArray[np.float16]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(tokens)).float()
