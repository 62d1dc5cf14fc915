"""A service beside the workers of a host: a Triton for some models of a repository."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from maskserve_common.config import Config
from maskserve_common.liveness import Processes, signed_in
from maskserve_serving.command import command
from maskserve_serving.files import WorkerFiles, checked, with_values
from maskserve_serving.hosted import Hosted
from maskserve_serving.ports import check_free, reachable
from maskserve_serving.process import Process
from maskserve_serving.shm_cleanup import close_regions, region_prefix, remove_regions
from maskserve_serving.spec import Spec
from maskserve_serving.supervisor_log import SupervisorLog

_HOST = "127.0.0.1"
"""Address of services that only processes of this host use."""
_SILENT_S = 10.0


class ServiceProcess(Process):
    """A Triton server for models that several workers, or a router, call.

    Args:
        spec: spec of any worker that it serves, because all have the same options.
        hosted: its models.
    """

    def __init__(self, spec: Spec, hosted: Hosted) -> None:
        host = _HOST if hosted.is_local else spec.options.host
        self._spec, self.hosted, self.ports = spec, hosted, hosted.ports
        self._options = replace(spec.options, host=host, repositories=hosted.repositories)
        name, folder = hosted.name, spec.files.root.parent
        self._files = WorkerFiles(folder / name, spec.files.templates.parent / name)
        output = spec.options.log_dir / f"{name}.log"
        url = f"http://{reachable(host)}:{self.ports.http}"
        super().__init__(name, "tritonserver", url, output, folder, spec.options.report)
        self._processes = Processes(self._files.runtime)
        self.config = Config()

    def tables(self) -> dict[str, Any]:
        """Return its configuration, without its folders and name.

        Raises:
            ServeError: there is nothing to serve.
        """
        tables, device = self.hosted.tables(self._spec), self.hosted.device
        if not device:
            return tables
        threads = self._spec.threads(checked(tables))
        return with_values(tables, "model", device=device, torch_threads=threads)

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
        runtime, models = self._spec.runtime, self.hosted.models
        self.launch(
            command(self._options, self.config, runtime, self.ports, prefix, models=models),
            self._spec.environment(self._files.config),
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
