"""Services beside the workers of a host, each a Triton: ControlNets, shared stages, nodes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskserve_common.config import Config, ConfigError
from maskserve_common.liveness import Processes, signed_in
from maskserve_serving.command import command, environment
from maskserve_serving.errors import ServeError
from maskserve_serving.files import WorkerFiles, checked, read_tables, with_values
from maskserve_serving.options import MODELS, SERVICES
from maskserve_serving.ports import Ports, check_free, reachable
from maskserve_serving.process import Process
from maskserve_serving.shm_cleanup import close_regions, region_prefix, remove_regions
from maskserve_serving.source import node_path, with_node_folders
from maskserve_serving.spec import Spec, with_controlnets
from maskserve_serving.supervisor_log import SupervisorLog
from maskserve_workflows.node_folders import check_names, node_folders
from maskserve_workflows.nodes import NODE_FILES

_HOST = "127.0.0.1"
"""Address of services that only processes of this host use."""
_SILENT_S = 10.0


class ServiceProcess(Process):
    """A Triton server for some models of a repository.

    Args:
        name: name of the service.
        spec: spec of any worker that it serves, because all have the same options.
        ports: ports to listen at.
        repository: repository of its models.
        host: address to listen at.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        ports: Ports,
        repository: Path = SERVICES,
        host: str = _HOST,
    ) -> None:
        self._spec = spec
        self._options = replace(spec.options, host=host, repositories=(repository,))
        self._files = WorkerFiles(spec.files.root.parent / name, spec.files.templates.parent / name)
        self.ports = ports
        output = spec.options.log_dir / f"{name}.log"
        run_dir = spec.files.root.parent
        url = f"http://{reachable(host)}:{self.ports.http}"
        super().__init__(name, "tritonserver", url, output, run_dir, spec.options.report)
        self._processes = Processes(self._files.runtime)
        self.config = Config()

    @abstractmethod
    def tables(self) -> dict[str, Any]:
        """Return its configuration, without its folders and name.

        Raises:
            ServeError: there is nothing to serve.
        """

    @abstractmethod
    def models(self) -> list[str]:
        """Return the models to load, by its configuration."""

    @property
    def grpc_url(self) -> str:
        return f"{reachable(self._options.host)}:{self.ports.grpc}"

    def check_log(self) -> None:
        super().check_log()
        SupervisorLog.check(checked(self._spec.with_log(self._spec.tables)))

    def check_ports(self) -> None:
        check_free(self._options.host, self.ports)

    def start(self) -> None:
        self.check_ports()
        prefix = region_prefix(self.ports.http)
        remove_regions(prefix)
        tables = self.tables()
        log_table = tables.get("log", {})
        if "file" not in log_table and log_table.get("format", "json") == "json":
            tables = with_values(tables, "log", file=str(self.output.with_suffix(".jsonl")))
        tables = with_values(tables, "", worker=self.name, runtime_dir=str(self._files.runtime))
        self.config = self._files.prepare(tables)
        self._processes.close()
        self._processes = Processes(self._files.runtime)
        self.log.open(self.config)
        cache, runtime = self._options.cache_dir.absolute(), self._spec.runtime
        self.launch(
            command(self._options, self.config, runtime, self.ports, prefix, models=self.models()),
            environment(runtime, self._files.config, None, cache),
        )

    def progress(self) -> str:
        return "its models are loading"

    def finish_start(self) -> str | None:
        close_regions(region_prefix(self.ports.http))
        return super().finish_start()

    def health_problem(self) -> str | None:
        return self.unresponsive(_SILENT_S) or self._processes.unwell()

    def in_flight(self) -> int:
        """Return 0: only workers have edits."""
        return 0

    def finish_edits(self, grace_s: float | None) -> bool:
        """Return True at once: its callers have already finished."""
        return True

    def closed(self) -> bool:
        return not signed_in(self._files.runtime)

    def kill(self) -> None:
        super().kill()
        remove_regions(region_prefix(self.ports.http))

    def remove_files(self) -> None:
        super().remove_files()
        self._processes.close()
        self._files.remove()


class ControlNetProcess(ServiceProcess):
    """ControlNets on a device of their own, for the denoisers of this host's workers.

    If this host has no workers, it serves those of other hosts.
    """

    def __init__(self, spec: Spec) -> None:
        options = spec.options
        host = _HOST if options.workers else options.host
        super().__init__("controlnet", spec, Ports.of_controlnet(options.base_port), host=host)

    def tables(self) -> dict[str, Any]:
        spec = self._spec
        tables = with_controlnets(spec.options, spec.with_model(spec.tables))
        threads, device = spec.threads(checked(tables)), spec.options.controlnet_device
        tables = with_values(tables, "model", device=device, torch_threads=threads)
        listen = "" if spec.options.workers else f"{self._options.host}:{self.ports.link}"
        tables = with_values(tables, "controls", service="", listen=listen)
        if not checked(tables).controls.folder:
            raise ServeError(
                "--controlnet-device: there are no ControlNets to serve; give --controlnets DIR"
            )
        return tables

    def models(self) -> list[str]:
        return ["controlnet"]


class StagesProcess(ServiceProcess):
    """Encoder and decoder for all workers of this host, on a device of their own.

    If this host has no workers, it serves those of other hosts.
    """

    def __init__(self, spec: Spec) -> None:
        options = spec.options
        host = _HOST if options.workers else options.host
        super().__init__("stages", spec, Ports.of_stages(options.base_port), MODELS, host)

    def tables(self) -> dict[str, Any]:
        spec = self._spec
        tables = spec.with_adapters(spec.with_model(spec.tables))
        threads, device = spec.threads(checked(tables)), spec.options.stages_device
        tables = with_values(
            tables, "model", device=device, encoder_device="", decoder_device="",
            torch_threads=threads,
        )  # fmt: skip
        tables = with_values(tables, "safety", repository="")
        return with_values(tables, "stages", service="")

    def models(self) -> list[str]:
        return ["encoder", "decoder"]


class NodesProcess(ServiceProcess):
    """Workflow nodes other than edits.

    If this host has no router, it serves a router of another host.
    """

    def __init__(self, spec: Spec) -> None:
        options = spec.options
        host = _HOST if options.router else options.host
        super().__init__("nodes", spec, Ports.of_nodes(options.base_port), host=host)

    def tables(self) -> dict[str, Any]:
        file = self._spec.options.nodes
        tables = read_tables(file)
        path = [*self._spec.options.node_folders, *node_path(file)]
        tables = with_values(tables, "nodes", path=path)
        for problem in NODE_FILES.read(path):
            self._spec.options.report(problem)
        nodes = checked(tables).nodes
        try:
            check_names(nodes)
        except ConfigError as error:
            raise ServeError(f"{file}: {error}") from None
        tables = with_node_folders(tables, nodes.folders(), file)
        if self._spec.options.router:
            tables = with_values(tables, "values", folder=str(self._files.values))
        try:
            node_folders(checked(tables).nodes)
        except ConfigError as error:
            raise ServeError(f"{file}: {error}") from None
        return tables

    def models(self) -> list[str]:
        return ["nodes"]
