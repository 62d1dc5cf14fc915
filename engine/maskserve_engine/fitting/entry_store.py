"""The store of entries of a worker, built from its configuration and model."""

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
from maskserve_engine.cache.host_cache import HostMemory
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
from maskserve_engine.fitting.memory import host_row_bytes
from maskserve_engine.planning.cost_model import CostModel, Rates, estimate
from maskserve_engine.planning.cost_profile import read_profile
from maskserve_engine.planning.entry_bytes import FORMATS, EntryFormat
from maskserve_engine.spec.model_spec import anchor_stride
from maskserve_engine.stages.device_probe import Timer, device_rates, seconds_of
from maskserve_engine.stages.loader import device_of, dtype_of

_log = logging.getLogger(__name__)
_PADDING = 64
"""The reserve is longer than the budget by 1/64, because tensors in it are padded."""
_BUFFER_BYTES = 32 * 2**20
"""Bytes of a pinned buffer."""
_TRIAL_TOKENS, _TRIAL_WIDTH, _LEFT_OUT = 8192, 3072, 9
"""Trial of the links: tokens, their width, and that one of nine is left out, as at a mask ratio of
0.11.
"""
_IDS: NDArray[np.int64] = np.flatnonzero(np.arange(_TRIAL_TOKENS) % _LEFT_OUT)


def open_mover(config: Config) -> Mover:
    """Return the mover of entries to the denoiser's device. For a GPU, its two ways are measured:
    through pinned buffers, and, if the host tier is in memory and can be registered, directly.
    """
    device, cache = device_of(config), config.cache
    if device.type != "cuda":
        return HostMover()
    direct = cache.enabled and cache.register_host and on_tmpfs(cache.host_dir)
    mover = CudaMover(device, _BUFFER_BYTES, registrar=Registrar(device) if direct else None)
    if cache.enabled:
        mover.rates = measure_rates(mover, partial(seconds_of, device=device), direct=direct)
        _log.info("entries from host memory: %s", mover.rates.text())
    return mover


def measure_rates(mover: CudaMover, seconds: Timer, *, direct: bool) -> LinkRates:
    """Measure the rates of a mover's two ways; if a time is 0, the assumed rate stays.

    Args:
        mover: mover to time.
        seconds: returns how long one run of some work takes.
        direct: whether to measure the direct way, too. Its rate is 0 if the device refuses files.
    """
    part = encode(torch.ones(_TRIAL_TOKENS, _TRIAL_WIDTH), "int8")
    assumed = LinkRates(direct=0.0)
    gather_rate = moved_bytes_per_s(mover, part, seconds) or assumed.gathered
    if not direct:
        return LinkRates(gather_rate, 0.0)
    with memory_file(part.data.nbytes) as file:
        mover.register(file)
        if file.registered is None:
            return LinkRates(gather_rate, 0.0)
        data = FileTensor(file, 0, part.data.dtype, tuple(part.data.shape), part.data.nbytes)
        mover.rates = LinkRates(direct=math.inf)
        token_rate = moved_bytes_per_s(mover, StoredCoded(part.format, data, None, None), seconds)
    # The direct way carries the tokens that are left out, too.
    direct_rate = token_rate * _TRIAL_TOKENS / len(_IDS)
    return LinkRates(gather_rate, direct_rate or LinkRates().direct)


@contextmanager
def memory_file(nbytes: int) -> Iterator[OpenFile]:
    """Yield a file of zeros in memory, like those on a tmpfs."""
    descriptor = os.memfd_create("maskserve", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, nbytes)
        yield OpenFile(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def estimated_costs(
    config: Config, mover: Mover | None = None, rates: Rates | None = None
) -> CostModel:
    """Return the costs of steps and loads before this worker has measured any: those of the profile
    if there is one, otherwise estimates.

    Args:
        config: configuration of the worker.
        mover: mover with measured rates, of which loads are planned with the faster.
        rates: rates of the device; None: they are probed.
    """
    rates = rates or device_rates(config)
    if isinstance(mover, CudaMover) and config.cache.enabled:
        rates = replace(rates, link_bytes=mover.rates.best(len(_IDS) / _TRIAL_TOKENS))
    costs = estimate(rates)
    if not config.engine.costs:
        return costs
    profile = read_profile(config.engine.costs).costs
    if profile.device != costs.device:
        _log.warning(
            "[engine] costs: %s was measured on %s, and this is %s: its prices of steps are used "
            "until steps have been measured here",
            *(config.engine.costs, profile.device, costs.device),
        )
    return replace(profile, launch=costs.launch, loads={**costs.loads, **profile.loads})


def moved_bytes_per_s(mover: Mover, part: Coded | StoredCoded, seconds: Timer) -> float:
    """Return the bytes per second of tokens that arrive on the device when every ninth is left out,
    which is less than the link's rate; 0: the measured time was 0.

    Args:
        mover: mover to the device.
        part: int8 tensor, without a scale in a file.
        seconds: returns the seconds of one run of some work.
    """
    parts: Any = (part,)
    elapsed_s = seconds(lambda: mover.move(parts, _IDS).get())
    return len(_IDS) * _TRIAL_WIDTH / elapsed_s if elapsed_s > 0 else 0.0


def entry_format(config: Config) -> EntryFormat:
    name = config.cache.entry_format
    return FORMATS[str(dtype_of(config)).removeprefix("torch.") if name == "model" else name]


def template_layout(
    config: Config, adapter: Adapter, costs: CostModel
) -> tuple[Kinds, TemplateSize]:
    """Return the kind of entry that each block keeps, and the size of a square template of the
    model's native area.
    """
    spec, cache, model = adapter.spec, config.cache, config.model
    side = spec.native_resolution
    work = adapter.work(side // spec.vae_scale_factor, side // spec.vae_scale_factor)
    fmt = entry_format(config)
    halves, text = adapter.entry_halves, spec.text_tokens(model.max_sequence_length)
    kinds = choose_kinds(cache.entry_kind, work, fmt, costs, text, halves)
    tokens = (side // spec.token_pixels) ** 2
    stride = anchor_stride(cache.stride, spec)
    anchors = adapter.anchors(tokens, spec.steps_default(model.num_inference_steps), stride)
    return kinds, template_size(work, kinds, fmt, len(anchors), side, halves)


def open_store(
    config: Config, size: TemplateSize, costs: CostModel, budget: int, mover: Mover
) -> Store:
    """Open the tiers of `[cache]`, and a loader for the device.

    Args:
        config: configuration of the worker.
        size: size of a template.
        costs: cost model of the worker.
        budget: bytes of the device tier; 0: entries are in files only.
        mover: mover of entries to the device.

    Raises:
        ConfigError: a budget is too small for one template, or a folder cannot be written.
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
            below = rebuild_from(tier, costs, below)
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
        rows=HostMemory(host_row_bytes() if isinstance(mover, CudaMover) else 0),
    )


def open_reserve(mover: Mover, budget: int) -> Reserve | None:
    """Reserve the GPU memory of the cache; None: entries lie in host memory.

    Raises:
        ConfigError: the device does not have so much.
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
    """Do nothing: a file on a disk is not memory, which alone can be registered."""


def rebuild_from(tier: Tier, costs: CostModel, otherwise: Rebuild) -> Rebuild:
    """Return the function that gives the seconds to get an evicted template back: those of a load
    from `tier` if it has the entries, otherwise those of `otherwise`.
    """

    def seconds(key: str, entry: TierEntry) -> float:
        if set(entry.anchors) <= tier.anchors(key):
            return costs.load_seconds(tier.name, entry.nbytes)
        return otherwise(key, entry)

    return seconds
