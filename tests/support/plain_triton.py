"""A tritonserver with a worker's models and without our supervisor, as in docs/deploy.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports, free_base_port
from maskserve_serving.runtime import find_runtime
from tests.support.eventually import eventually


@dataclass(frozen=True)
class PlainWorker:
    """The addresses of the worker."""

    model: Path
    ports: Ports

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.metrics}/metrics"


@contextmanager
def plain_triton(model: Path, tables: str, folder: Path) -> Iterator[PlainWorker]:
    """Start tritonserver with a worker's models.

    Args:
        model: folder of the model.
        tables: further tables of its configuration.
        folder: an empty folder for its files.
    """
    config, log = folder / "worker.toml", folder / "triton.log"
    config.write_text(f'runtime_dir = "{folder / "run"}"\n\n[model]\npath = "{model}"\n{tables}')
    triton = find_runtime(None, ServeOptions(model="").cache_dir)
    worker = PlainWorker(model, Ports.of_worker(free_base_port(), 0))
    command = [
        triton.binary,
        *("--model-repository=model_repository", "--model-repository=ensemble"),
        *(f"--http-port={worker.ports.http}", f"--grpc-port={worker.ports.grpc}"),
        f"--metrics-port={worker.ports.metrics}",
        "--backend-config=python,stub-timeout-seconds=300",
        *([f"--backend-directory={triton.backends}"] if triton.backends else ()),
    ]
    env = {
        "HOME": os.environ["HOME"],
        "MASKSERVE_CONFIG": str(config),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, triton.libraries)),
    }
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=file, stderr=file)
    try:
        eventually("Triton is ready", lambda: _is_ready(server, worker.http_url), 240)
        yield worker
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    assert code == 0, log.read_text(errors="replace")


def _is_ready(server: subprocess.Popen[bytes], url: str) -> bool:
    assert server.poll() is None, "Triton has ended"
    try:
        with urlopen(f"{url}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
