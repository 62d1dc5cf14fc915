"""What the device's memory goes to, counted before it is taken, and what that leaves the cache."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from maskserve_core.config import Config, beside_denoiser
from maskserve_core.contracts.memory_table import MemoryTable
from maskserve_core.models.facts import ModelFacts
from maskserve_core.planning.flops import ModelWork
from maskserve_core.worker.liveness import signed_in
from maskserve_engine.cache.sizing import TemplateSize
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.stages.loader import device_of, dtype_of

_PARTS = {"encoder": ("vae", "text_encoder", "text_encoder_2"), "decoder": ("vae",)}
_GPU_SHARE, _CPU_SHARE = 0.8, 0.25
"""Of what is left, the cache's. On a GPU kernels want workspace and the allocator leaves gaps; a
host's memory is not this worker's alone.
"""
_PICTURE = 3
"""Channels of an image."""
Stage = Literal["encoder", "decoder"]


def memory_table(config: Config, adapter: Adapter, size: TemplateSize) -> MemoryTable:
    """Of the denoiser's device, once its weights are there.

    Args:
        config: of the worker.
        adapter: the model.
        size: of a template.
    """
    device = device_of(config)
    total, free = device_memory(device)
    step = step_bytes(config, adapter) + size.anchor_bytes
    if config.cache.enabled and adapter.facts.keeps_decoded:
        step += config.cache.placed_bytes
    here: dict[Stage, int] = {}
    adapters = config.adapters.device_bytes if config.adapters.store else 0
    controls = config.controls.device_bytes if config.controls.folder else 0
    coming = step + adapters + controls
    for stage in ("encoder", "decoder"):
        own = beside_denoiser(config, stage)
        if device_of(own) != device:
            here[stage] = 0
            continue
        weights, work = weight_bytes(own, stage), image_bytes(own, stage, adapter.facts)
        here[stage] = weights + work
        coming += work if _is_loaded(config, stage) else weights + work
    cache = 0
    if config.cache.enabled:
        share = _GPU_SHARE if device.type == "cuda" else _CPU_SHARE
        cache = config.cache.budget_bytes or int(share * max(0, free - coming))
    left = free - coming - cache
    taken = adapter.weight_bytes + sum(here.values()) + step + adapters + controls + cache + left
    return MemoryTable(
        device=_name(device),
        total=total,
        weights=adapter.weight_bytes,
        encoder=here["encoder"],
        decoder=here["decoder"],
        step=step,
        cache=cache,
        others=max(0, total - taken),  # mapped files count as free though they are weights
        left=left,
        rows=config.engine.max_rows,
        template=size.nbytes,
        adapters=adapters,
        controls=controls,
    )


def step_bytes(config: Config, adapter: Adapter) -> int:
    """What the largest step takes beside weights and entries: `max_rows` dense rows of the model's
    native size, each with a negative prompt where the model takes one.
    """
    facts = adapter.facts
    side = facts.native_resolution // facts.vae_scale_factor
    passes = config.engine.max_rows * (2 if facts.two_passes else 1)
    text = facts.text_tokens(config.model.max_sequence_length)
    return peak_values(adapter.work(side, side), passes, text) * dtype_of(config).itemsize


def peak_values(work: ModelWork, passes: int, text: int) -> int:
    """Numbers that a dense step of so many passes holds at once."""
    return int(passes * (work.peak_row + text * work.peak_text))


def weight_bytes(config: Config, stage: Stage) -> int:
    """Of the parts of the model folder that a stage loads, in the dtype that it loads them in."""
    folders = [Path(config.model.path) / part for part in _PARTS[stage]]
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    return sum(map(_numbers, files)) * dtype_of(config).itemsize


def image_bytes(config: Config, stage: Stage, facts: ModelFacts) -> int:
    """What the VAE takes beside its weights for one image of the model's native size: in its layers
    of full resolution, where a ResNet holds what its level and it itself were given and three
    tensors of its output's size.
    """
    channels = facts.latents.widths
    if not channels:
        return 0
    last, before = channels[0], channels[min(1, len(channels) - 1)]
    held = 5 * last if stage == "encoder" else before + max(2 * before, 3 * last)
    return (held + _PICTURE) * facts.native_resolution**2 * dtype_of(config).itemsize


def device_memory(device: torch.device) -> tuple[int, int]:
    """(all, free) bytes; for the CPU what the host has and can give without swapping."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    host = psutil.virtual_memory()
    return int(host.total), int(host.available)


def _numbers(file: Path) -> int:
    """Numbers in a file of the safetensors format, whose header says all shapes."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")


def _is_loaded(config: Config, stage: Stage) -> bool:
    folder = config.runtime_dir
    return bool(folder) and any(model == stage for model, _ in signed_in(folder))


def _name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
