"""Builds a worker's store from its configuration and model."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maskserve_common.config import Config, ConfigError
from maskserve_common.contracts.tiers import DEVICE, TIERS
from maskserve_engine.cache.entries import Coded, encode
from maskserve_engine.cache.entry_file import FileTensor, OpenFile, StoredCoded
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import CudaMover, HostMover, LinkRates, Loader, Mover
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.registered import Registrar, on_tmpfs
from maskserve_engine.cache.remote_tier import RemoteTier
from maskserve_engine.cache.reserve import Reserve
from maskserve_engine.cache.sizing import (
    Kinds,
    TemplateSize,
    check_sizes,
    choose_kinds,
    folder_budget,
    template_size,
)
from maskserve_engine.cache.store import Store
from maskserve_engine.cache.tier import Rebuild, Tier, TierEntry, computed_anew
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.planning.cost_model import CostModel, Rates, estimate
from maskserve_engine.planning.cost_profile import read_profile
from maskserve_engine.planning.entry_bytes import FORMATS, EntryFormat
from maskserve_engine.spec.model_spec import anchor_stride
from maskserve_engine.stages.device_probe import Timer, device_rates, seconds_of
from maskserve_engine.stages.loader import device_of, dtype_of

_log = logging.getLogger(__name__)
_PADDING = 64
"""The reserve is longer than the budget by one part in so many, as tensors in it are padded."""
_BUFFER = 32 * 2**20
"""Bytes of one pinned buffer."""
_TRIED, _WIDTH, _LEFT_OUT = 8192, 3072, 9
"""Trial of the links: tokens, their width, and the reciprocal share of tokens left out, as at a
mask ratio of 0.11.
"""
_IDS: NDArray[np.int64] = np.flatnonzero(np.arange(_TRIED) % _LEFT_OUT)


def open_mover(config: Config) -> Mover:
    """Build the mover of entries to the denoiser's device. On a GPU both ways are measured; it
    reads a host tier in memory by itself if it can.
    """
    device, cache = device_of(config), config.cache
    if device.type != "cuda":
        return HostMover()
    direct = cache.enabled and cache.register_host and on_tmpfs(cache.host_dir)
    mover = CudaMover(device, _BUFFER, registrar=Registrar(device) if direct else None)
    if cache.enabled:
        mover.rates = tried_rates(mover, partial(seconds_of, device=device), direct=direct)
        _log.info("entries from host memory: %s", mover.rates.text())
    return mover


def tried_rates(mover: CudaMover, seconds: Timer, *, direct: bool) -> LinkRates:
    """Measure the rates of a mover's two ways; a rate stays as assumed where timing fails.

    Args:
        mover: mover to time.
        seconds: returns how long one run of some work takes.
        direct: whether to try the direct way too. Its rate is 0 where the device refuses files.
    """
    part = encode(torch.ones(_TRIED, _WIDTH), "int8")
    assumed = LinkRates(direct=0.0)
    gathered = moved_per_s(mover, part, seconds) or assumed.gathered
    if not direct:
        return LinkRates(gathered, 0.0)
    with memory_file(part.data.nbytes) as file:
        mover.register(file)
        if file.registered is None:
            return LinkRates(gathered, 0.0)
        data = FileTensor(file, 0, part.data.dtype, tuple(part.data.shape), part.data.nbytes)
        mover.rates = LinkRates(direct=math.inf)
        reached = moved_per_s(mover, StoredCoded(part.format, data, None, None), seconds)
    whole = reached * _TRIED / len(_IDS)
    return LinkRates(gathered, whole or LinkRates().direct)


@contextmanager
def memory_file(nbytes: int) -> Iterator[OpenFile]:
    """A file of zeros that is memory, as those on a tmpfs are."""
    descriptor = os.memfd_create("maskserve", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, nbytes)
        yield OpenFile(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def estimated_costs(
    config: Config, mover: Mover | None = None, rates: Rates | None = None
) -> CostModel:
    """Return the costs of steps and loads before this worker has measured any: profiled, if there
    is a profile, or estimated.

    Args:
        config: configuration of the worker.
        mover: mover whose ways to a GPU were timed: loads are planned at the faster rate.
        rates: rates of the device; None: they are probed.
    """
    rates = rates or device_rates(config)
    if isinstance(mover, CudaMover) and config.cache.enabled:
        rates = replace(rates, link_bytes=mover.rates.best(len(_IDS) / _TRIED))
    costs = estimate(rates)
    if not config.engine.costs:
        return costs
    profile = read_profile(config.engine.costs).costs
    if profile.device != costs.device:
        _log.warning(
            "[engine] costs: %s was measured on %s, and this is %s: steps are priced as there "
            "until they have been measured here",
            *(config.engine.costs, profile.device, costs.device),
        )
    return replace(profile, launch=costs.launch, loads={**costs.loads, **profile.loads})


def moved_per_s(mover: Mover, part: Coded | StoredCoded, seconds: Timer) -> float:
    """Return the bytes per second of tokens that are moved to the device, with one in nine left
    out: less than the link's rate. 0 if the measured time is 0.

    Args:
        mover: mover to the device.
        part: int8 tensor, without a scale in a file.
        seconds: returns the seconds of one run of some work.
    """
    parts: Any = (part,)
    took = seconds(lambda: mover.move(parts, _IDS).get())
    return len(_IDS) * _WIDTH / took if took > 0 else 0.0


def entry_format(config: Config) -> EntryFormat:
    name = config.cache.entry_format
    return FORMATS[str(dtype_of(config)).removeprefix("torch.") if name == "model" else name]


def sized(config: Config, adapter: Adapter, costs: CostModel) -> tuple[Kinds, TemplateSize]:
    """(per block what is kept, the size of a square template of the model's native area)."""
    facts, cache, model = adapter.spec, config.cache, config.model
    side = facts.native_resolution
    work = adapter.work(side // facts.vae_scale_factor, side // facts.vae_scale_factor)
    fmt = entry_format(config)
    halves, text = adapter.entry_halves, facts.text_tokens(model.max_sequence_length)
    kinds = choose_kinds(cache.entry_kind, work, fmt, costs, text, halves)
    tokens = (side // facts.token_pixels) ** 2
    stride = anchor_stride(cache.stride, facts)
    anchors = adapter.anchors(tokens, facts.steps_default(model.num_inference_steps), stride)
    return kinds, template_size(work, kinds, fmt, len(anchors), side, halves)


def open_store(
    config: Config, size: TemplateSize, costs: CostModel, budget: int, mover: Mover
) -> Store:
    """Open the tiers of `[cache]`, and a loader for the device.

    Args:
        config: configuration of the worker.
        size: size of a template.
        costs: cost model of the worker.
        budget: bytes of the device; 0: entries are in files only.
        mover: mover of entries to the device.

    Raises:
        ConfigError: a budget cannot hold one template, or a folder cannot be written to.
    """
    cache = config.cache
    budgets = [(DEVICE.name, budget)] if budget else []
    folders: list[FolderTier] = []
    remote = None
    below: Rebuild = computed_anew
    if cache.enabled and cache.remote_url:
        remote = RemoteTier(cache.remote_url, cache.remote_bytes)
    for place in reversed(TIERS.values()):
        folder = getattr(cache, place.folder) if place.folder and cache.enabled else ""
        if folder:
            try:
                whole = folder_budget(getattr(cache, place.budget), folder)
                register = mover.register if place.memory else _not_registered
                tier = FolderTier(place.name, folder, whole, below, opened=register)
            except OSError as error:
                why = f"{folder} cannot be used: {error.strerror}"
                raise ConfigError(f"[cache] {place.folder}: {why}") from error
            below = fetched_from(tier, costs, below)
            folders.insert(0, tier)
            budgets.insert(1 if budget else 0, (place.name, tier.budget_bytes))
    if cache.enabled:
        check_sizes(cache, size, budgets)
    return Store(
        MemoryTier(budget, below),
        folders,
        remote,
        Loader(mover),
        patience_s=cache.remote_patience_s,
        reserve=open_reserve(mover, budget),
    )


def open_reserve(mover: Mover, budget: int) -> Reserve | None:
    """Return the GPU memory that the cache may take; None: the memory is the host's.

    Raises:
        ConfigError: the device does not have it.
    """
    if not isinstance(mover, CudaMover) or not budget:
        return None
    try:
        return Reserve(budget + budget // _PADDING, mover.device, mover.stream)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"[cache] budget_bytes: {mover.device} does not have {budget} bytes in one piece; "
            "give less"
        ) from error


def _not_registered(file: OpenFile) -> None:
    """Refuse to register: files on a disk are not memory."""


def fetched_from(tier: Tier, costs: CostModel, otherwise: Rebuild) -> Rebuild:
    """Seconds to have a template again where `tier` lies below."""

    def seconds(key: str, entry: TierEntry) -> float:
        if set(entry.anchors) <= tier.anchors(key):
            return costs.load_seconds(tier.name, entry.nbytes)
        return otherwise(key, entry)

    return seconds
