"""The store of a worker, as its configuration and model say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from maskserve_core.config import Config, ConfigError
from maskserve_core.models.facts import anchor_stride
from maskserve_core.planning.cost_model import CostModel, estimate
from maskserve_core.planning.entry_bytes import FORMATS, EntryFormat
from maskserve_engine.cache.entries import encode
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import CudaMover, HostMover, Loader, Mover
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.sizing import (
    Kinds,
    TemplateSize,
    check_sizes,
    choose_kinds,
    folder_budget,
    template_size,
)
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Held, Rebuild, Tier, computed_anew
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.stages.device_probe import Timer, device_rates, seconds_of
from maskserve_engine.stages.loader import device_of, dtype_of

_BUFFER = 32 * 2**20
"""Bytes of one pinned buffer."""
_TRIED, _WIDTH, _LEFT_OUT = 8192, 3072, 9
"""Tokens whose way to the device is tried, their numbers, and which of them stay: one in so many,
as at a mask ratio of 0.11."""


def estimated_costs(config: Config) -> CostModel:
    """What steps and loads cost before any was measured. The way of entries to a GPU is tried, as
    the loader takes it.
    """
    rates, device = device_rates(config), device_of(config)
    if device.type == "cuda" and config.cache.enabled:
        tried = moved_per_s(CudaMover(device, _BUFFER), partial(seconds_of, device=device))
        rates = replace(rates, link_bytes=tried or rates.link_bytes)
    return estimate(rates)


def moved_per_s(mover: Mover, seconds: Timer) -> float:
    """Bytes per second of tokens that are gathered in host memory and brought to the device: less
    than its link alone does. 0 if the time says nothing.

    Args:
        mover: to the device.
        seconds: how long one run of some work takes.
    """
    part = encode(torch.ones(_TRIED, _WIDTH), "int8")
    ids = np.flatnonzero(np.arange(_TRIED) % _LEFT_OUT)
    took = seconds(lambda: mover.move((part,), ids).get())
    return len(ids) * _WIDTH / took if took > 0 else 0.0


def entry_format(config: Config) -> EntryFormat:
    name = config.cache.entry_format
    return FORMATS[str(dtype_of(config)).removeprefix("torch.") if name == "model" else name]


def sized(config: Config, adapter: Adapter, costs: CostModel) -> tuple[Kinds, TemplateSize]:
    """(per block what is kept, the size of a square template of the model's native area)."""
    facts, cache, model = adapter.facts, config.cache, config.model
    side = facts.native_resolution
    work = adapter.work(side // facts.vae_scale_factor, side // facts.vae_scale_factor)
    fmt = entry_format(config)
    halves, text = adapter.entry_halves, facts.text_tokens(model.max_sequence_length)
    kinds = choose_kinds(cache.entry_kind, work, fmt, costs, text, halves)
    tokens = (side // facts.token_pixels) ** 2
    stride = anchor_stride(cache.stride, facts)
    anchors = adapter.anchors(tokens, facts.steps_default(model.num_inference_steps), stride)
    return kinds, template_size(work, kinds, fmt, len(anchors), side, halves)


def open_store(config: Config, size: TemplateSize, costs: CostModel, budget: int) -> Store:
    """The tiers that `[cache]` names, and a loader for the device.

    Args:
        config: of the worker.
        size: of a template.
        costs: of the worker.
        budget: bytes of the device; 0: entries are in files only.

    Raises:
        ConfigError: a budget cannot hold one template, or a folder cannot be written to.
    """
    cache, device = config.cache, device_of(config)
    budgets = [("device", budget)] if budget else []
    places = [
        ("host", cache.host_dir, cache.host_bytes),
        ("disk", cache.disk_dir, cache.disk_bytes),
    ]
    folders: list[FolderTier] = []
    remote = None
    below: Rebuild = computed_anew
    if cache.enabled and cache.remote_url:
        remote = RemoteTier(cache.remote_url, cache.remote_bytes)
    for name, folder, configured in reversed(places):
        if cache.enabled and folder:
            try:
                tier = FolderTier(name, folder, folder_budget(configured, folder), below)
            except OSError as error:
                why = f"{folder} cannot be used: {error.strerror}"
                raise ConfigError(f"[cache] {name}_dir: {why}") from error
            below = fetched_from(tier, costs, below)
            folders.insert(0, tier)
            budgets.insert(1 if budget else 0, (name, tier.budget_bytes))
    if cache.enabled:
        check_sizes(cache, size, budgets)
    mover: Mover = CudaMover(device, _BUFFER) if device.type == "cuda" else HostMover()
    return Store(
        MemoryTier(budget, below),
        folders,
        remote,
        Loader(mover),
        patience_s=cache.remote_patience_s,
    )


def fetched_from(tier: Tier, costs: CostModel, otherwise: Rebuild) -> Rebuild:
    """Seconds to have a template again where `tier` lies below."""

    def seconds(key: str, held: Held) -> float:
        if set(held.anchors) <= tier.anchors(key):
            return costs.load_seconds(tier.name, held.nbytes)
        return otherwise(key, held)

    return seconds
