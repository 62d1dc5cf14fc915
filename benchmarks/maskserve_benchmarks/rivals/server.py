"""A Triton server of rivals, which it loads and unloads on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as grpc_client

import maskserve_benchmarks
from maskserve_serving.command import TUNING, environment
from maskserve_serving.options import default_cache_dir
from maskserve_serving.ports import Ports, free_base_port
from maskserve_serving.runtime import find_runtime

_START_S = 120.0
_END_S = 60.0
_POLL_S = 0.05
_MODEL = """\
import sys, triton_python_backend_utils as pb_utils

sys.path.insert(0, {path!r})

from maskserve_benchmarks.rivals.pipeline_model import PipelineModel


class TritonPythonModel(PipelineModel):
    def __init__(self):
        super().__init__(pb_utils)
"""


@dataclass(frozen=True, slots=True)
class Rival:
    """A tuned model of `pipeline_model`."""

    name: str
    mode: str
    batch: int = 8
    """`max_batch_size`."""
    delay_ms: int = 0
    """How long a batch waits for more requests."""
    instances: int = 1
    threads: int = 2
    """Number of torch threads of each instance."""
    threshold: float = 0.0
    loras: str = ""
    """Folder of LoRAs to load at start; empty: none."""
    nets: str = ""
    """Folder of ControlNets to load at start; empty: none."""

    def config(self, model: Path) -> str:
        """Return its config.pbtxt."""
        inputs = "".join(
            f'input {{ name: "{name}" data_type: TYPE_STRING dims: [1] }}\n'
            for name in ("IMAGE", "MASK", "PROMPT", "SETTINGS")
        )
        # Requests with other numbers of pictures may share a batch.
        inputs += (
            'input { name: "CONTROL" data_type: TYPE_STRING dims: [-1] optional: true '
            "allow_ragged_batch: true }\n"
        )
        outputs = "".join(
            f'output {{ name: "{name}" data_type: TYPE_STRING dims: [1] }}\n'
            for name in ("IMAGE", "META")
        )
        parameter_values = {
            "model": model,
            "mode": self.mode,
            "threads": self.threads,
            "threshold": self.threshold,
            "loras": self.loras,
            "nets": self.nets,
        }
        parameters = "".join(
            f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
            for key, value in parameter_values.items()
        )
        return (
            f'name: "{self.name}"\nbackend: "python"\nmax_batch_size: {self.batch}\n'
            f"dynamic_batching {{ max_queue_delay_microseconds: {1000 * self.delay_ms} }}\n"
            f"instance_group {{ count: {self.instances} kind: KIND_CPU }}\n"
            f"{inputs}{outputs}{parameters}"
        )


class RivalServer:
    """Address of the rivals, of which one serves at a time."""

    def __init__(self, ports: Ports) -> None:
        self.grpc = f"127.0.0.1:{ports.grpc}"
        self._client = grpc_client.InferenceServerClient(self.grpc)

    def ready(self) -> bool:
        try:
            return bool(self._client.is_server_ready())
        except grpc_client.InferenceServerException:
            return False

    @contextmanager
    def serving(self, rival: Rival) -> Iterator[None]:
        """Make the rival take edits while the context lasts; its processes have ended after it.

        Raises:
            RuntimeError: they do not end.
        """
        self._client.load_model(rival.name)
        try:
            yield
        finally:
            self._client.unload_model(rival.name)
            self._wait_unloaded(rival.name)

    def _wait_unloaded(self, name: str) -> None:
        """Wait until a model's processes have ended. Triton answers an unload at once, and then
        ends them one after the other: seconds of a core that the next system's run would lack.
        """
        end = time.monotonic() + _END_S
        while any(
            model.name == name and model.state == "UNLOADING"
            for model in self._client.get_model_repository_index().models
        ):
            if time.monotonic() > end:
                raise RuntimeError(f"the rivals' Triton does not unload {name}")
            time.sleep(_POLL_S)


@contextmanager
def rival_server(model: Path, rivals: Sequence[Rival], folder: Path) -> Iterator[RivalServer]:
    """Run a Triton of the same build as maskserve's.

    Args:
        model: model folder in diffusers' format; all rivals serve it.
        rivals: the rivals that can be loaded.
        folder: folder for the repository and the log.

    Raises:
        RuntimeError: Triton does not start.
    """
    repository = folder / "repository"
    source = _MODEL.format(path=str(Path(maskserve_benchmarks.__file__).parents[1]))
    for rival in rivals:
        (repository / rival.name / "1").mkdir(parents=True)
        (repository / rival.name / "config.pbtxt").write_text(rival.config(model), encoding="utf-8")
        (repository / rival.name / "1" / "model.py").write_text(source, encoding="utf-8")
    runtime = find_runtime(None, default_cache_dir())
    ports = Ports.of_worker(free_base_port(), 0)
    command = [
        str(runtime.binary),
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--http-address=127.0.0.1",
        f"--http-port={ports.http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={ports.grpc}",
        "--allow-metrics=false",
        f"--backend-config=python,shm-region-prefix-name=rivals{ports.http}",
        "--backend-config=python,stub-timeout-seconds=120",
    ]
    if runtime.backends is not None:
        command.append(f"--backend-directory={runtime.backends}")
    env = environment(runtime, Path(os.devnull), None) | TUNING
    with (folder / "triton.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            server, end = RivalServer(ports), time.monotonic() + _START_S
            while not server.ready():
                if process.poll() is not None or time.monotonic() > end:
                    log_tail = (folder / "triton.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the rivals' Triton does not start: {log_tail}")
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            print("the rivals' Triton has ended", file=sys.stderr)
