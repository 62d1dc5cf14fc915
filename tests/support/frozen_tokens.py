"""diffusers' nets whose cached tokens keep a template's values: hooks freeze them.

This is the oracle for cached rows with adapters. The template's forward pass is recorded without
any adapter. In the edit's pass, PEFT's layers see and change all tokens. Hooks put the template's
values back where the plan reads them: a block's input for `project`, keys and values for `kv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Site: TypeAlias = tuple[str, int]
"""A part of a block that is frozen, with the block's number. `h`: its input; `k`: keys after their
norm; `v`: values; `end`: the output of a stack that ends with this block.
"""
Freeze: TypeAlias = Callable[[Site, Tensor], Tensor]
"""Takes the image tokens [1, tokens, …] at a site, and returns the tokens that replace them."""


class Recorded(dict[Site, Tensor]):
    """Records the tokens of each site."""

    def __call__(self, site: Site, tensor: Tensor) -> Tensor:
        self[site] = tensor.clone()
        return tensor


class Frozen:
    """Puts the recorded tokens back.

    Args:
        recorded: tokens of the template.
        inactive: tokens in a picture → ids of the cached ones.
        kind: of the plan.
        at_hand: blocks whose cached tokens are computed before them; `project` reads these.
    """

    def __init__(
        self,
        recorded: Mapping[Site, Tensor],
        inactive: Mapping[int, Tensor],
        kind: str,
        at_hand: frozenset[int],
    ) -> None:
        self.recorded, self.inactive = recorded, inactive
        parts = {"project": ("h", "end"), "kv": ("k", "v", "end"), "dense": ()}[kind]
        self.sites = {site for site in recorded if site[0] in parts}
        self.sites -= {("h", block) for block in at_hand}

    def __call__(self, site: Site, tensor: Tensor) -> Tensor:
        if site not in self.sites:
            return tensor
        ids = self.inactive[tensor.shape[1]]
        return tensor.index_copy(1, ids, self.recorded[site][:, ids])


@contextmanager
def flux_hooks(net: nn.Module, freeze: Freeze) -> Iterator[None]:
    """Hook a FluxTransformer2DModel."""
    with _hooks() as hooked:
        model: Any = net
        doubles = len(model.transformer_blocks)
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        for number, block in enumerate(blocks):
            text = [0]  # tokens before the image's, in a single block's attention

            def enter(
                _: Any, args: Any, kwargs: dict[str, Any], number: int = number,
                text: list[int] = text,
            ) -> Any:  # fmt: skip
                if number >= doubles:
                    text[0] = kwargs["encoder_hidden_states"].shape[1]
                hidden = freeze(("h", number), kwargs["hidden_states"])
                return args, {**kwargs, "hidden_states": hidden}

            def leave(part: str, number: int = number, text: list[int] = text) -> Any:
                def hook(_: Any, __: Any, out: Tensor) -> Tensor:
                    image_tokens = freeze((part, number), out[:, text[0] :])
                    return torch.cat((out[:, : text[0]], image_tokens), dim=1)

                return hook

            hooked(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooked(block.attn.norm_k.register_forward_hook(leave("k")))
            hooked(block.attn.to_v.register_forward_hook(leave("v")))
        yield


@contextmanager
def unet_hooks(net: nn.Module, freeze: Freeze) -> Iterator[None]:
    """Hook a UNet2DConditionModel."""
    with _hooks() as hooked:
        for number, (block, last) in enumerate(_blocks_of_unet(net)):

            def enter(_: Any, args: tuple[Any, ...], number: int = number) -> Any:
                return freeze(("h", number), args[0]), *args[1:]

            def leave(part: str, number: int = number) -> Any:
                return lambda _, __, out: freeze((part, number), out)

            hooked(block.register_forward_pre_hook(enter))
            hooked(block.attn1.to_k.register_forward_hook(leave("k")))
            hooked(block.attn1.to_v.register_forward_hook(leave("v")))
            if last:
                hooked(block.register_forward_hook(leave("end")))
        yield


def first_blocks(net: nn.Module) -> frozenset[int]:
    """Numbers of the first blocks of a UNet's stacks."""
    ends = [last for _, last in _blocks_of_unet(net)]
    return frozenset({0, *[number + 1 for number, last in enumerate(ends[:-1]) if last]})


def _blocks_of_unet(net: Any) -> list[tuple[Any, bool]]:
    """Blocks in their running order, each with whether it is the last of its stack."""
    stages = [*net.down_blocks, net.mid_block, *net.up_blocks]
    stacks = [stack.transformer_blocks for stage in stages
              for stack in getattr(stage, "attentions", None) or ()]  # fmt: skip
    return [(block, block is stack[-1]) for stack in stacks for block in stack]


@contextmanager
def _hooks() -> Iterator[Callable[[Any], None]]:
    handles: list[Any] = []
    try:
        yield handles.append
    finally:
        for handle in handles:
            handle.remove()
