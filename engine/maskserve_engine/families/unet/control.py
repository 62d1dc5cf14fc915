"""ControlNetModels beside a UNet, over the passes of the rows that have control.

A net is a copy of the UNet's down blocks and middle block; its feature maps, each through a
convolution, are added to those of the base. It runs by the same walk (`forward`). Beside a cached
row its stacks compute the base's computed tokens, and its convolutions the whole picture. Of the
cached tokens it keeps keys, values, and the stacks' outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCache
from maskserve_engine.batch.transfer import to_device
from maskserve_engine.control_link.opening import Opening
from maskserve_engine.families.control import (
    Controlled,
    NetOutput,
    NetRequest,
    Nets,
    PassResiduals,
    RowControl,
)
from maskserve_engine.families.unet.captures import SHOWN_TO_STEP_CACHES
from maskserve_engine.families.unet.forward import (
    PackedPasses,
    PassInput,
    added_embedding,
    maps_of_net,
    micro_conditioning,
)
from maskserve_engine.families.unet.spec import CONTROL, check_net, level_sizes
from maskserve_engine.families.unet.tile import Ids
from maskserve_engine.families.unet.weights import UnetWeights
from maskserve_engine.layers.scatter_kv import KvSource


@dataclass(frozen=True, slots=True, eq=False)
class UnetControlNet:
    weights: UnetWeights
    outs: tuple[Any, ...]
    """The convolution after each feature map, the middle's last."""
    levels: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, base: Any, channels: int) -> UnetControlNet:
        """Build a net for its base.

        Raises:
            ValueError: the net does not fit the base, or is not served.
        """
        net_config, of_base = model.config, {**base.config, "in_channels": channels}
        for name in ("in_channels", *CONTROL.equal):
            if net_config[name] != of_base[name]:
                raise ValueError(
                    f"its {name} is {net_config[name]}, that of the model {of_base[name]}"
                )
        check_net(net_config)
        weights = UnetWeights.of(model)
        middle = len(model.down_blocks) - 1
        stages = [*enumerate(weights.down_blocks), (middle, weights.mid_block)]
        blocks = [
            [level] * len(stack.transformer_blocks) for level, stage in stages for stack in stage
        ]
        outs = (*model.controlnet_down_blocks, model.controlnet_mid_block)
        return cls(weights, outs, tuple(chain.from_iterable(blocks)))

    def read(self, picture: Tensor) -> Tensor:
        """Embed a control picture [1, 3, H, W] from 0 to 1 as [C, h, w]; the same at every step."""
        model = self.weights.model
        if model.config.controlnet_conditioning_channel_order == "bgr":
            picture = picture.flip(1)
        return model.controlnet_cond_embedding(picture)[0]

    def prompt(self, text: Tensor, micro: Sequence[Tensor]) -> PassInput:
        """Return a pass that computes all tokens, from text [T, width] and, for SDXL, [pooled
        width] and the sizes [6].
        """
        model = self.weights.model
        return PassInput(
            text, added_embedding(model, micro_conditioning(model, *micro)) if micro else None
        )


class UnetNetInput(NamedTuple):
    """One net's inputs for an edit, beside those of its base."""

    control: ControlInput
    net: UnetControlNet
    hint: Tensor
    """[C, h, w] embedded picture."""
    passes: tuple[PassInput, ...]
    """Passes of the prompt and the negative prompt, which compute all tokens."""
    cached_ids: tuple[Tensor, ...] = ()
    """Level → [m] ids of a cached row's cached tokens; empty for a dense row."""

    @classmethod
    def encode(
        cls,
        control: ControlInput,
        net: UnetControlNet,
        picture: Tensor,
        texts: Tensor,
        micro: Sequence[Tensor],
    ) -> UnetNetInput:
        """Compute a net's constant inputs for an edit.

        Args:
            control: the edit's request for the net.
            net: the net.
            picture: [1, 3, H, W] from 0 to 1.
            texts: [passes, T, width] of the prompt, then of the negative one.
            micro: for SDXL [passes, pooled width] and the sizes [passes, 6]; else empty.
        """
        passes = [
            net.prompt(text, micro_of_pass)
            for text, *micro_of_pass in zip(texts, *micro, strict=True)
        ]
        return cls(control, net, net.read(picture), tuple(passes))


def cached_ids_of(active: Mapping[int, Ids], size: Sequence[int]) -> list[Tensor]:
    """Return level → [m] ids of the tokens outside `active`, in host memory; `size` is that of the
    latents.
    """
    return [
        torch.from_numpy(np.setdiff1d(np.arange(height * width), active[level]))
        for level, (height, width) in enumerate(level_sizes(size[0], size[1], len(active)))
    ]


class NetStepCache(StepCache):
    """Step cache of a pass in a net's stacks (`stack.StackCapture`)."""

    parts = SHOWN_TO_STEP_CACHES  # convolutions run on the whole picture

    def __init__(
        self, schedule: RefreshSchedule, cached_ids: Sequence[Tensor], levels: Sequence[int]
    ) -> None:
        super().__init__(schedule)
        self.text = False  # a UNet's text has its own attention
        self._ids, self._levels = cached_ids, levels
        self.now = 0.0

    def end(self, block: int, output: Tensor) -> None:
        self._keep(block, "end", (output,))

    def map(self, number: int, x: Tensor, groups: int) -> None:
        """Ignore feature maps."""

    def _cached_ids(self, block: int, x: Tensor) -> Tensor:
        return self._ids[self._levels[block]]


@dataclass(frozen=True, slots=True)
class _CachedTokens:
    """`stack.InactivePassTokens` of one pass in one net, from its present step cache."""

    control: RowControl[UnetNetInput]
    number: int
    """Number of the net's input."""
    half: int
    """Number of the pass."""

    def source(self, block: int, part: str, positions: Tensor | None = None) -> KvSource:
        assert positions is None, "a net's passes have no tile"
        step_cache: NetStepCache = self.control.residuals[self.number].tokens[self.half]
        return step_cache.source(block, step_cache.now, part)


class UnetSample(NamedTuple):
    sample: Tensor
    """[channels, h, w] latents."""
    active: Mapping[int, Ids] | None


def controlled(
    control: RowControl[UnetNetInput],
    conditioning: UnetSample,
    timestep: float,
    step: int,
    steps: int,
    lookahead: int | None = None,
    *,
    adds: bool = True,
) -> Controlled[UnetNetInput]:
    has_cached = bool(control.inputs[0].cached_ids)
    sparse = conditioning.active is not None
    return Controlled(
        control, conditioning, sparse, has_cached, (timestep,), step, steps, lookahead, adds
    )


class _Run(NamedTuple):
    packed: PackedPasses
    hints: Tensor


class UnetNets(Nets[UnetNetInput]):
    """Nets over rows of one latent shape, whose base takes a `UnetSample`."""

    in_parts = False

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], _Run] = {}
        """By net, inputs, and which rows compute only the base's computed tokens."""

    def outputs(
        self, net: UnetControlNet, same: Sequence[NetRequest[UnetNetInput]]
    ) -> Iterator[NetOutput]:
        run = self._packed(net, same)
        counts = [len(request.net_input.passes) for request in same]
        rows = [
            request.row for request, count in zip(same, counts, strict=True) for _ in range(count)
        ]
        sample = torch.stack([row.base_input.sample for row in rows])
        timesteps = torch.tensor([row.timesteps[0] for row in rows])
        [timesteps] = to_device([timesteps], sample.device)
        captures_by_row = [_seeing(net, request) for request in same]
        first, captures = 0, []
        for request, step_caches in zip(same, captures_by_row, strict=True):
            captures += [
                (i, i + 1, step_cache) for i, step_cache in enumerate(step_caches, start=first)
            ]
            first += len(request.net_input.passes)
        run.packed.show_to(captures)
        maps = maps_of_net(net.weights, run.packed, sample, run.hints, timesteps)
        for request, step_caches in zip(same, captures_by_row, strict=True):
            for step_cache in step_caches:
                step_cache.complete_refresh(request.row.timesteps[0])
            if step_caches:
                request.keep(step_caches)
        for number, (out, map) in enumerate(zip(net.outs, maps, strict=True)):
            yield (number,), [request.unbind() for request in out(map).split(counts)]

    def _packed(self, net: UnetControlNet, same: Sequence[NetRequest[UnetNetInput]]) -> _Run:
        key = (
            id(net),
            *[id(request.net_input) for request in same],
            *[request.cached is None for request in same],
        )
        if key not in self._runs:
            hints = [request.net_input.hint for request in same for _ in request.net_input.passes]
            sample, depth = same[0].row.base_input.sample, len(net.weights.down_blocks)
            height, width = sample.shape[1:]
            pass_inputs = list(chain.from_iterable(map(_net_inputs, same)))
            packed = PackedPasses(pass_inputs, (height, width), depth, sample.device)
            self._runs[key] = _Run(packed, torch.stack(hints))
        return self._runs[key]


def _seeing(net: UnetControlNet, request: NetRequest[UnetNetInput]) -> Sequence[NetStepCache]:
    """Return the step caches that capture the net's passes of a row; empty if nothing is kept."""
    row, last = request.row, request.last
    if not request.keeps:
        for step_cache in request.cached or ():
            step_cache.now = row.timesteps[0]
            step_cache.begin_loads(row.step)
        return ()
    step_caches: Sequence[NetStepCache]
    if last is None:
        schedule, ids = row.control.schedule, request.net_input.cached_ids
        step_caches = [
            row.control.place(NetStepCache(schedule, ids, net.levels), len(net.levels))
            for _ in request.net_input.passes
        ]
    else:
        step_caches = last.tokens
    reads = row.lookahead is not None
    for step_cache in step_caches:
        step_cache.begin_refresh(row.step, row.timesteps[0], 0, 0, reads=reads)
    return step_caches


def _net_inputs(request: NetRequest[UnetNetInput]) -> list[PassInput]:
    if request.cached is None:
        return list(request.net_input.passes)
    active, control = request.row.base_input.active, request.row.control
    return [
        replace(pass_input, active=active, cached=_CachedTokens(control, request.number, half))
        for half, pass_input in enumerate(request.net_input.passes)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class UnetNetRow:
    """A row of a ControlNet service, whose base runs in another process."""

    control: RowControl[UnetNetInput]
    active: Mapping[int, Ids] | None
    """Level → ids of the tokens that the base computes when it reads an entry; None: it
    reads none."""
    timesteps: Sequence[float]

    @classmethod
    def of(cls, opening: Opening, nets: Mapping[str, UnetControlNet]) -> UnetNetRow:
        """Build from `UnetAdapter.opening`, moved to the nets' device (`Opening.on`)."""
        message, arrays = opening.spec, opening.arrays
        texts = arrays["texts"]
        micro = [arrays[name] for name in ("micro.0", "micro.1") if name in arrays]
        inputs = [
            UnetNetInput.encode(
                opened.input, nets[opened.net], arrays[f"picture.{i}"], texts, micro
            )
            for i, opened in enumerate(message.controls)
        ]
        ids = [arrays[name].numpy() for name in sorted(arrays) if name.startswith("active.")]
        active = dict(enumerate(ids)) or None
        if active is not None:
            cached_ids = cached_ids_of(active, inputs[0].hint.shape[1:])
            device_ids = tuple(to_device(cached_ids, texts.device))
            inputs = [opened._replace(cached_ids=device_ids) for opened in inputs]
        passes = tuple([PassResiduals() for _ in texts])
        return cls(
            RowControl(tuple(inputs), message.schedule, passes=passes), active, message.timesteps
        )

    def at(
        self, step: int, sample: Tensor, computed: int, lookahead: int | None
    ) -> Controlled[UnetNetInput]:
        """See `NetRow`; `sample` is [channels, h, w]."""
        is_sparse = lookahead is None and computed < sample[0].numel()
        unet_sample = UnetSample(sample, self.active if is_sparse else None)
        control, at = self.control, step if lookahead is None else lookahead
        control = control if lookahead is None else control.for_lookahead
        timestep, steps = self.timesteps[at], len(self.timesteps)
        return controlled(control, unet_sample, timestep, step, steps, lookahead, adds=computed > 0)
