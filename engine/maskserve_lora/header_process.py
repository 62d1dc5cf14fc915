"""Headers of LoRA files, read in a process of its own.

Anybody may have written the files, and the process that lists them also answers edits. Every part
of a header is bounded. An unexpected one costs only this process, for the time limit of one header,
and its file is not served.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from maskserve_common.child import start_child
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.lora_header import BadAdapter, read_header
from maskserve_lora.lora_plan import plan_of

log = logging.getLogger("maskserve")

_LIMIT_S = 10.0
"""Seconds for one header; the longest accepted one needs a tenth of it."""
_START_S = 120.0


class Bounds(msgspec.Struct, frozen=True):
    """First message to the process: the model and its limits."""

    model: str
    """Folder of the served model."""
    gguf: str
    """GGUF file with the transformer's weights; empty: they are in the folder."""
    max_bytes: int
    max_rank: int


class _HeaderRequest(msgspec.Struct, frozen=True):
    head: bytes
    nbytes: int
    config: bytes


class HeaderDescription(msgspec.Struct, frozen=True):
    """Description of a file by its header."""

    rank: int = 0
    parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    """Reason why the file is not served; empty if it is."""
    product_bytes: int = 0
    """As in `lora_header.LoraHeader`."""


class HeaderProcess:
    """Describes files in a child process, which starts with the first header and again after a
    header has ended it.

    Args:
        bounds: bounds of files.
        limit_s: seconds for one header.
        module: module to run; a test has a slow one.
    """

    def __init__(self, bounds: Bounds, limit_s: float = _LIMIT_S, module: str = __name__) -> None:
        self._bounds, self._limit_s, self._module = bounds, limit_s, module
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def describe(self, head: bytes, nbytes: int, config: bytes) -> HeaderDescription:
        """Describe a file by its header.

        Args:
            head: the file's first bytes, with its header.
            nbytes: length of the file.
            config: PEFT's adapter_config.json, or nothing.

        Raises:
            OSError: the process cannot be started.
        """
        with self._lock:
            _, pipe = self._running or self._start()
            try:
                pipe.send_bytes(msgspec.msgpack.encode(_HeaderRequest(head, nbytes, config)))
                if pipe.poll(self._limit_s):
                    return msgspec.msgpack.decode(pipe.recv_bytes(), type=HeaderDescription)
                why = f"takes longer than {self._limit_s:g} s to read"
            except (OSError, EOFError):
                why = "ends the process that reads it"
            self._end()
        log.warning("a header of %d bytes %s", len(head), why)
        return HeaderDescription(problem=f"has a header that {why}")

    def close(self) -> None:
        """End it; with the next header it is started again."""
        with self._lock:
            self._end()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._running = process, pipe = start_child(self._module, threads)
        pipe.send_bytes(msgspec.msgpack.encode(self._bounds))
        if not pipe.poll(_START_S) or pipe.recv_bytes() != b"ready":
            self._end()
            raise OSError("the process that reads headers does not start")
        return process, pipe

    def _end(self) -> None:
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            pipe.close()
            process.kill()
            process.wait()


def describe_header(
    head: bytes, nbytes: int, config: bytes, bounds: Bounds, base: BaseLayers
) -> HeaderDescription:
    """See `HeaderProcess.describe`."""
    try:
        header = read_header(
            lambda begin, end: head[begin:end],
            nbytes,
            max_bytes=bounds.max_bytes,
            max_rank=bounds.max_rank,
            config=config,
        )
        plan = plan_of(header, base)
    except BadAdapter as error:
        return HeaderDescription(problem=str(error))
    return HeaderDescription(
        header.rank, plan.parts, plan.notes, product_bytes=header.product_bytes
    )


def main() -> None:
    """Answer until the pipe ends."""
    pipe = Connection(int(sys.argv[1]))
    bounds = msgspec.msgpack.decode(pipe.recv_bytes(), type=Bounds)
    try:
        base, problem = BaseLayers.of_folder(bounds.model, bounds.gguf), ""
    except BadAdapter as error:
        base, problem = None, str(error)
    pipe.send_bytes(b"ready")
    while True:
        try:
            request = msgspec.msgpack.decode(pipe.recv_bytes(), type=_HeaderRequest)
        except EOFError:
            return
        description = HeaderDescription(problem=problem)
        if base is not None:
            description = describe_header(
                request.head, request.nbytes, request.config, bounds, base
            )
        pipe.send_bytes(msgspec.msgpack.encode(description))


if __name__ == "__main__":
    main()
