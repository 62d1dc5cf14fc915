"""A UNet of true width with random weights, and synthetic rows and entries for it.

Rows are one pass each: classifier-free guidance doubles dense and cached steps alike. Masks are
squares, because scattered tokens would touch nearly all tokens of the coarser levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ControlNetModel, EulerDiscreteScheduler, UNet2DConditionModel

from maskserve_benchmarks.published_models import SD21, SDXL
from maskserve_benchmarks.steps.replay import in_memory, refreshed_every
from maskserve_benchmarks.timing import Timer
from maskserve_common.contracts.keys import Anchor
from maskserve_engine.base.job import ControlInput
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.batch.step_cache import RefreshSchedule, StepCacheReader
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.entries import AnchorEntry, BlockEntry, encode
from maskserve_engine.families.control import RowControl
from maskserve_engine.families.unet.batch import UnetBatch
from maskserve_engine.families.unet.conditioning import UnetTemplate
from maskserve_engine.families.unet.control import (
    UnetControlNet,
    UnetNetInput,
)
from maskserve_engine.families.unet.forward import PassInput, added_embedding, micro_conditioning
from maskserve_engine.families.unet.rows import Guidance, UnetInactive, UnetPrompt, UnetRow
from maskserve_engine.families.unet.sampler import NoiseLevels, UnetSchedule
from maskserve_engine.families.unet.spec import unet_work
from maskserve_engine.families.unet.tokens import ActiveTokens
from maskserve_engine.families.unet.weights import UnetWeights, places_of
from maskserve_engine.layers.low_rank import Factors, LowRankSet, low_rank_set
from maskserve_engine.planning.flops import RowTokens

SDXL_NARROW: dict[str, Any] = {
    **SDXL,
    "sample_size": 48,
    "block_out_channels": (96, 192, 384),
    "attention_head_dim": (3, 6, 12),
}
"""SDXL's stages at 0.3 of their width, for pictures of 384 pixels."""
UNETS: dict[str, dict[str, Any]] = {
    "sdxl-1024": SDXL,
    "sd21-768": SD21,
    "sdxl-narrow": SDXL_NARROW,
    "sdxl-narrow-512": {**SDXL_NARROW, "sample_size": 64},
}
TEXT = 77


class UnetBench:
    """A UNet and synthetic rows of it; the counterpart of `step_rig.Bench`.

    Args:
        preset: a key of UNETS.
        dtype: dtype of weights, activations and entries in model format.
        device: device that runs it.
        format: storage format of entries.
        halo: `[cache] conv_halo`.
        model: a model of `preset`; None: make one.
        steps: number of steps of each row, after which it starts again.
        sampler: a sampler of diffusers; None: SDXL's.
    """

    def __init__(
        self,
        preset: str,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
        halo: int = 0,
        model: Any = None,
        steps: int = 1,
        sampler: Any = None,
    ) -> None:
        self.device, self.dtype, self.format, self.steps = device, dtype, format, steps
        config = UNETS[preset]
        self.model = model or build_unet(preset, dtype, device)
        self.weights = UnetWeights.of(self.model)
        self.side = int(config["sample_size"])
        self.work = unet_work(config, self.side, self.side, guidance=False, halo=halo)
        self.blocks = len(self.work.blocks)
        self.refresh_maps = unet_work(config, self.side, self.side, guidance=False, halo=1).maps
        self.entry = AnchorEntry(Anchor(0.5, 500.0), ())
        self.batch: UnetBatch | None = None
        sampler = sampler or EulerDiscreteScheduler()
        self.levels = NoiseLevels(sampler)
        self.schedule = UnetSchedule(sampler, self.levels, 1 + steps)
        self.buckets = False
        """Whether tiles have the sizes of recorded steps."""

    def fill_entry(self, kind: str) -> None:
        """Fill in random entries of one template for all blocks: `kv`, `project` (hidden) or
        `both`.
        """
        blocks = []
        for number, block in enumerate(self.work.blocks):
            shape = self.work.tokens[block.level], block.width

            def coded(shape: tuple[int, int] = shape) -> Any:
                return encode(self._random(*shape), self.format)

            hidden = coded() if kind in ("project", "both") else None
            keys, values = (coded(), coded()) if kind in ("kv", "both") else (None, None)
            end = coded() if number in self.work.ends else None
            blocks.append(BlockEntry(hidden, keys, values, end))
        maps = self.work.maps
        for feature_map in maps:
            positions = self._random(self.work.tokens[feature_map.level], feature_map.width)
            blocks.append(BlockEntry(map=encode(positions, self.format)))
        if maps:
            moments = torch.zeros(len(maps), 2 * maps[0].groups, device=self.device)
            moments[:, maps[0].groups :] = 1.0
            blocks.append(BlockEntry(map=encode(moments, "model")))
        self.entry = AnchorEntry(Anchor(0.5, 500.0), tuple(blocks))

    def row(
        self,
        mask_ratio: float | None,
        seed: int,
        *,
        guided: bool = False,
        schedule: RefreshSchedule | None = None,
    ) -> UnetRow:
        """Return a dense row (None), or a cached one whose mask is a square of that share.

        Args:
            mask_ratio: mask ratio; None: a dense row.
            seed: names the row.
            guided: whether it takes a second pass.
            schedule: its refresh schedule, if it reads no entry; `anchor` takes the refresh steps.
        """
        channels, side = 4, self.side
        added = None
        if self.model.config.addition_embed_type:
            sizes = torch.tensor([1024, 1024, 0, 0, 1024, 1024], device=self.device)
            with torch.inference_mode():
                micro = micro_conditioning(self.model, self._random(1280), sizes.to(self.dtype))
                added = added_embedding(self.model, micro)
        latents = self._random(channels, side, side)
        inactive = None
        if mask_ratio is not None:
            active = self._active(mask_ratio)
            template = UnetTemplate(latents, self._random(channels, side, side), None, self.levels)
            mask = torch.from_numpy(self._mask(mask_ratio)[None] > 0)
            inactive = UnetInactive(
                active=active.levels,
                mask=mask.to(self.device),
                template=template,
                selection=active.selection(self.work, 1),
                tile=moved(active.tile if schedule is None else active.refresh_tile, self.device),
                maps=range(self.blocks, self.blocks + len(self.work.maps)),
                feature_maps=self.work.maps if schedule is None else self.refresh_maps,
            )
        prompt = UnetPrompt(self._random(TEXT, self.model.config.cross_attention_dim), added)
        row = UnetRow(
            request_id=str(seed),
            schedule=self.schedule,
            noise_levels=self.levels,
            prompt=prompt,
            guidance=Guidance(prompt, 7.5) if guided else None,
            state=self.schedule.state(latents),
            condition=None,
            blend=None,
            inactive=inactive,
            refresh_schedule=schedule,
        )
        if inactive is not None and schedule is None:
            whole = self.device.type == "cuda"
            row.entry = in_memory(self.entry, inactive.selection, whole=whole)
        return row

    def anchor(self, rows: Sequence[UnetRow], kind: str) -> None:
        """Take two refresh steps of rows that have them; the rows' next steps are between refresh
        steps.
        """
        for _ in range(2):
            self.step(rows, kind)
        self.turn_between(rows)

    def turn_between(self, rows: Sequence[UnetRow]) -> None:
        """Make the next steps of rows, which have taken a refresh step, steps between refresh
        steps.
        """
        for row in rows:
            row.entry = StepCacheReader(row, self.blocks).entry_at(row.step)

    def lora(self, rank: int) -> LowRankSet:
        """Return a random LoRA on every layer that a LoRA may change, including convolutions."""
        places = places_of(self.model)
        factors = {
            name: Factors(self._random(rank, *inner), self._random(out, rank, *[1] * len(side)))
            for name, place in places.items()
            for out, *inner in [place.shape]
            for side in [inner[1:]]
        }
        return low_rank_set(factors, places, self.device, self.dtype)

    def net(self) -> UnetControlNet:
        """Return a ControlNetModel that starts as a copy of the model."""
        net = ControlNetModel.from_unet(self.model).to(self.device, self.dtype)
        return UnetControlNet.of(net.eval().requires_grad_(False), self.model, 4)

    def control(self, row: UnetRow, net: UnetControlNet, refresh: int) -> None:
        """Give a row a ControlNet with the features of a random control picture."""
        control_input = ControlInput("net", np.zeros((0, 0, 3), np.uint8))
        hint = self._random(self.model.config.block_out_channels[0], self.side, self.side)
        net_input = UnetNetInput(
            control_input, net, hint, (PassInput(row.prompt.text, row.prompt.added),)
        )
        cached_ids: list[torch.Tensor] = []
        if row.inactive is not None:
            cached_ids = [
                torch.from_numpy(np.setdiff1d(np.arange(count), row.inactive.active[level]))
                for level, count in enumerate(self.work.tokens)
            ]
        device_ids = tuple([ids.to(self.device) for ids in cached_ids])
        row.control = RowControl(
            (net_input._replace(cached_ids=device_ids),), refreshed_every(refresh, self.steps)
        )

    def step(self, rows: Sequence[UnetRow], kind: str, exchange: Exchange | None = None) -> None:
        """Take one step of a batch as the engine does; `kind` holds for all blocks."""
        with torch.inference_mode():
            for row in rows:
                row.step %= self.steps
            self.batch = UnetBatch.of(rows, self.batch)
            self.batch.step(self.weights, (kind,) * self.blocks, exchange)

    def convolutions_ms(self, timer: Timer, rows: Sequence[UnetRow], kind: str) -> float:
        """Return the milliseconds that a step spends in convolutions."""
        spent = 0.0

        def timed(*args: Any) -> torch.Tensor:
            nonlocal spent
            out: list[torch.Tensor] = []
            spent += timer.ms(lambda: out.append(convolve(*args)))
            return out[0]

        convolve, F.conv2d = F.conv2d, timed  # type: ignore[assignment]
        try:
            self.step(rows, kind)
        finally:
            F.conv2d = convolve
        return spent

    def limit(self, ratios: Sequence[float], kind: str) -> float:
        """Return dense FLOPs over cached FLOPs of a batch with these masks, with the tokens
        unrounded.
        """
        cached = [self.tokens(m) for m in ratios]
        return self.work.step_flops(cached, "dense") / self.work.step_flops(cached, kind)

    def tokens(self, ratio: float) -> RowTokens:
        """Return the tokens that a row of that mask ratio computes."""
        return self._active(ratio).row(TEXT)

    def _active(self, ratio: float) -> ActiveTokens:
        levels = len(self.work.tokens)
        return ActiveTokens.of(
            self._mask(ratio), 1, levels, ring=0, halo=self.work.halo, buckets=self.buckets
        )

    def _mask(self, ratio: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a square mask of that share of the picture, in its middle."""
        mask = np.zeros((self.side, self.side), np.uint8)
        side = max(1, round(math.sqrt(ratio) * self.side))
        begin = (self.side - side) // 2
        mask[begin : begin + side, begin : begin + side] = 255
        return mask

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)


def build_unet(preset: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the preset's UNet with random weights."""
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return UNet2DConditionModel(**UNETS[preset]).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(previous_dtype)
