"""The ControlNet service of this host's workers: a Triton of its own, on a device of its own."""

from __future__ import annotations

from dataclasses import replace

from maskserve_core.config import Config
from maskserve_core.worker.liveness import Processes, signed_in
from maskserve_serving.command import command, environment
from maskserve_serving.errors import ServeError
from maskserve_serving.files import WorkerFiles, checked, with_values
from maskserve_serving.options import SERVICES
from maskserve_serving.ports import Ports, check_free
from maskserve_serving.process import Process
from maskserve_serving.shm_cleanup import close_regions, region_prefix, remove_regions
from maskserve_serving.spec import Spec
from maskserve_serving.supervisor_log import SupervisorLog

NAME = "controlnet"
_HOST = "127.0.0.1"
"""Only workers of this host have a use for it."""
_SILENT_S = 10.0


class ControlNetProcess(Process):
    """A Triton server of the model `controlnet`.

    Args:
        spec: of a worker that it serves; the others have the same options.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._options = replace(spec.options, host=_HOST, repositories=(SERVICES,))
        self._files = WorkerFiles(spec.files.root.parent / NAME, spec.files.templates.parent / NAME)
        self.ports = Ports.of_controlnet(spec.options.base_port)
        output = spec.options.log_dir / f"{NAME}.log"
        run_dir = spec.files.root.parent
        url = f"http://{_HOST}:{self.ports.http}"
        super().__init__(NAME, "tritonserver", url, output, run_dir, spec.options.say)
        self._processes = Processes(self._files.runtime)
        self.config = Config()

    def check_log(self) -> None:
        super().check_log()
        SupervisorLog.check(checked(self._spec.with_log(self._spec.tables)))

    def check_ports(self) -> None:
        check_free(_HOST, self.ports)

    def start(self) -> None:
        self.check_ports()
        spec = self._spec
        prefix = region_prefix(self.ports.http)
        remove_regions(prefix)
        tables = spec.with_controlnets(spec.with_model(spec.tables))
        given = tables.get("log", {})
        if "file" not in given and given.get("format", "json") == "json":
            tables = with_values(tables, "log", file=str(self.output.with_suffix(".jsonl")))
        threads = spec.threads(checked(tables))
        device = spec.options.controlnet_device
        tables = with_values(tables, "model", device=device, torch_threads=threads)
        tables = with_values(tables, "controls", service="")
        if not checked(tables).controls.folder:
            raise ServeError(
                "--controlnet-device: there are no ControlNets to serve; give --controlnets DIR"
            )
        tables = with_values(tables, "", worker=NAME, runtime_dir=str(self._files.runtime))
        self.config = self._files.prepare(tables)
        self._processes.close()
        self._processes = Processes(self._files.runtime)
        self.log.open(self.config)
        cache = self._options.cache_dir.absolute()
        self.launch(
            command(self._options, self.config, spec.runtime, self.ports, prefix),
            environment(spec.runtime, self._files.config, None, cache),
        )

    def progress(self) -> str:
        return "its model is loading"

    def settle(self) -> str | None:
        close_regions(region_prefix(self.ports.http))
        return super().settle()

    def sick(self) -> str | None:
        return self.unresponsive(_SILENT_S) or self._processes.unwell()

    def in_flight(self) -> int:
        """None of its own: edits are the workers'."""
        return 0

    def finish_edits(self, grace_s: float | None) -> bool:
        """The workers have finished theirs."""
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
