"""The specification from which one worker is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskserve_common.config import Config, cores
from maskserve_serving.files import WorkerFiles, with_values
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
        assert devices != "auto", "the supervisor has it tried"
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
        services = len(options.controlnet_devices) + len(options.stages_devices)
        return configured or max(1, cores() // (options.workers * config.engine.devices + services))


def with_controlnets(options: ServeOptions, tables: dict[str, Any]) -> dict[str, Any]:
    """Return `tables` with the ControlNets' folder and the services that run them."""
    overrides: dict[str, str] = {}
    if options.controlnets:
        overrides["folder"] = str(Path(options.controlnets).absolute())
    if devices := options.controlnet_devices:
        ports = [Ports.of_controlnet(options.base_port, i) for i in range(len(devices))]
        overrides["service"] = ",".join(f"127.0.0.1:{p.grpc}" for p in ports)
    return with_values(tables, "controls", **overrides) if overrides else tables


def with_stages(options: ServeOptions, tables: dict[str, Any]) -> dict[str, Any]:
    """Return `tables` with the services that encode and decode, if the command line has any."""
    ports = [Ports.of_stages(options.base_port, i) for i in range(len(options.stages_devices))]
    if not ports:
        return tables
    return with_values(tables, "stages", service=",".join(f"127.0.0.1:{p.grpc}" for p in ports))
