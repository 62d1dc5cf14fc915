"""The supervisor: it starts workers and router, restarts failed ones, drains and stops all."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

from maskserve_serving.cfg_pair import with_pair
from maskserve_serving.cpu_split import fastest_devices
from maskserve_serving.errors import ServeError
from maskserve_serving.files import (
    WorkerFiles,
    folders_of,
    hold,
    read_tables,
    remove_stale,
    with_values,
)
from maskserve_serving.hosted import check_node_names, hosted_by
from maskserve_serving.mps import check_mps
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import check_distinct
from maskserve_serving.process import Process
from maskserve_serving.router import RouterProcess
from maskserve_serving.runtime import check_packages, find_runtime
from maskserve_serving.service import ServiceProcess
from maskserve_serving.source import with_model, with_model_cache
from maskserve_serving.spec import Spec
from maskserve_serving.tracing import with_trace
from maskserve_serving.watch import Watch
from maskserve_serving.worker import WorkerProcess, specs_of

_TICK_S = 0.2
_PROGRESS_S = 5.0
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
STEADY_S = 10.0
"""Seconds of service after which a worker's next failure counts as its first, with the shortest
backoff."""
_STALLED_STARTS = 3
"""Starts that a stalled machine gets, including the first.

TRITON-2.51: if the machine stalls for a second while models load, Triton takes their processes for
dead, and aborts or waits for ever."""
# The fronts of a worker whose engine died answer their clients themselves; they get this time.
_ANSWERS_S = 1.5


class Supervisor:
    """Workers of this host, from start to stop. Use it as a context manager.

        with Supervisor(ServeOptions(model="assets/models/demo")) as supervisor:
            print(supervisor.workers[0].http_url)

    Leaving the block drains: accepted edits are finished, within the grace.
    """

    def __init__(self, options: ServeOptions, backoff_s: Sequence[float] = _BACKOFF_S) -> None:
        self.options, self._backoff_s = options, backoff_s
        self.workers: list[WorkerProcess] = []
        self.router: RouterProcess | None = None
        self.services: list[ServiceProcess] = []
        """Services for the workers or for the router."""
        self._specs: list[Spec] = []
        self._watches: list[Watch] = []
        self._closing = threading.Event()
        self._looking_away = threading.Event()
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._failure: ServeError | None = None
        self._locks: list[int] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Supervisor:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, until: Callable[[], bool] = lambda: False) -> None:
        """Start every worker and wait until all are ready, or until `until()` is true.

        Raises:
            ServeError: the start failed; nothing is left running.
        """
        options = self.options
        options.check()
        tables = with_values(read_tables(options.config), "model", **options.model_overrides)
        options.check_tables(tables)
        if options.mps:
            check_mps()
        if options.model:
            tables = with_model(tables, options.model, parts=options.checkpoint_parts)
            tables = with_model_cache(tables, options.report)
        check_node_names(tables)
        tables = with_trace(tables, options)
        if options.cfg_devices:
            tables = with_pair(options, tables)
        check_packages(router=options.router)
        runtime = find_runtime(options.tritonserver, options.cache_dir)
        if options.devices_per_worker == "auto" and options.workers:
            options = replace(options, devices_per_worker=fastest_devices(options, tables))
        self._specs = specs_of(options, runtime, tables)
        self.workers = [WorkerProcess(spec) for spec in self._specs[: options.workers]]
        first = self._specs[0]
        self.services = [ServiceProcess(first, hosted) for hosted in hosted_by(first.options)]
        if options.router:
            addresses = [worker.grpc_url for worker in self.workers]
            self.router = RouterProcess(first.options, addresses, first.files.root.parent)
        self._watches = [Watch(process, start_at=1e-9) for process in self._processes()]
        try:
            self._locks = hold(self._files())
            remove_stale(options.base_port, self._files(), options.report)
            check_distinct({process.name: process.ports for process in self._processes()})
            for process in self._processes():
                process.check_ports()
                process.check_log()
            # One thread starts all workers and outlives them: for the kernel, the end of the thread
            # that started a process is the end of its parent (launch.py).
            self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
            self._thread.start()
            self._await_ready(until)
        except BaseException:
            self.kill()
            raise

    def stop(self, grace_s: float | None = None) -> bool:
        """Drain and stop router and workers. Return False: some accepted edits were unfinished."""
        self._look_away()
        if grace_s is None:
            grace_s = self.options.drain_grace_s

        def stop(watch: Watch) -> bool:
            process = watch.process
            if not watch.ready:
                process.kill()  # it is loading or has failed, so it has no edits
                return True
            finished = process.finish_edits(grace_s)
            process.terminate()
            process.log.write(logging.INFO, "stopped", "stopped", finished=finished)
            return finished

        finished = True
        # The router first, while workers finish its edits. The services last, because workers need
        # them.
        for group in ([self.router], self.workers, self.services):
            watches = [watch for watch in self._watches if watch.process in group]
            with ThreadPoolExecutor(max(1, len(watches))) as pool:
                finished = all(pool.map(stop, watches)) and finished
        self._end_thread()
        self._remove_files()
        return finished

    def kill(self) -> None:
        """Stop at once, whatever is in flight. For any thread, also beside `stop`."""
        self._look_away()
        for process in self._processes():
            process.kill()
        self._end_thread()
        self._remove_files()

    def abort(self) -> None:
        """Let a `stop` under way end at once. Safe in a signal handler."""
        for process in self._processes():
            process.signal_group()

    def in_flight(self) -> int:
        """Return the number of edits accepted and not yet answered, over all workers."""
        return sum(worker.in_flight() for worker in self.workers)

    # The supervising thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            for watch in self._watches:
                try:
                    self._tend(watch)
                except Exception:
                    # Without this thread nothing is restarted or stopped: it must survive
                    # unexpected errors.
                    self._report_once(watch, traceback.format_exc())
            self._closing.wait(_TICK_S)
        self._looking_away.set()
        # If this thread ended before the workers, the kernel would kill them.
        self._stopped.wait()

    def _tend(self, watch: Watch) -> None:
        try:
            self._step(watch)
        except ServeError as error:
            self._restart(watch, str(error))
        except (OSError, RuntimeError) as error:
            # No process, thread or disk space is available now.
            self._restart(watch, f"{type(error).__name__}: {error}")

    def _step(self, watch: Watch) -> None:
        now_s = time.monotonic()
        if watch.start_at:
            if now_s >= watch.start_at:
                watch.start_at = 0.0
                watch.process.start()
                watch.reported_at = now_s
            return
        reason = watch.process.exit_reason()
        if reason is not None:
            self._restart(watch, reason, stalled=watch.process.aborted())
        elif watch.ready:
            self._look_after(watch, now_s)
        elif watch.process.ready():
            self._set_ready(watch, now_s)
        elif (refused := watch.process.refused()) is not None:
            self._restart(watch, refused)
        elif (stalled := watch.process.stalled()) is not None:
            self._restart(watch, stalled, stalled=True)
        elif watch.process.loading_s > self.options.load_timeout_s:
            limit = self.options.load_timeout_s
            self._restart(watch, f"not ready after {limit:g} s; the log is {watch.process.output}")
        elif now_s - watch.reported_at >= _PROGRESS_S:
            watch.reported_at = now_s
            progress = watch.process.progress()
            self._report(watch, f"loading for {watch.process.loading_s:.0f} s; {progress}")

    def _look_after(self, watch: Watch, now: float) -> None:
        if watch.failures and now - watch.ready_since > STEADY_S:
            watch.failures = 0
        sick = watch.process.health_problem()
        if sick is not None:
            end = now + _ANSWERS_S
            while watch.process.in_flight() and time.monotonic() < end:
                self._closing.wait(0.05)
            self._restart(watch, sick)

    def _set_ready(self, watch: Watch, now: float) -> None:
        watch.ready_since = now
        after_s = watch.process.loaded_in_s = watch.process.loading_s
        problem = watch.process.finish_start()
        if problem is not None:
            self._report(watch, problem)
        self._report(watch, f"ready after {after_s:.0f} s")
        watch.process.log.write(logging.INFO, "ready", "ready", after_s=round(after_s, 1))
        with self._changed:
            watch.ready = True
            self._changed.notify_all()

    def _restart(self, watch: Watch, reason: str, *, stalled: bool = False) -> None:
        """Kill a worker and plan its next start.

        `stalled`: True if the machine is to blame, and not the worker's options.
        """
        never_served = watch.ready_since == 0.0
        will_retry = stalled and watch.failures + 1 < _STALLED_STARTS
        given_up = never_served and not will_retry
        with self._changed:
            watch.ready = False
            if given_up:
                self._failure = ServeError(f"{watch.process.name}: {reason}")
            self._changed.notify_all()
        watch.process.kill()
        pause = self._backoff_s[min(watch.failures, len(self._backoff_s) - 1)]
        watch.failures += 1
        if not never_served:
            watch.process.restarts += 1
        watch.start_at = time.monotonic() + pause
        log = watch.process.log
        if given_up:
            log.write(logging.ERROR, "failed to start", "failed", reason=reason)
        else:
            self._report(watch, f"failed: {reason}; restarting in {pause:g} s")
            fields = {"reason": reason, "restart_in_s": pause}
            log.write(logging.ERROR, "failed; restarting", "failed", **fields)

    # Other.

    def _await_ready(self, until: Callable[[], bool]) -> None:
        with self._changed:
            while not all(watch.ready for watch in self._watches):
                if self._failure is not None:
                    raise self._failure
                if until():
                    return
                # Short waits: nobody notifies of changes of `until`.
                self._changed.wait(_TICK_S)

    def _look_away(self) -> None:
        """Stop all restarts, and wait until the thread has noticed."""
        self._closing.set()
        if self._thread is not None:
            self._looking_away.wait()

    def _end_thread(self) -> None:
        for spec in self._specs[:1]:  # all share one service, which cannot outlive the thread
            if spec.mps is not None:
                spec.mps.stop()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _remove_files(self) -> None:
        for process in self._processes():
            process.remove_files()
        for folder in folders_of(self._files()):
            for shared in ("entries", "adapters", "values"):
                shutil.rmtree(folder / shared, ignore_errors=True)
            try:
                folder.rmdir()
            except OSError:
                pass  # `stop` or `kill` is removing a worker's folder
        with self._changed:
            locks, self._locks = self._locks, []
        for file in locks:
            os.close(file)

    def _processes(self) -> list[Process]:
        router = [] if self.router is None else [self.router]
        return [*self.workers, *router, *self.services]

    def _files(self) -> list[WorkerFiles]:
        return [spec.files for spec in self._specs]

    def _report_once(self, watch: Watch, surprise: str) -> None:
        if surprise != watch.surprise:
            watch.surprise = surprise
            self._report(watch, surprise)

    def _report(self, watch: Watch, message: str) -> None:
        watch.process.report(message)
