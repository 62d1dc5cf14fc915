"""What serving is asked to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_PACKAGE = Path(__file__).resolve().parent
# An installed package carries Triton's models; in a checkout they lie at its root.
_CARRIED = (_PACKAGE / "model_repository").is_dir()
_MODELS_ROOT = _PACKAGE if _CARRIED else _PACKAGE.parents[1]
MODELS, ENSEMBLE = _MODELS_ROOT / "model_repository", _MODELS_ROOT / "ensemble"
SERVICES = _MODELS_ROOT / "services"
"""Triton's model repositories: the models, the ensemble that joins them, and the services."""
DEFAULT_ROUTER_PORT = 8080
DEFAULT_BASE_PORT = 9000
"""The client's default address is the first worker's gRPC port, one above."""


def default_cache_dir() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maskserve"


def default_entries() -> Path:
    """The disk tier of servers started by hand."""
    return default_cache_dir() / "entries"


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of one supervisor."""

    model: str
    """Folder in diffusers format, or a hub id."""
    workers: int = 1
    devices_per_worker: int | Literal["auto"] = 0
    """Laid over `[engine] devices`; 0: what the configuration says; `auto`: on a CPU tried with the
    model at start, on GPUs 1."""
    cfg_devices: str = ""
    """Two devices of one worker that share each edit's passes, `0,1` or `cpu,cpu`; empty: none."""
    share_gpus: bool = False
    """Whether there may be more workers than GPUs."""
    name: str = "worker"
    """Worker i is called `name`-i in answers, metrics and logs."""
    host: str = "127.0.0.1"
    """Address that the workers listen on."""
    base_port: int = DEFAULT_BASE_PORT
    """Worker i listens at base + 10·i + {0 HTTP, 1 gRPC, 2 metrics}."""
    router: bool = False
    """Whether a router runs in front of the workers."""
    router_port: int = DEFAULT_ROUTER_PORT
    """Its ports: this one for HTTP, then gRPC and the operators' (metrics)."""
    router_config: Path | None = None
    """TOML file of the router."""
    config: Path | None = None
    """TOML file; its `[model] path`, `runtime_dir` and `worker` are set for each worker."""
    log_dir: Path = field(default_factory=lambda: Path("logs"))
    tritonserver: Path | None = None
    """An installed server to use in place of the one from pip."""
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Where the server from pip is laid out, once per version, and what was compiled is kept."""
    weights: str = ""
    """Form of the denoiser's weights; laid over `[model]`. Empty: what the configuration says."""
    gguf: str = ""
    """GGUF file of the denoiser's weights; laid over `[model]`. Empty: what the configuration
    says."""
    compile: bool = False
    """Whether parts of the model are compiled at start; laid over `[model]`."""
    entries: Path | None = None
    """Where cached activations outlive the server, as the disk tier of all its workers, beside a
    host tier in memory while it runs; None: neither, unless the configuration names them."""
    adapters: str = ""
    """Folder or URL of LoRAs; laid over `[adapters]`. Empty: what the configuration says."""
    fuse_loras: tuple[str, ...] = ()
    """LoRAs that are added to the weights at start, FILE or FILE:SCALE;
    laid over `[model]`. Empty: what the configuration says."""
    controlnets: str = ""
    """Folder of ControlNets; laid over `[controls]`. Empty: what the configuration says."""
    controlnet_device: str = ""
    """Device of a ControlNet service, as `[model] device`; empty: ControlNets run beside the base.
    Its ports are base + {4 HTTP, 5 gRPC, 6 metrics}."""
    load_timeout_s: float = 900.0
    unheard_s: float = 30.0
    """How long a loaded model may be unknown to Triton: a model's process signs in as the last
    thing it does to load, and Triton hears of it at once."""
    """How long a worker may take to load its model."""
    drain_grace_s: float | None = None
    """Bounds a drain; None takes the config's `[engine] drain_grace_s`."""
    otlp_url: str = ""
    """Where spans go; laid over `[trace]`."""
    trace_rate: int | None = None
    """One request in so many is traced; laid over `[trace]`."""
    triton_args: tuple[str, ...] = ()
    """Further arguments for tritonserver."""
    repositories: tuple[Path, ...] = (MODELS, ENSEMBLE)
    say: Callable[[str], None] = _say
    """Where progress goes, a line at a time."""

    @property
    def of_model(self) -> dict[str, Any]:
        """What is laid over `[model]`."""
        given: dict[str, Any] = {"weights": self.weights} if self.weights else {}
        if self.gguf:
            given["gguf"] = os.path.abspath(self.gguf)
        if self.fuse_loras:
            given["fuse_loras"] = [os.path.abspath(each) for each in self.fuse_loras]
        return {**given, "compile": True} if self.compile else given
