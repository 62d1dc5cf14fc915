"""Training hints: heads that read colours and shapes from inside the transformer.

The tokens of an object must know early, all together, which object stands there: a token that
attends to them gets their mean. The text's and the region's tokens must know soon after which
object the answer shows. With these direct hints the transformer learns to look elsewhere many times
sooner than from the pictures' error alone. The heads are not part of the model.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.nn import functional

from maskserve_benchmarks.demo_model.palette import COLOURS, SHAPES
from maskserve_studies.training.transformer import HintedBatch

_NUMBERS: Final = len(COLOURS) + len(SHAPES)


class Hints(nn.Module):
    """Linear heads on the outputs of some blocks of `model`."""

    def __init__(self, model: FluxTransformer2DModel) -> None:
        super().__init__()
        width = model.inner_dim
        self._outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shapes_right: dict[str, float] = {}
        """Share of the last batch's shapes that each head predicts correctly."""
        object_heads, answer_heads = (
            ("last_double", "first_single"),
            ("first_single", "middle_single"),
        )
        self.token_heads = nn.ModuleDict(
            {name: nn.Linear(width, _NUMBERS) for name in object_heads}
        )
        self.text = nn.ModuleDict({name: nn.Linear(width, _NUMBERS) for name in answer_heads})
        self.region = nn.ModuleDict({name: nn.Linear(width, _NUMBERS) for name in answer_heads})
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

    def loss(self, batch: HintedBatch, active: torch.Tensor) -> torch.Tensor:
        """Sum of the heads' mean cross entropies. `active` (B, N) is 1 in masks.

        Only blocks that have run since the last call count.
        """
        parts = [torch.zeros(())]
        covered = (batch.token_objects[..., 0] >= 0).float()
        for name in self._outputs.keys() & self.token_heads.keys():
            logits = self.token_heads[name](_mean(self._outputs[name][1], covered))
            parts.append(self._entropy(f"token {name}", logits, batch.token_objects.amax(1)))
        for name in self._outputs.keys() & self.text.keys():
            text, image = self._outputs[name]
            logits = self.text[name](_mean(text, torch.ones(text.shape[:2])))
            parts.append(self._entropy(f"text {name}", logits, batch.answer_object))
            logits = self.region[name](_mean(image, active))
            parts.append(self._entropy(f"region {name}", logits, batch.answer_object))
        self._outputs.clear()
        return torch.stack(parts).sum()

    def _entropy(self, head: str, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Cross entropy of colour plus shape, over the samples whose `numbers` (B, 2) are
        not -1.
        """
        has_label = numbers[:, 0] >= 0
        if not has_label.any():
            return torch.zeros(())
        colours, shapes = logits[has_label].split([len(COLOURS), len(SHAPES)], dim=1)
        colour, shape = numbers[has_label].unbind(1)
        self.shapes_right[head] = float((shapes.argmax(1) == shape).float().mean())
        return functional.cross_entropy(colours, colour) + functional.cross_entropy(shapes, shape)


def front_of(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    """`model` without its single blocks, with shared weights. That is enough to predict far
    objects.
    """
    front = copy.copy(model)
    front._modules = {**model._modules, "single_transformer_blocks": nn.ModuleList()}
    return front


def _mean(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Normalised tokens (B, N, width), averaged by `weight` (B, N): (B, width)."""
    normed = functional.layer_norm(tokens.float(), tokens.shape[-1:])
    share = weight / weight.sum(1, keepdim=True).clamp(min=1)
    return (normed * share.unsqueeze(2)).sum(1)
