"""The description of one run: everything that its result depends on, except the seed."""

from __future__ import annotations

from dataclasses import dataclass

from maskserve_benchmarks.simulator.loras import LoraTiers
from maskserve_benchmarks.simulator.workload import Workload

BATCHING = ("continuous", "static", "strawman")


@dataclass(frozen=True, slots=True)
class Tiers:
    """Capacity of the tiers, for scenarios in which not every memory holds every template."""

    workers_per_host: int = 1
    host_templates: int = 100
    disk_templates: int = 0
    known: bool = True
    """Whether the policy sees which worker holds which templates."""
    warm: bool = True
    """Whether hosts start with templates, as `cluster` deals them out, or empty."""


@dataclass(frozen=True, slots=True)
class Scenario:
    workload: Workload
    policy: str = "mask_aware"
    workers: int = 8
    max_rows: int = 8
    max_waiting: int = 100_000
    batching: str = "continuous"
    pre_seconds: float = 0.0
    """Seconds of decoding, VAE and text encoding of one edit."""
    post_seconds: float = 0.0
    tiers: Tiers | None = None
    """None: every template is in every host's memory."""
    deadline: float | None = None
    """Seconds after arrival at which an edit expires."""
    slo: float = 3.0
    """An edit is good if it takes at most this multiple of its time alone on an idle worker."""
    warmup: float = 0.1
    """Share of the first edits that are served but not measured."""
    noise: float = 0.0
    """Standard deviation of log(step time) around the planned time."""
    priming_share: float = 0.25
    controls_priced: bool = True
    """Whether the policy knows which edits have a ControlNet and what it costs."""
    loras: LoraTiers | None = None
    """None: every LoRA is on every device."""

    def __post_init__(self) -> None:
        if self.batching not in BATCHING:
            raise ValueError(f"batching {self.batching!r} is not one of {', '.join(BATCHING)}")
