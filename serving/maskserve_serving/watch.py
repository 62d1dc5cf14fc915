"""The supervisor's state of one process."""

from __future__ import annotations

from dataclasses import dataclass

from maskserve_serving.process import Process


@dataclass(slots=True)
class Watch:
    """State of one process, from its first start on."""

    process: Process
    ready: bool = False
    ready_since: float = 0.0
    failures: int = 0
    start_at: float = 0.0
    """When to start the process; 0 while it runs."""
    reported_at: float = 0.0
    surprise: str = ""
    """Traceback of the newest unexpected exception."""
