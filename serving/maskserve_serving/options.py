"""The options of `maskserve serve`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from maskserve_common.config import NODE_PATH_HELP, WEIGHT_FORMS, ConfigError, node_path_folders
from maskserve_common.config_file import config_of
from maskserve_common.files.stages import STAGES
from maskserve_serving.checkpoint import CheckpointParts
from maskserve_serving.errors import ServeError

_PACKAGE = Path(__file__).resolve().parent
# An installed package contains Triton's models; in a checkout they are at its root.
_CARRIED = (_PACKAGE / "model_repository").is_dir()
_MODELS_ROOT = _PACKAGE if _CARRIED else _PACKAGE.parents[1]
MODELS, ENSEMBLE = _MODELS_ROOT / "model_repository", _MODELS_ROOT / "ensemble"
SERVICES = _MODELS_ROOT / "services"
"""Triton's model repositories: the models, the ensemble that joins them, and the services."""
CONTROLNETS = "a folder with a subfolder for each ControlNet"
"""The folder that `--controlnets` accepts, for messages."""
CLOSED_APIS = ("shared-memory", "model-repository", "logging")
"""Parts of Triton's API that maskserve does not need, and that let a caller read or change the
host's memory, models or logs. Published attack chains begin with them."""
DEFAULT_ROUTER_PORT = 8080
DEFAULT_BASE_PORT = 9000
"""First port of the workers. The client's default address is the first worker's gRPC port, one
above."""
_HOSTED = (*STAGES, "controlnet")
"""Models of the workers that a service may host."""


def default_cache_dir() -> Path:
    """Return the user's cache folder for maskserve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maskserve"


def default_entries() -> Path:
    """Return the disk tier of servers started by hand."""
    return default_cache_dir() / "entries"


def _report(line: str) -> None:
    print(line, flush=True)


def _flag(help: str, default: Any = MISSING, *, name: str = "", **more: Any) -> Any:
    """Return a field that is also a flag of `maskserve serve`.

    Args:
        help: help text of the flag.
        default: default of the field, and of the flag.
        name: name of the flag; empty: the field's.
        more: arguments of `add_argument`; and `by_hand`, which makes the flag's default where that
            is not the field's.
    """
    return field(default=default, metadata={"flag": name, "help": help, **more})


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of one supervisor; those with a help text are flags of `maskserve serve`.

    Empty, 0 and None leave the configuration's value.
    """

    model: str = _flag(
        "model: a folder in diffusers format, a hub id, or a checkpoint file (.safetensors, or the "
        ".safetensors.index.json of several)",
        "",
    )
    base: str = _flag(
        "of a checkpoint file: folder or hub id of a model like it, in diffusers format, with its "
        "configuration and the parts that the file lacks (default: diffusers' own for it)",
        "",
        metavar="DIR|ID",
    )
    text_encoders: tuple[str, ...] = _flag(
        "of a checkpoint file: a text encoder, as a folder, a file or a hub id, in place of the "
        "base's; may be repeated",
        (),
        name="--text-encoder",
        action="append",
        metavar="DIR|FILE|ID",
        by_hand=list,
    )
    vae: str = _flag(
        "of a checkpoint file: the VAE, as a folder, a file or a hub id, in place of the base's",
        "",
        metavar="DIR|FILE|ID",
    )
    workers: int = _flag(
        "number of workers, each a Triton server (default %(default)s); 0: run only the services "
        "of --service or --nodes, for workers and routers elsewhere",
        1,
        type=int,
        metavar="N",
    )
    devices_per_worker: int | Literal["auto"] = _flag(
        "devices of each worker, 1, 2, 4 or 8 (default: the configuration's, or 1). auto: 1 on "
        "GPUs; on a CPU, a trial at start picks the number of processes with the highest "
        "throughput (they share the cores, so a single edit has fewer)",
        0,
        type=lambda text: text if text == "auto" else int(text),
        choices=(1, 2, 4, 8, "auto"),
        metavar="N|auto",
    )
    cfg_devices: str = _flag(
        "run one worker on two devices, GPUs by number (0,1) or cpu,cpu; with classifier-free "
        "guidance, each device computes one of an edit's two passes",
        "",
        metavar="A,B",
    )
    share_gpus: bool = _flag("allow more workers than there are GPUs", False, action="store_true")
    mps: bool = _flag(
        "let the processes of each worker compute on its GPU at the same time, by NVIDIA's "
        "Multi-Process Service, instead of in turns",
        False,
        action="store_true",
    )
    name: str = _flag(
        "name worker i NAME-i in responses, metrics and logs; hosts behind one router need "
        "different names (default $MASKSERVE_NAME or worker)",
        "worker",
        by_hand=lambda: os.environ.get("MASKSERVE_NAME", "worker"),
    )
    host: str = _flag("address to listen on (default %(default)s)", "127.0.0.1")
    base_port: int = _flag(
        "first port of the workers (default %(default)s)",
        DEFAULT_BASE_PORT,
        type=int,
        metavar="PORT",
    )
    """Worker i listens at base + 10·i + {0 HTTP, 1 gRPC, 2 metrics}."""
    router: bool = _flag("run a router in front of the workers", False, action="store_true")
    router_port: int = _flag(
        "HTTP port of the router, before its gRPC and operators' ports (default %(default)s)",
        DEFAULT_ROUTER_PORT,
        type=int,
        metavar="PORT",
    )
    router_config: Path | None = _flag(
        "configuration file of the router", None, type=Path, metavar="FILE"
    )
    config: Path | None = _flag("configuration file (TOML)", None, type=Path, metavar="FILE")
    """Its `[model] path`, `runtime_dir` and `worker` are set for each worker."""
    log_dir: Path = _flag(
        "folder for the workers' logs (default %(default)s)",
        Path("logs"),
        type=Path,
        metavar="DIR",
    )
    tritonserver: Path | None = _flag(
        "use this installed tritonserver instead of the one from pip",
        None,
        type=Path,
        metavar="FILE",
    )
    entries: Path | None = _flag(
        "folder that keeps cached activations across restarts (default %(default)s); '': none",
        None,
        type=lambda text: Path(text) if text else None,
        metavar="DIR",
        by_hand=default_entries,
    )
    """The disk tier of all workers, beside a host tier in memory while they run."""
    adapters: str = _flag(
        "serve the LoRAs in this folder or bucket: NAME.safetensors, or "
        "NAME/pytorch_lora_weights.safetensors",
        "",
        metavar="DIR|URL",
    )
    fuse_loras: tuple[str, ...] = _flag(
        "merge a LoRA into the weights at start: every edit uses it, and steps do no extra work; "
        "may be repeated",
        (),
        name="--fuse-lora",
        action="append",
        metavar="FILE[:SCALE]",
        by_hand=list,
    )
    controlnets: str = _flag(
        "serve the ControlNets in this folder: one subfolder each, as diffusers saves them",
        "",
        metavar="DIR",
    )
    services: tuple[str, ...] = _flag(
        "run models of the workers in a server beside them, on a device: cpu, cuda or cuda:N; "
        "MODELS are encoder, decoder and controlnet, with commas; may be repeated: servers of a "
        "model divide its work (default: in each worker)",
        (),
        name="--service",
        action="append",
        metavar="MODELS@DEVICE",
        by_hand=list,
    )
    """The ports of server i are base + 10·i + {3 steps of other hosts' workers, 4 HTTP, 5 gRPC, 6
    metrics}."""
    nodes: Path | None = _flag(
        "run nodes of workflows in a separate server; the [nodes] table of the configuration FILE "
        "names their models",
        None,
        type=Path,
        metavar="FILE",
    )
    """Its ports are base + {7 HTTP, 8 gRPC, 9 metrics}."""
    node_path: str = _flag(
        f"{NODE_PATH_HELP}; together with --nodes or --router", "", metavar="DIR[:DIR]"
    )
    workflows: Path | None = _flag(
        "make the router serve the plans in this folder, written by `maskserve workflows compile`",
        None,
        type=Path,
        metavar="DIR",
    )
    weights: str = _flag(
        "number format of the denoiser's weights (default: the configuration's, or bf16)",
        "",
        choices=WEIGHT_FORMS,
    )
    gguf: str = _flag(
        "load the transformer's weights of a FLUX model from this GGUF file", "", metavar="FILE"
    )
    load_timeout_s: float = _flag(
        "seconds that the model may take to load (default %(default)g)",
        900.0,
        name="--load-timeout",
        type=float,
        metavar="S",
    )
    drain_grace_s: float | None = _flag(
        "seconds to finish edits when stopping (default: the configuration's)",
        None,
        name="--drain-grace",
        type=float,
        metavar="S",
    )
    otlp_url: str = _flag(
        "send OpenTelemetry spans to this URL, such as http://localhost:4318/v1/traces",
        "",
        metavar="URL",
    )
    trace_rate: int | None = _flag(
        "trace one request in N (default 1)", None, type=int, metavar="N"
    )
    open_apis: tuple[str, ...] = _flag(
        "open a part of Triton's own API on the workers' ports; all are closed by default: "
        f"{', '.join(CLOSED_APIS)}; may be repeated",
        (),
        name="--open",
        action="append",
        choices=CLOSED_APIS,
        metavar="API",
        by_hand=list,
    )
    triton_args: tuple[str, ...] = _flag(
        "further arguments for tritonserver", (), name="triton_args", nargs="*", metavar="-- ARG"
    )
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Folder for the server from pip, one copy per version, and for compiled kernels."""
    unheard_s: float = 30.0
    """Seconds for which Triton may not know of a loaded model. A model's process signs in at the
    very end of its load, and Triton normally hears of it at once."""
    repositories: tuple[Path, ...] = (MODELS, ENSEMBLE)
    report: Callable[[str], None] = _report
    """Receives progress, a line at a time."""

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        for flag_field in _flags():
            more = dict(flag_field.metadata)
            name, by_hand = more.pop("flag"), more.pop("by_hand", None)
            arguments: dict[str, Any] = {}
            if flag_field.default is MISSING:
                arguments["required"] = True
            elif "nargs" not in more:
                arguments["default"] = flag_field.default if by_hand is None else by_hand()
            name = name or "--" + flag_field.name.replace("_", "-")
            if name.startswith("-"):
                arguments["dest"] = flag_field.name
            parser.add_argument(name, **arguments, **more)

    @classmethod
    def of_flags(cls, flags: argparse.Namespace) -> ServeOptions:
        """Return the options from the parsed command line."""
        values: dict[str, Any] = {
            flag_field.name: getattr(flags, flag_field.name) for flag_field in _flags()
        }
        several = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **several})

    def check(self) -> None:
        """Raises ServeError: the flags contradict one another, or name files that do not exist."""
        self.check_flags()
        self._check_paths()

    def check_flags(self) -> None:
        """Raises ServeError: the flags contradict one another."""
        has_service = bool(self.services) or self.nodes is not None
        if self.workers < 0 or not (self.workers or has_service):
            raise ServeError(f"--workers: {self.workers} is not at least 1")
        if not self.workers and self.router:
            raise ServeError("--workers: 0 runs only services; accepted: 0 without --router")
        if not self.model and (self.workers or self.services):
            raise ServeError("--model: is missing; name a folder in diffusers format, or a hub id")
        for flag, value in (("workflows", self.workflows), ("router-config", self.router_config)):
            if value is not None and not self.router:
                raise ServeError(
                    f"--{flag}: is an option of the router; accepted: together with --router"
                )
        if self.node_path and self.nodes is None and not self.router:
            raise ServeError(
                "--node-path: is an option of node servers and routers; accepted: together with "
                "--nodes or --router"
            )
        for service in self.services:
            models, device = hosted_models(service), service.partition("@")[2]
            is_known = set(models) <= set(_HOSTED) and len(set(models)) == len(models)
            if not is_known or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
                raise ServeError(
                    f"--service: is {service!r}; accepted: encoder, decoder and controlnet with "
                    "commas, then @cpu, @cuda or @cuda:N"
                )
        missing = [stage for stage in STAGES if not self.services_of(stage)]
        if self.workers and len(missing) == 1:
            raise ServeError(
                f"--service: no server has the {missing[0]}; accepted: servers for both stages"
            )

    @property
    def checkpoint_parts(self) -> CheckpointParts:
        """The parts beside a checkpoint file."""
        return CheckpointParts(
            self.base, self.text_encoders, self.vae, self.cache_dir / "models", self.report
        )

    def check_tables(self, tables: dict[str, Any]) -> None:
        """Check that files named in the configuration exist, unless a flag replaces them.

        Args:
            tables: tables of the configuration file, valid in form.

        Raises:
            ServeError: naming the key.
        """

        def named(section: str, key: str) -> Any:
            return tables.get(section, {}).get(key, "")

        if not self.adapters:
            check_adapters("[adapters] store", named("adapters", "store"))
        if not self.controlnets:
            check_path("[controls] folder", named("controls", "folder"), CONTROLNETS)
        try:
            config = config_of(tables)
            _ = [*map(config.stages.addresses, STAGES), config.controls.addresses]
        except ConfigError as error:
            raise ServeError(str(error)) from None
        check_path("[safety] repository", named("safety", "repository"), "a folder with a model")
        check_path("[model] gguf", named("model", "gguf"), "a GGUF file", folder=False)
        for section, key in (("adapters", "profiles"), ("engine", "costs")):
            check_path(f"[{section}] {key}", named(section, key), "a JSON file", folder=False)
        for lora in map(lora_file, named("model", "fuse_loras")):
            if not lora.is_dir():
                check_path("[model] fuse_loras", lora, "FILE or FILE:SCALE", folder=False)
        for key in ("certificate", "private_key"):
            check_path(f"[provenance] {key}", named("provenance", key), "a PEM file", folder=False)

    def _check_paths(self) -> None:
        """Raises ServeError: a flag names a folder or file that does not exist."""
        check_adapters("--adapters", self.adapters)
        check_path("--controlnets", self.controlnets, CONTROLNETS)
        check_path("--workflows", self.workflows, "a folder with plans")
        for flag, file in (
            ("gguf", self.gguf),
            ("config", self.config),
            ("router-config", self.router_config),
            ("nodes", self.nodes),
            *(("fuse-lora", path) for path in map(lora_file, self.fuse_loras) if not path.is_dir()),
        ):
            check_path(f"--{flag}", file, "a file", folder=False)

    @property
    def node_folders(self) -> list[str]:
        """Folders of `--node-path`."""
        return node_path_folders(self.node_path)

    def services_of(self, model: str) -> list[int]:
        """Return which services host a model of the workers."""
        return [n for n, service in enumerate(self.services) if model in hosted_models(service)]

    @property
    def model_overrides(self) -> dict[str, Any]:
        """Values that replace those of `[model]` in the configuration."""
        overrides: dict[str, Any] = {"weights": self.weights} if self.weights else {}
        if self.gguf:
            overrides["gguf"] = os.path.abspath(self.gguf)
        if self.fuse_loras:
            overrides["fuse_loras"] = [os.path.abspath(lora) for lora in self.fuse_loras]
        return overrides


def hosted_models(service: str) -> tuple[str, ...]:
    """Return the models of MODELS@DEVICE."""
    return tuple(service.partition("@")[0].split(","))


def lora_file(lora: str) -> Path:
    """Return the file of FILE[:SCALE]."""
    file, _, scale = lora.rpartition(":")
    return Path(file if file and re.fullmatch(r"[-+.\de]+", scale) else lora)


def check_adapters(where: str, store: str) -> None:
    """Raises ServeError: a given `store` is neither a URL nor a folder."""
    if "://" not in store:
        check_path(where, store, "a folder, or a URL such as s3://BUCKET/LORAS")


def check_path(where: str, path: str | Path | None, accepted: str, folder: bool = True) -> None:
    """Raises ServeError: a given `path` does not exist, or is not a folder (or file)."""
    if not path or (Path(path).is_dir() if folder else Path(path).is_file()):
        return
    state = ("is a file" if folder else "is a folder") if Path(path).exists() else "is not there"
    raise ServeError(f"{where}: {path} {state}; accepted: {accepted}")


def _flags() -> list[Field[Any]]:
    return [flag_field for flag_field in fields(ServeOptions) if "flag" in flag_field.metadata]
