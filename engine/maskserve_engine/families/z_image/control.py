"""ControlNets of Z-Image (diffusers' ZImageControlNetModel) over packed rows.

A net runs two streams of the same tokens. One is the picture, as the base's own first blocks make
it; the other the control picture. A chain of blocks starts from the sum of both:

    picture alone   the base's blocks of the picture, and blocks of the control picture. In nets of
                    version 2 these are a chain, too, with outputs to the picture's stream
    with the text   the chain; each block's output is added to the base, to its text as well

Both streams lie side by side in the width of the hidden states. Attention is in `batch.forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maskserve_engine.batch.forward import State
from maskserve_engine.batch.packing import Packed, Packing, Stream
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.families.mmdit.control import NetPrompt, check_net
from maskserve_engine.families.z_image.blocks import (
    ZImageStep,
    ZImageVectors,
    feed_forward,
    queries,
    spread_vectors,
    vectors,
)
from maskserve_engine.families.z_image.weights import ZImageBlock, ZImageWeights, block_of
from maskserve_engine.layers.linear import Linear, PlainLinear, linear
from maskserve_engine.spec.model_spec import ControlNetSpec

_SORT = "2-1"
"""Key of the embedder for pictures: side and frames of a patch."""
_PATCH = 4
"""Latents per token."""


class Role(NamedTuple):
    """The place of a block in a net."""

    controls: bool
    """Whether its stream is the control picture's."""
    before: Linear | None = None
    """Layer of the control picture's stream, before this block; the picture's is added."""
    after: Linear | None = None
    """Layer of its output, which is added to the picture's stream or, with the text, to the
    base."""


@dataclass(frozen=True, slots=True, eq=False)
class ZImageControlNet:
    """The weights of diffusers' ZImageControlNetModel, for its base (`mmdit.control.FlowNet`)."""

    weights: ZImageWeights
    """The base's embedders, and the blocks in the order they run."""
    roles: tuple[Role, ...]
    hint: PlainLinear
    channels: int
    places: tuple[tuple[int, ...], ...]
    guided = False

    @classmethod
    def of(
        cls,
        model: Any,
        base: Mapping[str, Any],
        weights: ZImageWeights,
        channels: int,
        control_spec: ControlNetSpec,
    ) -> ZImageControlNet:
        """Build a net for its base.

        Args:
            model: diffusers' net.
            base: configuration of the model that it stands beside.
            weights: the base's, up to its blocks of the picture.
            channels: channels of a token of latents.
            control_spec: nets that the base takes.

        Raises:
            ValueError: the net does not fit the base.
        """
        config, blocks = model.config, weights.image_blocks
        check_net(config, base, control_spec)
        layers = len(model.control_layers)
        places = _ascending("control_layers_places", config, int(base["n_layers"]), layers)
        with torch.no_grad():
            chain = _Chain.of(model.control_layers)
            alone = [(block, Role(controls=False)) for block in blocks]
            if config.add_control_noise_refiner is None:
                alone += [
                    (block_of(block), Role(controls=True)) for block in model.control_noise_refiner
                ]
            else:
                name = "control_refiner_layers_places"
                shared = model.control_noise_refiner is None
                first = chain if shared else _Chain.of(model.control_noise_refiner)
                alone = first.among(alone, _ascending(name, config, len(blocks), len(first.blocks)))
            joint = chain.alone()
            return cls(
                replace(
                    weights,
                    image_blocks=tuple([block for block, _ in alone]),
                    joint_blocks=tuple([block for block, _ in joint]),
                    graphs=None,
                    placed_bytes=0,
                ),
                tuple([role for _, role in (*alone, *joint)]),
                _hint(model, channels),
                channels,
                tuple([(len(blocks) + place,) for place in places]),
            )

    @property
    def blocks(self) -> int:
        return len(self.roles)

    @property
    def hint_embedder(self) -> PlainLinear:
        return self.hint

    def prompt(self, embeds: Tensor, pooled: Tensor | None, mode: int | None) -> NetPrompt:
        """Return a prompt from its tokens [T, width] at the base's first block that sees them: both
        streams have them.
        """
        return NetPrompt(torch.cat((embeds, embeds), dim=1), pooled)

    def vectors(self, timesteps: Tensor, packed: Packed) -> tuple[ZImageVectors, ...]:
        return vectors(self.weights, timesteps)

    def samples(
        self, packed: Packed, at: ZImageVectors, scales: Sequence[float]
    ) -> Iterator[list[Tensor]]:
        """See `FlowNet`; scales act in the picture's stream, too."""
        [row_scales] = to_device([torch.tensor(scales)], packed.tokens.device)
        state = State(_NetStep(self, at, row_scales), packed, ("kv",) * self.blocks)
        for number, role in enumerate(self.roles):
            state.run(number, number + 1)
            if number >= len(self.weights.image_blocks):
                assert role.after is not None, "blocks with the text have an output"
                stream = state.packing.row_stream
                yield list(role.after(state.image, stream.spans).split(stream.lengths))


class _NetStep(ZImageStep):
    """A net at one step (`forward.Transformer`). Hidden states are [N, 2 · width], the picture's
    stream first; behind the chain's first block with the text, [N, width] of the chain.
    """

    def __init__(self, net: ZImageControlNet, vectors: ZImageVectors, scales: Tensor) -> None:
        super().__init__(net.weights, vectors)
        self._roles, self._channels, self._scales = net.roles, net.channels, scales

    def embed(self, tokens: Tensor, stream: Stream) -> Tensor:
        latents, hint = tokens.split((self._channels, self.weights.width), dim=1)
        image = super().embed(latents, stream)
        return torch.cat((image, hint.to(image.dtype)), dim=1)

    def pre(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        packing: Packing,
        cis: Tensor,
        pre_inputs: Any,
        room: Tensor | None,
    ) -> tuple[Tensor, Tensor, Any]:
        block, stream, role = self.blocks[number], packing.row_stream, self._roles[number]
        picture, control = None, image
        if image.shape[1] > self.weights.width:
            picture, control = image.chunk(2, dim=1)
        if role.before is not None:
            assert picture is not None, "a chain starts from both streams"
            control = role.before(control, stream.spans) + picture
        if number >= self.alone:
            picture = None
        x = control if role.controls or picture is None else picture
        scale, *later_vectors = spread_vectors(stream, self.vectors.blocks[number], 4)
        qk, v = queries(self.weights, block, stream.wide(x), scale, cis, stream.spans)
        return qk, v, (picture, control, later_vectors)

    def post(
        self,
        number: int,
        text: Tensor,
        image: Tensor,
        attended: Tensor,
        post_inputs: Any,
        packing: Packing,
        *,
        continues: bool,
        image_alone: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        """Compute a block after attention. The text stays after the last one: it has an output."""
        stream, role = packing.row_stream, self._roles[number]
        picture, control, later_vectors = post_inputs
        x = control if role.controls else picture
        hidden = feed_forward(
            self.weights, self.blocks[number], stream.wide(x), attended, later_vectors, stream.spans
        ).view_as(x)
        if picture is None:
            return text, hidden, None
        if not role.controls:
            return text, torch.cat((hidden, control), dim=1), None
        if role.after is not None:
            scales = self._scales.to(picture.dtype).index_select(0, stream.row_of)[:, None]
            picture = picture + role.after(hidden, stream.spans) * scales
        return text, torch.cat((picture, hidden), dim=1), None


class _Chain(NamedTuple):
    """Blocks of a control picture, each of which continues the one before."""

    before: Linear
    blocks: tuple[ZImageBlock, ...]
    after: tuple[Linear, ...]

    @classmethod
    def of(cls, modules: Sequence[Any]) -> _Chain:
        return cls(
            linear(modules[0].before_proj),
            tuple([block_of(module) for module in modules]),
            tuple([linear(module.after_proj) for module in modules]),
        )

    def alone(self) -> list[tuple[ZImageBlock, Role]]:
        first, *later = zip(self.blocks, self.after, strict=True)
        return [
            (first[0], Role(controls=True, before=self.before, after=first[1])),
            *[(block, Role(controls=True, after=after)) for block, after in later],
        ]

    def among(
        self, picture: Sequence[tuple[ZImageBlock, Role]], places: Sequence[int]
    ) -> list[tuple[ZImageBlock, Role]]:
        """Return the chain among the picture's blocks: its first outputs are each added after the
        block of this number, so they are computed by then. It starts before all of them.
        """
        order, number = list[tuple[ZImageBlock, Role]](), 0
        for place, (block, role) in enumerate(picture):
            order.append((block, role._replace(before=None if place else self.before)))
            while number < len(places) and places[number] == place:
                role = Role(controls=True, after=self.after[number])
                order.append((self.blocks[number], role))
                number += 1
        rest = [(block, Role(controls=True)) for block in self.blocks[number:]]
        return [*order, *rest]


def _ascending(name: str, config: Mapping[str, Any], end: int, most: int) -> list[int]:
    """Return the numbers of the base's blocks that a net adds to.

    Raises:
        ValueError: they are none, more than the net's `most` outputs or not in ascending order, or
            the base lacks one.
    """
    places = list(config[name] or ())
    in_order = 1 <= len(places) <= most and places == sorted(set(places))
    if not (in_order and 0 <= places[0] <= places[-1] < end):
        raise ValueError(
            f"its {name} is {places}; expected: 1 to {most} numbers below {end}, in ascending order"
        )
    return places


def _hint(model: Any, channels: int) -> PlainLinear:
    """Return the embedder of a control picture's tokens [N, 4C], ordered by channel. Further
    channels, of a mask and a masked picture, are zeros, as in the pipeline without a mask.

    Raises:
        ValueError: the net takes fewer channels than the control picture has.
    """
    embedder, latents = model.control_all_x_embedder[_SORT], channels // _PATCH
    if model.config.control_in_dim < latents:
        raise ValueError(
            f"its control_in_dim is {model.config.control_in_dim}; expected: {latents} or more"
        )
    weight = embedder.weight.unflatten(1, (_PATCH, -1))[..., :latents].transpose(1, 2)
    return PlainLinear(weight.flatten(1).contiguous(), embedder.bias)
