"""What serving is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of one supervisor."""

    model: str
    """Folder in diffusers format, or a hub id."""
    workers: int = 1
    host: str = "127.0.0.1"
    """Address that the workers listen on."""
    base_port: int = 9000
    """Worker i listens at base + 10·i + {0 HTTP, 1 gRPC, 2 metrics}."""
    config: Path | None = None
    """TOML file; its `[model] path`, `runtime_dir` and `worker` are set for each worker."""
    log_dir: Path = field(default_factory=lambda: Path("logs"))
    tritonserver: Path | None = None
    """An installed server to use in place of the one from pip."""
    cache_dir: Path = REPOSITORY / ".cache" / "triton"
    """Where the server from pip is laid out, once per version."""
    load_timeout_s: float = 900.0
    """How long a worker may take to load its model."""
    drain_grace_s: float | None = None
    """Bounds a drain; None takes the config's `[engine] drain_grace_s`."""
    otlp_url: str = ""
    """Where spans go; laid over `[trace]`."""
    trace_rate: int | None = None
    """One request in so many is traced; laid over `[trace]`."""
    triton_args: tuple[str, ...] = ()
    """Further arguments for tritonserver."""
    repositories: tuple[Path, ...] = (REPOSITORY / "model_repository", REPOSITORY / "ensemble")
    say: Callable[[str], None] = _say
    """Where progress goes, a line at a time."""
