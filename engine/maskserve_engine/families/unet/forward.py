"""UNet2DConditionModel over any mix of rows of one latent shape: dense, cached and priming."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.batch.graphs import Inputs, Launcher
from maskserve_engine.batch.packing import Residuals
from maskserve_engine.batch.picture_tokens import PictureKeys
from maskserve_engine.batch.row_updates import ByPass, MovingRows
from maskserve_engine.batch.transfer import moved
from maskserve_engine.families.unet.canvas import Canvas, Site, Tiled, Whole
from maskserve_engine.families.unet.levels import make_level
from maskserve_engine.families.unet.spec import level_sizes
from maskserve_engine.families.unet.stack import (
    InactivePassTokens,
    Shown,
    Stack,
    StackCapture,
    Text,
)
from maskserve_engine.families.unet.surroundings import Surroundings
from maskserve_engine.families.unet.tile import Ids
from maskserve_engine.families.unet.weights import StackWeights, Stage, UnetWeights
from maskserve_engine.layers.attention import Span
from maskserve_engine.layers.linear import linear
from maskserve_engine.layers.low_rank import Adapters, LowRank, low_rank
from maskserve_engine.layers.scatter_kv import scatter_kv


@dataclass(frozen=True, slots=True)
class PassInput:
    """Inputs of one evaluation of the model, beside latents and timestep."""

    text: Tensor
    """[T, width] prompt embedding."""
    added: Tensor | None
    """[embedding width] of SDXL's micro-conditioning; None for other models."""
    active: Mapping[int, Ids] | None = None
    """Level → [n] ids of the computed tokens; None: all are computed."""
    cached: InactivePassTokens | None = None
    """Cached tokens; given with `active`."""
    surroundings: Surroundings | None = None
    """Surroundings of the tile on which the row is convolved; None: the whole picture is."""
    residuals: Residuals | None = None
    """Residuals added to its feature maps."""
    number: int = 0
    picture: PictureKeys = ()
    """Keys and values of the IP-Adapter's picture."""


class PackedPasses:
    """The passes of all rows, while these are the same. Those of one row are adjacent, those with a
    tile come last.
    """

    def __init__(
        self,
        passes: Sequence[PassInput],
        shape: tuple[int, int],
        depth: int,
        device: torch.device,
        *,
        buckets: bool = False,
        together: bool = False,
    ) -> None:
        """Pack passes; `buckets` and `together` as in `make_level`."""
        self.together = together
        self.rests = tuple(pass_input.cached for pass_input in passes)
        pass_residuals = tuple(pass_input.residuals for pass_input in passes)
        self.residuals = pass_residuals if any(pass_residuals) else ()
        """Residuals by pass; empty if no pass has any. Those of a recorded step are None."""
        self.show_to(())
        self.text = Text(
            [pass_input.text for pass_input in passes],
            [pass_input.picture for pass_input in passes],
        )
        lengths = [len(pass_input.text) for pass_input in passes]
        added = [pass_input.added for pass_input in passes if pass_input.added is not None]
        self.added = torch.stack(added) if added else None
        self.canvases = _canvases(passes)
        self.sizes = level_sizes(*shape, depth)
        levels = []
        for level, (height, width) in enumerate(self.sizes):
            active = [
                None if pass_input.active is None else pass_input.active[level]
                for pass_input in passes
            ]
            tiles = [
                None
                if pass_input.surroundings is None
                else pass_input.surroundings.tile[level].inside
                for pass_input in passes
            ]
            level_inputs = height * width, active, tiles, lengths
            levels.append(make_level(*level_inputs, buckets=buckets, together=together))
        self.levels = moved(tuple(levels), device)

    def show_to(self, captures: Captures) -> None:
        """Show what the next steps compute to these captures."""
        self.captures = captures
        self.captured_parts = frozenset(
            [part for _, _, capture in captures for part in capture.parts]
        )
        """Methods of the captures that keep something."""

    @property
    def plain(self) -> bool:
        """Whether steps may be recorded: no pass has an IP-Adapter's picture."""
        return self.text.pictures is None

    @property
    def tiled(self) -> bool:
        return any(isinstance(canvas, Tiled) for canvas in self.canvases)

    def shapes(self, attends: Sequence[bool]) -> Hashable:
        """Return the key of all tensor shapes of a step, beside those of its input, and of its
        pieces; `attends` says of each level whether it has attention.
        """
        levels = zip(self.levels, attends, strict=True)
        computed = tuple([level.shapes for level, has_attention in levels if has_attention])
        shapes = computed, self.text.spans, tuple([canvas.shapes for canvas in self.canvases])
        return shapes, self.captured_parts, bool(self.residuals)

    def copied(self, inputs: Inputs, attends: Sequence[bool]) -> PackedPasses:
        """Return the same passes on copied tensors, without entries; `attends` as in `shapes`."""
        clone, copy_of = copy(self), inputs.copy
        clone.rests, clone.captures = (None,) * len(self.rests), ()
        clone.residuals = (None,) * len(self.residuals)
        clone.text = self.text.copied(copy_of)
        clone.added = None if self.added is None else copy_of(self.added)
        clone.levels = tuple(
            [
                level.copied(copy_of) if has_attention else level
                for level, has_attention in zip(self.levels, attends, strict=True)
            ]
        )
        clone.canvases = [canvas.copied(inputs) for canvas in self.canvases]
        return clone

    def take(self, other: PackedPasses, attends: Sequence[bool]) -> None:
        """Copy the inputs of other passes of the same shapes into these tensors. Levels without
        attention are not read, and may have other numbers of tokens.
        """
        self.text.take(other.text)
        if self.added is not None:
            assert other.added is not None
            self.added.copy_(other.added)
        for own_level, level, has_attention in zip(self.levels, other.levels, attends, strict=True):
            if has_attention:
                own_level.take(level)
        for canvas, source_canvas in zip(self.canvases, other.canvases, strict=True):
            canvas.take(source_canvas)

    def turn_to(self, other: PackedPasses, *, anew: bool) -> None:
        """Read the surroundings for the next step of passes that were taken; `anew`: whatever was
        read before.

        Raises:
            EntryLost: an entry's load failed.
        """
        for canvas, source_canvas in zip(self.canvases, other.canvases, strict=True):
            canvas.turn_to(source_canvas, anew=anew)

    @property
    def moving(self) -> list[MovingRows]:
        """The passes of levels where these are padded together, for the updates of their LoRAs."""
        sparse_levels = [level.sparse for level in self.levels if level.sparse is not None]
        return [
            MovingRows(sparse.passes, sparse.tiles)
            for sparse in sparse_levels
            if sparse.tiles is not None
        ]

    def place(self, level: int, number: int, part: str, outs: Sequence[Tensor]) -> None:
        sparse = self.levels[level].sparse
        assert sparse is not None
        slots = {"kv": sparse.keys.slots, "h alone": sparse.keys.cached}.get(
            part, sparse.computed.slots
        )
        token_ids = sparse.cached_in_box if part == "end" else (None,) * len(self.rests)
        sources = [
            None
            if cached_tokens is None
            else cached_tokens.source(number, part.split()[0], row_ids)
            for cached_tokens, row_ids in zip(self.rests, token_ids, strict=True)
        ]
        scatter_kv(sources, outs, slots)

    def show(self, part: Shown, block: int, x: Tensor, passes: Sequence[Span]) -> None:
        """Show tokens to captures; arguments as of `stack.Show`."""
        for first, behind, capture in self.captures:
            tokens = x[passes[first][0] : passes[behind - 1][1]]
            if part == "keys_values":
                capture.keys_values(block, *tokens.unbind(1))
            elif part == "hidden":
                capture.hidden(block, tokens)
            else:
                capture.end(block, tokens)

    def show_map(self, number: int, x: Tensor, groups: int) -> None:
        """Show captures the feature map `number`, [p, C, h, w] of the first passes."""
        for first, behind, capture in self.captures:
            capture.map(number, x[first:behind], groups)

    def add_residuals(self, number: int, level: int, x: Maps) -> None:
        """Add the residuals of the place `number` to a feature map (`Residuals`)."""
        for canvas, feature_map in zip(self.canvases, x, strict=True):
            residuals = self.residuals[canvas.passes]
            for pass_map, of in zip(feature_map, residuals, strict=True):
                added = None if of is None else of.after(number)
                if added is not None:
                    pass_map += canvas.cut(level, added)


Captures = Sequence[tuple[int, int, StackCapture]]
"""First pass, end of its passes, and capture of each recorded row."""
Maps = list[Tensor]
"""One feature map: [p, C, h, w] of each canvas."""


def _canvases(passes: Sequence[PassInput]) -> list[Canvas]:
    canvases: list[Canvas] = []
    end = 0
    for surroundings, group in groupby(passes, lambda pass_input: pass_input.surroundings):
        canvas_passes = list(group)
        at, end = slice(end, end + len(canvas_passes)), end + len(canvas_passes)
        tiled = surroundings is not None
        canvases.append(Tiled(at, surroundings, canvas_passes[0].number) if tiled else Whole(at))
    return canvases


def micro_conditioning(model: Any, pooled: Tensor, time_ids: Tensor) -> Tensor:
    """Return SDXL's micro-conditioning from `pooled` [pooled width] and `time_ids` [6]: original
    size, crop and target size.
    """
    sizes = model.add_time_proj(time_ids).flatten().to(pooled.dtype)
    return torch.cat((pooled, sizes))


def added_embedding(model: Any, micro: Tensor, adapters: Adapters = ()) -> Tensor:
    """Return [embedding width] of micro-conditioning `micro`, which is added to the timestep's
    embedding.
    """

    def layer(name: str, module: Any, x: Tensor) -> Tensor:
        product = low_rank(f"add_embedding.{name}", linear(module), [adapters])
        return product(x, [(0, 1)]) if isinstance(product, LowRank) else module(x)

    return _embedded(model.add_embedding, micro[None], layer)[0]


def _embedded(module: Any, x: Tensor, layer: Callable[[str, Any, Tensor], Tensor]) -> Tensor:
    """Apply a TimestepEmbedding whose layers are computed by `layer`."""
    return layer("linear_2", module.linear_2, module.act(layer("linear_1", module.linear_1, x)))


def forward(
    weights: UnetWeights,
    packed: PackedPasses,
    sample: Tensor,
    timesteps: Tensor,
    kinds: Sequence[str] = (),
    launcher: Launcher | None = None,
) -> Tensor:
    """Return the model's output for every pass.

    Args:
        weights: the model's weights, perhaps with LoRAs.
        packed: the passes.
        sample: [P, in_channels, h, w].
        timesteps: [P], float32.
        kinds: `dense`, `project` or `kv` per block in the order they run, for all cached
            passes; not read when there are none.
        launcher: launches or records the kernels; None: launch at once.

    Returns:
        [P, out_channels, h, w].
    """
    model = weights.model
    walk = _Walk.begun(weights, packed, sample, timesteps, kinds, launcher or Launcher())
    *skips, x = walk.walk_down(weights, walk.enter(model.conv_in, sample))
    for stage, stacks in zip(model.up_blocks, weights.up_blocks, strict=True):
        for resnet, stack in _layers(stage, stacks):
            x = walk.layer(resnet, stack, walk.joined(x, skips))
        for sampler in stage.upsamplers or ():
            x = walk.up(sampler, x)
    return walk.leave(model, x)


def maps_of_net(
    weights: UnetWeights,
    packed: PackedPasses,
    sample: Tensor,
    hints: Tensor,
    timesteps: Tensor,
) -> list[Tensor]:
    """Return the feature maps of a ControlNet: a UNet's down blocks and middle block.

    Args:
        weights: weights of the net.
        packed: the passes; none has a tile, and cached tokens enter as keys and values.
        sample: [P, in_channels, h, w].
        hints: [P, C, h, w] embedded control pictures.
        timesteps: [P], float32.

    Returns:
        [P, C, h, w] each, in the order of the places to which they go
            (`batch.packing.Residuals`).
    """
    kinds = ("kv",) * weights.blocks
    walk = _Walk.begun(weights, packed, sample, timesteps, kinds, Launcher())
    [entered] = walk.enter(weights.model.conv_in, sample)
    return [whole for [whole] in walk.walk_down(weights, [entered + hints])]


def _layers(stage: Any, stacks: Stage) -> list[tuple[Any, StackWeights | None]]:
    return list(zip(stage.resnets, stacks or [None] * len(stage.resnets), strict=True))


class _Walk:
    """Position of the walk through the UNet: its level, the next block and the next feature map."""

    def __init__(
        self,
        packed: PackedPasses,
        kinds: Sequence[str],
        embedding: Tensor,
        groups: int,
        layers: Mapping[Any, Callable[..., Tensor]],
        launcher: Launcher,
    ) -> None:
        self.packed, self.kinds, self.canvases = packed, kinds, packed.canvases
        self.embedding, self.groups = embedding, groups
        self.layers, self.launcher = layers, launcher
        self.level = 0
        self.block = 0
        self.map = 0

    @classmethod
    def begun(
        cls,
        weights: UnetWeights,
        packed: PackedPasses,
        sample: Tensor,
        timesteps: Tensor,
        kinds: Sequence[str],
        launcher: Launcher,
    ) -> _Walk:
        """Start before the first convolution; arguments as in `forward`."""
        model = weights.model
        waves = model.time_proj(timesteps).to(sample.dtype)
        embedding = _embedded(
            model.time_embedding, waves, lambda _, module, x: _timed(weights.layers, module, x)
        )
        if packed.added is not None:
            embedding = embedding + packed.added
        groups = model.config.norm_num_groups
        return cls(packed, kinds, embedding, groups, weights.layers, launcher)

    def walk_down(self, weights: UnetWeights, x: Maps) -> list[Maps]:
        """Return the skip connections (`joined`), then the middle block's output, from the maps
        after `conv_in`.
        """
        model = weights.model
        maps = [x]
        for stage, stacks in zip(model.down_blocks, weights.down_blocks, strict=True):
            for resnet, stack in _layers(stage, stacks):
                x = self.layer(resnet, stack, x)
                maps.append(x)
            for sampler in stage.downsamplers or ():
                x = self.down(sampler, x)
                maps.append(x)
        first, *later_resnets = model.mid_block.resnets
        x = self.resnet(first, x)
        for stack, resnet in zip(weights.mid_block, later_resnets, strict=True):
            x = self.resnet(resnet, self.stack(stack, x))
        return [*maps, self.with_residuals(len(maps), x, slot=len(x))]

    def enter(self, conv: Any, sample: Tensor) -> Maps:
        return [c.enter(self._conv(conv, c), sample[c.passes]) for c in self.canvases]

    def layer(self, resnet: Any, stack: StackWeights | None, x: Maps) -> Maps:
        x = self.resnet(resnet, x)
        return x if stack is None else self.stack(stack, x)

    def resnet(self, module: Any, x: Maps) -> Maps:
        time = _timed(self.layers, module.time_emb_proj, module.nonlinearity(self.embedding))
        time = time[:, :, None, None]
        h = list(x)
        self._convolve(module.norm1, module.nonlinearity, module.conv1, h)
        h = [
            feature_map + time[canvas.passes]
            for canvas, feature_map in zip(self.canvases, h, strict=True)
        ]
        self._convolve(module.norm2, module.nonlinearity, module.conv2, h)
        if module.conv_shortcut is not None:
            shortcut, canvas = module.conv_shortcut, self.canvases
            x = [
                self._conv(shortcut, c)(feature_map)
                for c, feature_map in zip(canvas, x, strict=True)
            ]
        return [(a + b) / module.output_scale_factor for a, b in zip(x, h, strict=True)]

    def stack(self, weights: StackWeights, x: Maps) -> Maps:
        packed, site, level = self.packed, self._site(x), self.level

        def place(number: int, part: str, outs: Sequence[Tensor]) -> None:
            self.launcher.between(lambda now: now.place(level, number, part, outs), packed)

        def show(part: Shown, block: int, x: Tensor, passes: Sequence[Span]) -> None:
            if part in packed.captured_parts:
                opened = self.launcher.open(x)
                self.launcher.between(lambda now: now.show(part, block, opened, passes), packed)

        run = Stack(packed.levels[level], packed.text, self.kinds, place, show, self.launcher.empty)
        normed = (
            c.norm(site, weights.norm, feature_map)
            for c, feature_map in zip(self.canvases, x, strict=True)
        )
        x = run.run(weights, self.block, x, normed, [canvas.passes for canvas in self.canvases])
        self.block += len(weights.transformer_blocks)
        return x

    def down(self, sampler: Any, x: Maps) -> Maps:
        site = self._site(x)
        self.level += 1
        return [
            c.shrink(site, sampler, self._conv(sampler.conv, c), feature_map)
            for c, feature_map in zip(self.canvases, x, strict=True)
        ]

    def up(self, sampler: Any, x: Maps) -> Maps:
        self.level -= 1
        size = self.packed.sizes[self.level]
        return [
            c.widen(self.level, size, sampler, self._conv(sampler.conv, c), feature_map)
            for c, feature_map in zip(self.canvases, x, strict=True)
        ]

    def leave(self, model: Any, x: Maps) -> Tensor:
        self._convolve(model.conv_norm_out, model.conv_act, model.conv_out, x)
        size = self.packed.sizes[0]
        whole = [
            canvas.leave(size, feature_map)
            for canvas, feature_map in zip(self.canvases, x, strict=True)
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole)

    def with_residuals(self, number: int, x: Maps, slot: int = 0) -> Maps:
        """Add the residuals of the place `number` to a feature map, each canvas's in a slot from
        `slot` on.
        """
        if not self.packed.residuals:
            return x
        level = self.level
        opened = [self.launcher.open(feature_map, at) for at, feature_map in enumerate(x, slot)]
        self.launcher.between(lambda now: now.add_residuals(number, level, opened), self.packed)
        return opened

    def joined(self, x: Maps, skips: list[Maps]) -> Maps:
        """Concatenate the last skip connection. ControlNets' residuals are read only here, because
        the nets may run beside the down blocks.
        """
        skip = skips.pop()
        skip = self.with_residuals(len(skips), skip)
        return [torch.cat(pair, dim=1) for pair in zip(x, skip, strict=True)]

    def _convolve(self, norm: Any, activate: Any, conv: Any, x: Maps) -> None:
        """Apply GroupNorm, activation and 3x3 convolution, in place, so that no map is kept longer
        than needed.
        """
        site, canvases = self._site(x), self.canvases
        x[:] = [
            c.norm_around(site, norm, feature_map)
            for c, feature_map in zip(canvases, x, strict=True)
        ]
        x[:] = [activate(feature_map) for feature_map in x]
        x[:] = [
            c.convolve(site.level, self._conv(conv, c), feature_map)
            for c, feature_map in zip(canvases, x, strict=True)
        ]

    def _conv(self, module: Any, canvas: Canvas) -> Any:
        """Return the model's convolution, or its replacement for the canvas's passes."""
        replacement = self.layers.get(module)
        pass_convolution = (
            replacement.take(canvas.passes) if isinstance(replacement, ByPass) else None
        )
        return module if pass_convolution is None else pass_convolution

    def _site(self, x: Maps) -> Site:
        """Count a feature map, and show it to captures."""
        site = Site(self.map, self.level)
        self.map += 1
        if "map" in self.packed.captured_parts:
            # Rows that compute all tokens have no tile: they are among the first canvas's.
            opened, number, groups = self.launcher.open(x[0]), site.number, self.groups
            self.launcher.between(lambda now: now.show_map(number, opened, groups), self.packed)
        return site


def _timed(layers: Mapping[Any, Callable[..., Tensor]], module: Any, x: Tensor) -> Tensor:
    """Return [P, C] of a layer, or of its replacement, from the timesteps' [P, in]."""
    replacement = layers.get(module)
    return module(x) if replacement is None else replacement(x, [(p, p + 1) for p in range(len(x))])
