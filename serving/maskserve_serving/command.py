"""tritonserver's arguments and environment for one worker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from maskserve_common import transport
from maskserve_common.config import Config
from maskserve_serving.errors import ServeError
from maskserve_serving.interpreter import ignored_folders, stub_programs
from maskserve_serving.options import CLOSED_APIS, ServeOptions
from maskserve_serving.ports import Ports
from maskserve_serving.runtime import Runtime

# Seconds that Triton waits for requests after SIGTERM. The drain comes before, within the
# configured grace, so nothing is in flight any more.
EXIT_TIMEOUT_S = 10
_MEBIBYTE = 2**20
_OF_CUDA = ("libcudart.so*", "libcublas.so*", "libcudnn.so*", "libnccl.so*")
NO_HEADER = "Never:sent"
"""A header that no request can contain: a name ends at its colon in HTTP/1.1, and HTTP/2 allows
neither a colon nor a capital in it."""
# Calls between models other than edits: cancels, operations of control.
_OTHER_CALLS = 16


def command(
    options: ServeOptions,
    config: Config,
    runtime: Runtime,
    ports: Ports,
    shm_prefix: str,
    trace: Sequence[str] = (),
    models: Sequence[str] = (),
) -> list[str]:
    """Return the command line.

    `trace` are arguments for traces, `models` the models to load; without any, all are loaded.
    """
    python = {
        "shm-region-prefix-name": shm_prefix,
        # Per stub process; regions grow by what a request needs and never shrink.
        "shm-default-byte-size": 2 * _MEBIBYTE,
        "shm-growth-byte-size": 4 * _MEBIBYTE,
        # Importing torch in four processes at once takes a small machine most of a minute.
        "stub-timeout-seconds": int(options.load_timeout_s),
        # Each edit of a front holds one thread while it runs. The default is 32: further edits, and
        # the cancels of all, would wait outside the engine.
        "thread-pool-size": config.engine.front_threads + _OTHER_CALLS,
    }
    arguments = [
        *(f"--model-repository={path}" for path in _repositories(options, config)),
        # Every config.pbtxt is complete; auto-complete would import every model twice.
        "--disable-auto-complete-config",
        f"--http-address={options.host}",
        f"--http-port={ports.http}",
        f"--grpc-address={options.host}",
        f"--grpc-port={ports.grpc}",
        *transport.TRITON,
        f"--metrics-address={options.host}",
        f"--metrics-port={ports.metrics}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        "--exit-on-error=true",
        "--strict-readiness=true",
        *(f"--backend-config=python,{key}={value}" for key, value in python.items()),
    ]
    if models:
        arguments += ["--model-control-mode=explicit", *(f"--load-model={x}" for x in models)]
    if runtime.backends is not None:
        arguments.append(f"--backend-directory={runtime.backends}")
    if closed := [api for api in CLOSED_APIS if api not in options.open_apis]:
        # Triton takes the header that opens these APIs only on its command line, where every user
        # of the host can read it. It is therefore one that no request can contain (docs/deploy.md).
        only = f"{','.join(closed)}:{NO_HEADER}={secrets.token_hex(16)}"
        arguments += [f"--http-restricted-api={only}", f"--grpc-restricted-protocol={only}"]
    return [str(runtime.binary), *arguments, *trace, *options.triton_args]


def _repositories(options: ServeOptions, config: Config) -> list[Path]:
    """Return the repositories of the models to load.

    Raises:
        ServeError: the operator's safety repository lacks its model.
    """
    safety_repository = config.safety.repository
    if not safety_repository:
        return list(options.repositories)
    name = config.safety.model
    if not name or not (Path(safety_repository) / name / "config.pbtxt").is_file():
        raise ServeError(
            f"safety.repository: {safety_repository} has no model {name!r} with a config.pbtxt"
        )
    return [*options.repositories, Path(safety_repository).absolute()]


TUNING = {
    # By default, glibc gives large blocks back to the kernel at every free, and each activation is
    # one: pages are faulted in and zeroed again at every operation.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_ARENA_MAX": "1",  # otherwise arenas of other threads give heaps back
    # Threads of one operation wait for one another by spinning. If other programs need the cores, a
    # step takes many times as long; after this many turns threads sleep instead.
    "GOMP_SPINCOUNT": "5000",
    # Activations change size with every mask: segments that grow leave no gaps behind.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment variables that are read when a process starts; existing ones win."""


def environment(
    runtime: Runtime,
    config: Path,
    gpus: str | None,
    cache: Path | None = None,
) -> dict[str, str]:
    """Return the environment of a worker and its models.

    Args:
        runtime: the Triton server.
        config: configuration file of the worker.
        gpus: CUDA_VISIBLE_DEVICES; None keeps the host's.
        cache: folder for compiled kernels and the stubs' interpreter, which outlive the worker;
            None: none.
    """
    env = {**TUNING, **os.environ}
    if cache is not None:  # machine code of our own kernels
        env.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    if "PYTORCH_CUDA_ALLOC_CONF" in env and "PYTORCH_ALLOC_CONF" not in os.environ:
        del env["PYTORCH_ALLOC_CONF"]  # an older name of the variable
    env.update(
        MASKSERVE_CONFIG=str(config),
        # The model is a local folder by now; a worker must not use the network.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
        # numpy's own threads would only compete with the denoiser.
        OPENBLAS_NUM_THREADS="1",
        PYTHONUNBUFFERED="1",
        # The stub finds its interpreter, and with it the virtual environment, by PATH.
        PATH=os.pathsep.join(
            [str(stub_programs(ignored_folders(), cache)), env.get("PATH", os.defpath)]
        ),
    )
    # Triton's own come first; the driver's and Python's may lie in the host's folders.
    of_host = without_cuda(env.pop("LD_LIBRARY_PATH", ""))
    if path := _joined(*runtime.libraries, of_host):
        env["LD_LIBRARY_PATH"] = path
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return env


def gpus_of_worker(
    index: int, workers: int, *, per_worker: int = 1, share: bool = False
) -> str | None:
    """Return CUDA_VISIBLE_DEVICES of a worker; None: there are no GPUs.

    Args:
        index: index of the worker.
        workers: number of workers on this host.
        per_worker: devices that a worker uses.
        share: True if workers may share devices.

    Raises:
        ServeError: there are fewer devices than a worker uses, or than all workers use without
            sharing.
    """
    devices = visible_gpus()
    if devices and per_worker > len(devices):
        raise ServeError(
            f"--devices-per-worker: {per_worker} GPUs are more than a worker can see; "
            f"{len(devices)} are visible"
        )
    if devices and workers * per_worker > len(devices) and not share:
        raise ServeError(
            f"--workers: {workers} workers of {per_worker} GPU(s) on {len(devices)} GPU(s) would "
            "load models on the same ones; say --share-gpus if that is meant"
        )
    gpus = (
        [devices[(index * per_worker + i) % len(devices)] for i in range(per_worker)]
        if devices
        else []
    )
    return ",".join(gpus) or None


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device]
    listed = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(listed.glob("*"))))]


def without_cuda(path: str) -> str:
    """Return LD_LIBRARY_PATH without folders of CUDA's libraries.

    They would be loaded in place of torch's own. The driver's folder stays.
    """
    return _joined(*(folder for folder in path.split(os.pathsep) if not _has_cuda(folder)))


def _has_cuda(folder: str) -> bool:
    return bool(folder) and any(any(Path(folder).glob(name)) for name in _OF_CUDA)


def _joined(*parts: Path | str | None) -> str:
    return os.pathsep.join(str(part) for part in parts if part)
