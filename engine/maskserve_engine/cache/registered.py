"""Files of the host tier that a CUDA device reads itself: they are mapped and registered with it.

A file on a tmpfs is memory. After cudaHostRegister its pages stay in place, and the device copies
from them over its link. Truncating such a file ends no process, because the pages are pinned and
only the device reads the mapping. A registration ends when the file is closed everywhere and its
last copy is done. A separate thread waits for that, so that neither the engine nor the loader
does.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: for every context of the process."""
_log = logging.getLogger(__name__)


class HostRegister(Protocol):
    """Functions of the CUDA runtime that register memory (`torch.cuda.cudart()`). Both return 0 or
    an error number.
    """

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any: ...  # noqa: N802

    def cudaHostUnregister(self, address: int) -> Any: ...  # noqa: N802


class Passing(Protocol):
    def synchronize(self) -> None: ...


class _Mapping:
    def __init__(self, memory: Tensor) -> None:
        self.memory: Tensor | None = memory
        self.last: Passing | None = None


class Registered:
    """A file that a device can read, registered while this object lives."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping

    @property
    def memory(self) -> Tensor | None:
        """[bytes] uint8, for copies to the device alone; None once the registrar is closed."""
        return self._mapping.memory

    def record_copy(self, event: Passing) -> None:
        """Note that the device reads the file until `event` passes; events pass in call order."""
        self._mapping.last = event


class Registrar:
    """Registers files with one device; after one refusal it registers no more.

    Args:
        device: device that reads the files.
        runtime: CUDA runtime; None: torch's.
    """

    def __init__(self, device: torch.device, runtime: HostRegister | None = None) -> None:
        self._device = device
        self._runtime: HostRegister = runtime or torch.cuda.cudart()
        self._live: set[_Mapping] = set()
        self._left: queue.SimpleQueue[_Mapping | None] = queue.SimpleQueue()
        """Released mappings. Finalizers add to it at any moment and on any thread, so this queue
        must take no lock.
        """
        self._lock = threading.Lock()
        """Guards the registrations and the thread's start."""
        self._thread: threading.Thread | None = None
        self._off = False

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(
                mapping.memory.nbytes for mapping in self._live if mapping.memory is not None
            )

    def register(self, descriptor: int, nbytes: int) -> Registered | None:
        """Map and register an open file on a tmpfs; None: it must be read like other files."""
        if self._off or not nbytes:
            return None
        try:
            memory = _mapped(descriptor, nbytes)
        except OSError as error:
            self._refuse(error.strerror or str(error))
            return None
        failed = int(self._runtime.cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE))
        if failed:
            self._refuse(f"cudaHostRegister: error {failed}")
            self._forget_error()
            return None
        mapping = _Mapping(memory)
        registered = Registered(mapping)
        weakref.finalize(registered, self._left.put, mapping).atexit = False
        with self._lock:
            self._live.add(mapping)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unregister", daemon=True)
                self._thread.start()
        return registered

    def close(self) -> None:
        """End every registration, also of files in use; no copies may follow."""
        self._off = True
        if self._thread is not None:
            self._left.put(None)
            self._thread.join(10.0)
        with self._lock:
            mappings = list(self._live)
        for mapping in mappings:
            self._end(mapping)

    def _run(self) -> None:
        while (mapping := self._left.get()) is not None:
            self._end(mapping)

    def _end(self, mapping: _Mapping) -> None:
        with self._lock:
            if mapping not in self._live:
                return
            self._live.remove(mapping)
        assert mapping.memory is not None
        try:
            if mapping.last is not None:
                mapping.last.synchronize()
            failed = int(self._runtime.cudaHostUnregister(mapping.memory.data_ptr()))
        except RuntimeError as error:  # the device is lost with its registrations
            _log.warning("a file of the host tier could not be unregistered: %s", error)
        else:
            if failed:
                _log.warning("cudaHostUnregister: error %d", failed)
                self._forget_error()
        mapping.memory = mapping.last = None  # the last reference to the mapping ends it

    def _refuse(self, why: str) -> None:
        self._off = True
        _log.warning(
            "files of the host tier are copied by this process, not by the device: %s", why
        )

    def _forget_error(self) -> None:
        """Clear CUDA's pending error; otherwise the next kernel of this thread would report the
        refusal again.
        """
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device).add_(1)


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Map `nbytes` bytes of an open file, whose name may have changed.

    Raises:
        OSError: the file is shorter, or not writable. (Nobody writes to it, but pages are
            registered for reading and writing.)
    """
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(writable).st_size < nbytes:
            raise OSError("the file was truncated while it was open")
        return torch.frombuffer(mmap.mmap(writable, nbytes), dtype=torch.uint8)
    finally:
        os.close(writable)


def on_tmpfs(folder: str) -> bool:
    """Whether files in a folder are memory."""
    path, best = Path(folder).resolve(), ("", "")
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, at, kind, *_ = line.split()
            at = at.encode().decode("unicode_escape")  # \040 for a space
            # If there are two mounts at a place, the later one is visible.
            if path.is_relative_to(at) and len(at) >= len(best[0]):
                best = at, kind
    return best[1] == "tmpfs"
