"""`maskserve serve --mps`: NVIDIA's Multi-Process Service for the workers of this host.

Encoder, denoiser and decoder of a worker are processes of their own. Without the service a GPU
gives itself wholly to one process at a time, in slices of about two milliseconds; with it, kernels
of all of them run beside each other (docs/adr/0096-processes-of-one-gpu.md).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from maskserve_serving.command import visible_gpus
from maskserve_serving.errors import ServeError
from maskserve_serving.process import spawn

PROGRAM = "nvidia-cuda-mps-control"
_START_S = 10.0
_STOP_S = 10.0
_POLL_S = 0.05


class Mps:
    """The service's control daemon, which starts a server when a client comes.

    Args:
        run_dir: the supervisor's folder, by which the service is found if the supervisor is killed.
        log_dir: folder of the service's own logs.

    Raises:
        ServeError: the program is missing.
    """

    def __init__(self, run_dir: Path, log_dir: Path) -> None:
        self._run_dir, self._program = run_dir, _program()
        self._variables = {
            "CUDA_MPS_PIPE_DIRECTORY": str(run_dir / "mps"),
            "CUDA_MPS_LOG_DIRECTORY": str(log_dir.absolute() / "mps"),
        }
        self._daemon: subprocess.Popen[bytes] | None = None

    def client_variables(self) -> dict[str, str]:
        """Return the environment variables of clients. Starts the service unless it runs.

        The service ends with the thread that calls this first.

        Raises:
            ServeError: it does not start.
        """
        if self._daemon is None or self._daemon.poll() is not None:
            self._start()
        return self._variables

    def _start(self) -> None:
        shutil.rmtree(self._variables["CUDA_MPS_PIPE_DIRECTORY"], ignore_errors=True)
        for folder in self._variables.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        command, env = [self._program, "-f"], self._environment()
        self._daemon = spawn(command, env, self._run_dir, subprocess.DEVNULL)
        end = time.monotonic() + _START_S
        while not self._answers("get_server_list"):
            if self._daemon.poll() is not None or time.monotonic() > end:
                self.stop()
                logs = self._variables["CUDA_MPS_LOG_DIRECTORY"]
                raise ServeError(f"--mps: {PROGRAM} does not start; its logs are in {logs}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the service. Its clients have ended."""
        if self._daemon is None:
            return
        if self._daemon.poll() is None:
            self._answers("quit")
            with suppress(subprocess.TimeoutExpired):
                self._daemon.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._daemon.pid, signal.SIGKILL)
        self._daemon.wait()
        shutil.rmtree(self._variables["CUDA_MPS_PIPE_DIRECTORY"], ignore_errors=True)

    def _answers(self, command: str) -> bool:
        """Return True if the daemon obeys a command."""
        try:
            answer = subprocess.run(
                [self._program],
                input=command.encode(),
                env=self._environment(),
                capture_output=True,
                timeout=_STOP_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return answer.returncode == 0

    def _environment(self) -> dict[str, str]:
        """Return the daemon's environment. It sees all GPUs: a client names its own by the host's
        numbers.
        """
        env = {**os.environ, **self._variables}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        return env


def check_mps() -> None:
    """Check that this host can run the service.

    Raises:
        ServeError: it has no GPU, or the program is missing.
    """
    if not visible_gpus():
        raise ServeError("--mps: no GPU is visible, and MPS is for processes that share one")
    _program()


def _program() -> str:
    program = shutil.which(PROGRAM)
    if program is None:
        raise ServeError(f"--mps: {PROGRAM} is missing; it comes with NVIDIA's driver")
    return program
