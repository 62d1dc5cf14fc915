"""One worker: a Triton server with maskserve's models, its files, shared memory and log."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from maskserve_common.config import Config, gpus_required
from maskserve_common.liveness import Processes, Silence, signed_in, signed_in_for_s
from maskserve_common.status import StatusReader
from maskserve_serving.cfg_pair import gpus_of_pair
from maskserve_serving.command import command, gpus_of_worker
from maskserve_serving.files import checked, with_values, worker_files
from maskserve_serving.mps import Mps
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import check_free, reachable
from maskserve_serving.probe import Probe
from maskserve_serving.process import Process
from maskserve_serving.runtime import Runtime
from maskserve_serving.shm_cleanup import close_regions, region_prefix, remove_regions
from maskserve_serving.spec import Spec, with_services
from maskserve_serving.supervisor_log import SupervisorLog
from maskserve_serving.tracing import forwarded_headers, trace_arguments, untrace
from maskserve_serving.triton_log import loaded_models
from maskserve_triton.admission import AdmissionState

# Triton still writes an answer to its socket after the last one has left a front.
_LAST_ANSWER_S = 0.3


class WorkerProcess(Process):
    """A Triton server with maskserve's models."""

    def __init__(self, spec: Spec) -> None:
        options = spec.options
        url = f"http://{reachable(options.host)}:{spec.ports.http}"
        run_dir = spec.files.root.parent
        super().__init__(spec.name, "tritonserver", url, spec.log, run_dir, options.report)
        self.spec, self.ports = spec, spec.ports
        self.config = Config()
        self._status = StatusReader(spec.files.status)
        self._silence = Silence()
        self._processes = Processes(spec.files.runtime)
        self._probe = Probe(self.grpc_url, self.config.engine.stuck_timeout_s)
        self._front_silence = Silence()

    # For any thread.

    @property
    def grpc_url(self) -> str:
        return f"{reachable(self.spec.options.host)}:{self.spec.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{reachable(self.spec.options.host)}:{self.spec.ports.metrics}/metrics"

    @property
    def admission(self) -> AdmissionState:
        return AdmissionState(self.spec.files.runtime)

    # Start.

    def check_log(self) -> None:
        super().check_log()
        SupervisorLog.check(checked(self.spec.with_log(self.spec.tables)))

    def check_ports(self) -> None:
        check_free(self.spec.options.host, self.spec.ports)

    def start(self) -> None:
        spec = self.spec
        options = spec.options
        self.check_ports()
        prefix = region_prefix(spec.ports.http)
        remove_regions(prefix)
        folders = {
            "runtime_dir": str(spec.files.runtime),
            "templates_dir": str(spec.files.templates),
        }
        tables = spec.with_adapters(spec.with_entries(spec.with_log(spec.tables)))
        tables = with_services(options, tables)
        tables = spec.with_devices(spec.with_model(tables))
        tables = with_values(tables, "", worker=self.name, **folders)
        if options.router:
            tables = with_values(tables, "values", folder=str(spec.files.values))
        self.config = spec.files.prepare(tables)
        if self.config.model.torch_threads == 0:
            threads = spec.threads(self.config)
            self.config = spec.files.prepare(with_values(tables, "model", torch_threads=threads))
        self._status.close()
        self._processes.close()
        self._status, self._silence = StatusReader(spec.files.status), Silence()
        if options.cfg_devices:
            gpus = gpus_of_pair(options.cfg_devices)
        else:
            gpu_count = gpus_required(self.config)
            gpus = gpus_of_worker(
                spec.index, options.workers, per_worker=gpu_count, share=options.share_gpus
            )
        trace = trace_arguments(self.config.trace, self.name)
        trace += forwarded_headers(self.config.trace)
        self.log.open(self.config)
        self.launch(
            command(spec.options, self.config, spec.runtime, spec.ports, prefix, trace),
            spec.environment(spec.files.config, gpus),
        )

    def progress(self) -> str:
        return f"models ready: {', '.join(sorted(loaded_models(self.last_words()))) or 'none yet'}"

    def stalled(self) -> str | None:
        """Return the loaded model that Triton waits for in vain, in words; None: there is none.

        TRITON-2.51: if the machine stalls for a second while models load, Triton takes a process
        for dead. It then reads nothing more from it and waits for its end.
        """
        loaded = loaded_models(self.last_words())
        for model, age_s in signed_in_for_s(self.spec.files.runtime).items():
            if age_s > self.spec.options.unheard_s and model not in loaded:
                return f"tritonserver does not notice that {model} is loaded"
        return None

    def finish_start(self) -> str | None:
        super().finish_start()
        close_regions(region_prefix(self.spec.ports.http))
        self._probe = Probe(self.grpc_url, self.config.engine.stuck_timeout_s)
        self._front_silence = Silence()
        self._probe.start()
        return untrace(self.http_url) if self.config.trace.otlp_url else None

    # Health.

    def health_problem(self) -> str | None:
        limit_s = self.config.engine.heartbeat_timeout_s
        unresponsive = self.unresponsive(limit_s)
        if unresponsive is not None:
            return unresponsive
        status = self._status.read()
        if status is None:
            return "it has no status record"
        hung = self._silence.silence_fault(status, limit_s)
        if hung is not None:
            return f"its {hung}"
        if status.ended is not None:
            return f"its {status.ended}"
        return self._processes.unwell() or self._stuck()

    def _stuck(self) -> str | None:
        """Return why edits do not come through, in words; None: they do."""
        if self._probe.problem is not None:
            return self._probe.problem
        silent_s = self._front_silence.silent_s(self._probe.rounds)
        if silent_s > self.config.engine.stuck_timeout_s:
            return f"its {self._probe.last_front} has not answered for {silent_s:.1f} s"
        return None

    def in_flight(self) -> int:
        """Number of edits that the fronts have accepted and not answered."""
        return self.admission.in_flight()

    # Stop.

    def finish_edits(self, grace_s: float | None) -> bool:
        """Refuse new edits and wait for the others. After the grace, the rest end with an error."""
        if self.pid is None or self.exit_reason() is not None:
            return True
        if grace_s is None:
            grace_s = self.config.engine.drain_grace_s
        admission = self.admission
        admission.drain()
        finished = self._await_idle(grace_s)
        if not finished:
            admission.stop()
            self._await_idle(2.0)
        time.sleep(_LAST_ANSWER_S)
        return finished

    def _await_idle(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while self.in_flight() > 0:
            if time.monotonic() > end or self.exit_reason() is not None:
                return False
            time.sleep(0.02)
        return True

    def closed(self) -> bool:
        """Return True if its models have released everything.

        Triton then only waits for its Python interpreters to exit, which takes seconds.
        """
        return not signed_in(self.spec.files.runtime)

    def kill(self) -> None:
        self._probe.stop()
        super().kill()
        remove_regions(region_prefix(self.spec.ports.http))

    def remove_files(self) -> None:
        super().remove_files()
        self._status.close()
        self._processes.close()
        self.spec.files.remove()


def specs_of(options: ServeOptions, runtime: Runtime, tables: dict[str, Any]) -> list[Spec]:
    """Return one spec per worker; without workers, one for the services."""
    options = replace(options, log_dir=options.log_dir.resolve())
    files = worker_files(options.base_port, max(1, options.workers))
    mps = Mps(files[0].root.parent, options.log_dir) if options.mps else None
    return [
        Spec(i, options, runtime, tables, private_files, mps)
        for i, private_files in enumerate(files)
    ]
