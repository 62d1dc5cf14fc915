"""Training hints: heads that read colours and shapes from inside the transformer.

What stands in the picture must be known by the object's own tokens early, and what the answer
shows by the text's and the region's tokens soon after; told so directly, the transformer learns
to look elsewhere many times sooner than from the pictures' error alone. The heads are not part
of the model.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.nn import functional

from maskserve_harness.demo_model.palette import COLOURS, SHAPES
from maskserve_harness.demo_model.transformer import Batch

WEIGHT: Final = 0.05  # of the hints' cross entropies beside the flow-matching loss
_NUMBERS: Final = len(COLOURS) + len(SHAPES)


class Hints(nn.Module):
    """Linear heads on the outputs of some blocks of `model`."""

    def __init__(self, model: FluxTransformer2DModel) -> None:
        super().__init__()
        width = model.inner_dim
        self._outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        seen, shown = ("last_double", "first_single"), ("first_single", "middle_single")
        self.seen = nn.ModuleDict({name: nn.Linear(width, _NUMBERS) for name in seen})
        self.text = nn.ModuleDict({name: nn.Linear(width, _NUMBERS) for name in shown})
        self.region = nn.ModuleDict({name: nn.Linear(width, _NUMBERS) for name in shown})
        blocks = model.single_transformer_blocks
        for name, block in (
            ("last_double", model.transformer_blocks[-1]),
            ("first_single", blocks[0]),
            ("middle_single", blocks[len(blocks) // 2 - 1]),
        ):
            block.register_forward_hook(self._keeper(name))

    def _keeper(self, name: str) -> Any:
        def keep(block: nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            self._outputs[name] = output

        return keep

    def loss(self, batch: Batch, active: torch.Tensor) -> torch.Tensor:
        """Sum of the heads' mean cross entropies; `active` (B, N) is 1 in masks.

        Those of blocks that have run since the last call.
        """
        parts = [torch.zeros(())]
        for name in self._outputs.keys() & self.seen.keys():
            image = self._outputs[name][1].float()
            parts.append(_entropy(self.seen[name](_normed(image)), batch.seen))
        share = (active / active.sum(1, keepdim=True).clamp(min=1)).unsqueeze(2)
        for name in self._outputs.keys() & self.text.keys():
            text, image = (x.float() for x in self._outputs[name])
            parts.append(_entropy(self.text[name](_normed(text).mean(1)), batch.shown))
            region = (_normed(image) * share).sum(1)
            parts.append(_entropy(self.region[name](region), batch.shown))
        self._outputs.clear()
        return torch.stack(parts).sum()


def front_of(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    """`model` without its single blocks, of the same weights: enough to tell what is seen."""
    front = copy.copy(model)
    front._modules = {**model._modules, "single_transformer_blocks": nn.ModuleList()}
    return front


def _normed(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _entropy(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Of colour plus shape, over the places where `numbers` (..., 2) are not -1."""
    known = numbers[..., 0] >= 0
    if not known.any():
        return torch.zeros(())
    logits, numbers = logits[known], numbers[known]
    colour = functional.cross_entropy(logits[:, : len(COLOURS)], numbers[:, 0])
    return colour + functional.cross_entropy(logits[:, len(COLOURS) :], numbers[:, 1])
