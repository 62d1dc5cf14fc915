"""The tiers of the template cache: where entries lie, from near to far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheTier:
    """A place for entries."""

    name: str
    budget: str
    """Key of `[cache]` with its bytes."""
    folder: str = ""
    """Key of `[cache]` with its folder; empty: it has none."""
    read_by_steps: bool = False
    """Whether steps load entries from it; from others they are fetched to a nearer one first."""
    memory: bool = False
    """Whether it is memory of this host, which a GPU may read by itself."""
    gbytes: float | None = None
    """GB/s of reads without a measurement; None: those of the device's link."""
    wait: float = 0.0
    """Seconds of latency of each read."""


DEVICE = CacheTier("device", "budget_bytes", read_by_steps=True, gbytes=float("inf"))
HOST = CacheTier("host", "host_bytes", "host_dir", read_by_steps=True, memory=True)
DISK = CacheTier("disk", "disk_bytes", "disk_dir", gbytes=7.0, wait=1e-4)
"""Read as one PCIe 4 NVMe drive."""
REMOTE = CacheTier("remote", "remote_bytes", gbytes=1.0, wait=1e-4)
"""Read over a network of 10 Gbit/s."""

TIERS = {tier.name: tier for tier in (DEVICE, HOST, DISK, REMOTE)}
"""Tiers by name, from near to far: an entry that is absent in one is looked for in the next."""
