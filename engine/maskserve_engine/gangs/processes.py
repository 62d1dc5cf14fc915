"""The ranks' processes: start, calls, supervision and replacement."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch
from msgspec.structs import replace

from maskserve_common.child import start_child
from maskserve_common.config import Config, ConfigError, cores
from maskserve_common.liveness import process_unwell
from maskserve_engine.gangs.messages import (
    Hello,
    RankAnswer,
    RankCall,
    RankLostError,
    pack,
    receive,
    send,
)
from maskserve_engine.stages.loader import device_of

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_LOAD_S = 900.0
"""Seconds in which a rank loads the model."""


class RankProcess:
    """One rank. It runs calls in their order.

    Args:
        device: number of its device in the worker.
        on_lost: called once, on another thread, when the process has ended.
    """

    def __init__(self, config: Config, device: int, on_lost: Callable[[], None]) -> None:
        self.device, self._on_lost = device, on_lost
        self._process, self._pipe = start_child("maskserve_engine.gangs.rank", _visible(device))
        self._lock = threading.Lock()
        self._number = 0
        """Number of the last call."""
        self.hello: Future[Hello] = Future()
        self._open: dict[int, Future[Any]] = {0: self.hello}
        """Calls without an answer."""
        self.ended = False
        send(self._pipe, _rank_config(config))
        threading.Thread(target=self._read, name=f"rank {device}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, verb: str, *arguments: object) -> Future[Any]:
        """Call a method of `rank.Rank`; the future fails with RankLostError if the process ends
        first.
        """
        future: Future[Any] = Future()
        with self._lock:
            number = self._number + 1
            try:
                message = pack(RankCall(number, verb, arguments))
            except Exception as error:
                _log.exception("%s cannot be sent to a rank", verb)
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
                return future
            self._number = number
            self._open[number] = future
            try:
                if self.ended:
                    raise BrokenPipeError
                self._pipe.send_bytes(message)
            except OSError:
                del self._open[number]
                future.set_exception(RankLostError(f"rank {self.device} has ended"))
        return future

    def kill(self) -> None:
        """Kill the process; `on_lost` is called then."""
        with suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.wait()

    def _read(self) -> None:
        try:
            while True:
                answer: RankAnswer = receive(self._pipe)
                future = self._open.pop(answer.number)
                if answer.error:
                    future.set_exception(RuntimeError(answer.error))
                else:
                    future.set_result(answer.value)
        except (EOFError, OSError):
            pass
        self._process.kill()  # a process that does not listen is of no use
        self._process.wait()
        with self._lock:
            self.ended = True
            pending, self._open = list(self._open.values()), {}
        for future in pending:
            with suppress(InvalidStateError):
                future.set_exception(RankLostError(f"rank {self.device} has ended"))
        self._on_lost()


class RankProcesses:
    """All ranks of a worker, each after its first message.

    Raises:
        ConfigError: one of them could not be started.
    """

    def __init__(self, config: Config) -> None:
        self._folder = ""
        if config.cache.enabled and not (config.cache.host_dir or config.cache.disk_dir):
            # Ranks exchange entries by files.
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self._folder = tempfile.mkdtemp(prefix="maskserve-entries-", dir=memory)
            config = replace(config, cache=replace(config.cache, host_dir=self._folder))
        self._config = config
        self.on_lost: Callable[[RankProcess], None] = lambda process: None
        """Called on another thread with each process that has ended."""
        self._closed = threading.Event()
        self.processes = [self.start(device) for device in range(config.engine.devices)]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        try:
            hellos = [rank_process.hello.result(_LOAD_S) for rank_process in self.processes]
        except Exception as error:
            self.close()
            raise ConfigError(f"[engine] devices: a rank did not start: {error}") from error
        self.hello = hellos[0]

    @property
    def scheduling_config(self) -> Config:
        """Configuration of the process that only schedules: the model's shape without weights, with
        the settings that follow from the ranks' device.
        """
        model, cache = self._config.model, self._config.cache
        shape = replace(
            model,
            device="meta",
            dtype=self.hello.dtype,
            weights="bf16",
            fuse_loras=(),
        )
        engine = replace(self._config.engine, warm_up=False)
        cache = replace(cache, own_format=cache.refresh_format_on(device_of(self._config).type))
        return replace(self._config, model=shape, engine=engine, cache=cache)

    def start(self, device: int) -> RankProcess:
        """Start a process for a device; its first message comes later."""
        process = RankProcess(self._config, device, lambda: self._lost(process))
        return process

    def close(self) -> None:
        self._closed.set()
        for process in self.processes:
            process.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _lost(self, process: RankProcess) -> None:
        if not self._closed.is_set():
            self.on_lost(process)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            for process in self.processes:
                wrong = None if process.ended else process_unwell(process.pid)
                if wrong is not None:
                    _log.error("rank %d %s; it is replaced", process.device, wrong)
                    process.kill()


def _rank_config(config: Config) -> Config:
    """Return the configuration of a rank: the first device is the only one that it sees, and it
    gets its share of the threads.
    """
    model = config.model
    threads = max(1, (model.torch_threads or cores()) // config.engine.devices)
    return replace(
        config, model=replace(model, device=model.device.partition(":")[0], torch_threads=threads)
    )


def _visible(device: int) -> dict[str, str]:
    """Return environment variables with which a process sees one GPU of this process's."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # all, if there are any: an unknown name is an error
        return {"CUDA_VISIBLE_DEVICES": str(device)} if torch.cuda.device_count() else {}
    listed = [name for name in visible.split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": listed[device] if device < len(listed) else visible}
