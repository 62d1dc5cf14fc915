"""The specification from which one worker is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskserve_common.config import Config, cores
from maskserve_serving.command import environment
from maskserve_serving.files import WorkerFiles, with_values
from maskserve_serving.mps import Mps
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports
from maskserve_serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of one worker, the same for each start."""

    index: int
    options: ServeOptions
    runtime: Runtime
    tables: dict[str, Any]
    """Configuration tables with the model's local path."""
    files: WorkerFiles
    mps: Mps | None = None

    @property
    def name(self) -> str:
        return f"{self.options.name}-{self.index}"

    @property
    def ports(self) -> Ports:
        return Ports.of_worker(self.options.base_port, self.index)

    @property
    def log(self) -> Path:
        """Triton's own log, with the output of processes before they read their configuration."""
        return self.options.log_dir / f"{self.name}.log"

    def environment(self, config: Path, gpus: str | None = None) -> dict[str, str]:
        """Return the environment of a worker, or of a service beside it.

        Args:
            config: its configuration file.
            gpus: CUDA_VISIBLE_DEVICES; None keeps the host's.
        """
        variables = environment(self.runtime, config, gpus, self.options.cache_dir.absolute())
        return variables if self.mps is None else {**variables, **self.mps.client_variables()}

    def with_log(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return `tables` with a file for the worker's JSON lines, unless they configure one."""
        log_table = tables.get("log", {})
        if "file" in log_table or log_table.get("format", "json") != "json":
            return tables
        return with_values(tables, "log", file=str(self.log.with_suffix(".jsonl")))

    def with_model(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return `tables` with the command line's model options over them."""
        return with_values(tables, "model", **self.options.model_overrides)

    def with_devices(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return `tables` with the command line's number of devices."""
        devices = self.options.devices_per_worker
        assert devices != "auto", "the supervisor tries this before it starts a worker"
        return with_values(tables, "engine", devices=devices) if devices else tables

    def with_entries(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return `tables` with folders for cached activations, unless they name their own."""
        if self.options.entries is None:
            return tables
        disk = str(self.options.entries.absolute())
        cache_folders = {"host_dir": str(self.files.entries), "disk_dir": disk}
        return with_values(tables, "cache", **{**cache_folders, **tables.get("cache", {})})

    def with_adapters(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return `tables` with the LoRAs' storage and a folder in memory that all workers share.

        LoRAs from a URL are kept on disk too.
        """
        adapters = dict(tables.get("adapters", {}))
        if self.options.adapters:
            adapters["store"] = self.options.adapters
        if not adapters.get("store"):
            return tables
        folders = {"host_dir": str(self.files.adapters)}
        if "://" in adapters["store"]:
            folders["disk_dir"] = str(self.options.cache_dir.absolute() / "adapters")
        else:
            adapters["store"] = str(Path(adapters["store"]).absolute())
        return with_values(tables, "adapters", **{**folders, **adapters})

    def threads(self, config: Config) -> int:
        """Return the CPU threads of a process that steps: configured, or a share of the cores."""
        configured: int = config.model.torch_threads
        options = self.options
        processes = options.workers * config.engine.devices + len(options.services)
        return configured or max(1, cores() // processes)


def with_services(options: ServeOptions, tables: dict[str, Any]) -> dict[str, Any]:
    """Return `tables` with the ControlNets' folder and the services that host the workers' models,
    as far as the command line has them.
    """
    if options.controlnets:
        tables = with_values(tables, "controls", folder=str(Path(options.controlnets).absolute()))
    keys = (
        ("controls", "service", "controlnet"),
        ("stages", "service", "encoder"),
        ("stages", "decoder_service", "decoder"),
    )
    for table, key, model in keys:
        if services := options.services_of(model):
            ports = [Ports.of_service(options.base_port, index).grpc for index in services]
            tables = with_values(tables, table, **{key: ",".join(f"127.0.0.1:{p}" for p in ports)})
    return tables
