"""Sizes of templates, and how many of them the tiers hold."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maskserve_common.config import CacheConfig, ConfigError
from maskserve_common.contracts.tiers import DEVICE, HOST, TIERS
from maskserve_engine.cache.stored_tier import SUFFIX
from maskserve_engine.planning.cost_model import CostModel
from maskserve_engine.planning.entry_bytes import (
    EntryFormat,
    block_bytes,
    still_bytes,
    stored_bytes,
)
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.planner import plan
from maskserve_engine.planning.two_stream import step_costs

_log = logging.getLogger(__name__)
Kinds = tuple[frozenset[str], ...]
"""Kinds that priming keeps of each block: any of "h" and "kv"."""

_PARTS_OF = {"kv": frozenset({"kv"}), "h": frozenset({"h"}), "both": frozenset({"h", "kv"})}
_TYPICAL = 0.2
"""Mask ratio for which `auto` chooses the kinds."""
_FILES_SHARE = 0.5
_GIB = 2**30


def choose_kinds(
    setting: str,
    work: ModelWork,
    fmt: EntryFormat,
    costs: CostModel,
    text: float,
    halves: int = 1,
) -> Kinds:
    """Choose the activations that are kept of each block.

    Args:
        setting: value of `[cache] entry_kind`.
        work: counted work of the model at its native size.
        fmt: storage format.
        costs: cost model of the worker.
        text: number of prompt tokens.
        halves: entries kept per token (`Adapter.entry_halves`).
    """
    if setting in _PARTS_OF:
        return _of_use(work, (_PARTS_OF[setting],) * len(work.blocks))
    row = work.row_at(_TYPICAL, text)
    spare = tuple(total - active for total, active in zip(work.tokens, row.active, strict=True))
    loads = {HOST.name: block_bytes(work, [spare], fmt, copies=halves)}
    best = plan(step_costs(work, work.totals([row]), costs, loads))
    # A computed block restores its hidden states, if anything.
    return _of_use(work, tuple(_PARTS_OF["kv" if kind == "kv" else "h"] for kind in best.kinds))


def _of_use(work: ModelWork, kinds: Kinds) -> Kinds:
    """Remove the hidden states of blocks that begin a UNet's stack: the convolutions before it
    compute these at every step.
    """
    if not work.restore_ends:
        return kinds
    begin = set(work.starts.tolist())
    return tuple(parts - {"h"} if i in begin else parts for i, parts in enumerate(kinds))


@dataclass(frozen=True, slots=True)
class TemplateSize:
    """Bytes of a template at the model's native size."""

    side: int
    """Width and height in pixels."""
    anchors: int
    anchor_bytes: int
    still_bytes: int = 0
    """Once for all anchors (`keys.STILL`)."""

    @property
    def nbytes(self) -> int:
        return self.anchors * self.anchor_bytes + self.still_bytes

    @property
    def step_bytes(self) -> int:
        return self.anchor_bytes + self.still_bytes

    def in_words(self, unit: int) -> str:
        """Describe the entries; `unit` divides sizes in bytes."""
        digits = 0 if unit == 1 else 3
        entries = f"{self.anchors} entries of {self.anchor_bytes / unit:.{digits}f}"
        shared_text = f", {self.still_bytes / unit:.{digits}f} once" if self.still_bytes else ""
        return entries + shared_text


def template_size(
    work: ModelWork, kinds: Kinds, fmt: EntryFormat, anchors: int, side: int, halves: int = 1
) -> TemplateSize:
    anchor_bytes = stored_bytes(work, kinds, fmt, copies=halves)
    fixed_bytes = still_bytes(work, fmt)
    return TemplateSize(side, anchors, int(anchor_bytes), int(fixed_bytes))


def folder_budget(configured: int, folder: str) -> int:
    """Return the bytes of a tier in files: as configured, or a share of the free space, where the
    tier's own files count as free.
    """
    if configured:
        return configured
    Path(folder).mkdir(parents=True, exist_ok=True)
    used_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*" + SUFFIX))
    return int(_FILES_SHARE * (shutil.disk_usage(folder).free + used_bytes))


def check_sizes(
    config: CacheConfig, size: TemplateSize, budgets: Sequence[tuple[str, int]]
) -> None:
    """Describe the size of a template and how many fit.

    Args:
        config: `[cache]`.
        size: size of a template.
        budgets: (tier, bytes), the device's first.

    Raises:
        ConfigError: a configured budget has no room for one template.
    """
    for tier, budget in budgets:
        name = TIERS[tier].budget
        configured_bytes = getattr(config, name)
        # With files behind it the device only needs the entries that a row reads at a time.
        least = size.step_bytes if tier == DEVICE.name and len(budgets) > 1 else size.nbytes
        if configured_bytes and budget < least:
            raise ConfigError(
                f"[cache] {name}: {configured_bytes} bytes cannot hold one template of "
                f"{size.side}x{size.side} pixels, which takes {size.nbytes} bytes "
                f"({size.in_words(1)}); give at least {least}, "
                "0 for a share of what is free, or set [cache] enabled = false"
            )
    fits = ", ".join(
        f"{tier} {budget / _GIB:.2f} GiB: {budget // size.nbytes} templates"
        for tier, budget in budgets
    )
    _log.info(
        "cache: a template of %dx%d pixels takes %.3f GiB (%s GiB); %s",
        size.side,
        size.side,
        size.nbytes / _GIB,
        size.in_words(_GIB),
        fits,
    )
