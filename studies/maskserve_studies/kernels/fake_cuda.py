"""A fake CUDA device that computes nothing, to count on any machine what the engine would run.

Tensors have shapes, dtypes and the device `cuda`, but no memory (torch's FakeTensorMode). Every
operation on them is logged (`launch_log`). A tensor on the wrong device raises, as on a real GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)

from maskserve_engine.batch.graphs import CudaCapture
from maskserve_engine.cache.loader import LinkRates
from maskserve_engine.fitting import entry_store
from maskserve_engine.layers import kernels
from maskserve_engine.planning.cost_model import H100
from maskserve_engine.stages import device_probe
from maskserve_studies.kernels.launch_log import Log, Recorder, place_of

DEVICE = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # c10/core/DeviceType.h
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_PATIENCE_S = 60.0
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    warp_size=32,
    multi_processor_count=132,
    clock_rate=1_830_000,
    regs_per_multiprocessor=65536,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    gcnArchName="",
)
"""Properties that the device reports."""
_MEMORY = 80 * 2**30
_real_numpy = Tensor.numpy


def _numpy(tensor: Tensor) -> Any:
    """Return zeros in place of a fake tensor, for copies to the host."""
    if isinstance(tensor, FakeTensor):
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return _real_numpy(tensor)


class FakeEvent:
    """An event. The device passes it when `FakeCuda.catch_up` is called, or when the thread that
    drives the device waits for it; until then all methods but `query` wait. Events are a
    millisecond apart.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._number = 0

    def record(self, stream: object = None) -> None:
        self._number = next(self._cuda.events)

    def query(self) -> bool:
        return self._number <= self._cuda.passed

    def synchronize(self) -> None:
        if not self.query():
            self._cuda.log_wait("an event")
            self._cuda.reach(self._number)

    def elapsed_time(self, end: FakeEvent) -> float:
        if not end.query():
            self._cuda.log_wait("the time between two events")
        return float(end._number - self._number)


class _FakeStream:
    def __init__(self, device: object = None) -> None:
        self.device = device
        """The device of the stream; all streams are the same."""

    def wait_event(self, event: FakeEvent) -> None:
        """Do nothing: the device waits, not the host."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing: the device waits, not the host."""


class _FakeGraph:
    """Does not log what is captured; a launch counts as one kernel."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self._captured = self._cuda.watch()
        self._captured.__enter__()

    def capture_end(self) -> None:
        self._captured.__exit__(None, None, None)

    def replay(self) -> None:
        self._cuda.log.kernels["a graph"] += 1
        self._cuda.log.places[place_of(sys._getframe(1))] += 1


class FakeCuda:
    """Inside this context, tensors on `cuda` are fake and their operations are logged. The device
    reports that it is an H100.

    Args:
        triton: whether the Triton package for the engine's own kernels counts as installed.
    """

    def __init__(self, *, triton: bool = True) -> None:
        _register_guard()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._recorder = Recorder(self.fake)
        self.events, self.passed = itertools.count(1), 0
        """Numbers for events, and the last event that the device has passed."""
        self._progress, self._thread = threading.Condition(), threading.get_ident()
        attributes: dict[str, Any] = {
            "get_device_capability": lambda _=None: (9, 0),
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "_exchange_device": lambda _: 0,
            "_maybe_exchange_device": lambda _: 0,
            "get_device_name": lambda _=None: PROPERTIES.name,
            "get_device_properties": lambda _=None: PROPERTIES,
            "mem_get_info": lambda _=None: (_MEMORY, _MEMORY),
            "current_stream": lambda _=None: _FakeStream(),
            "default_stream": lambda _=None: _FakeStream(),
            "Stream": _FakeStream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: _FakeGraph(self),
            "graph_pool_handle": lambda: (0, 0),
            "Event": lambda **_: FakeEvent(self),
        }
        self._patches = [
            patch.object(torch.cuda, name, value) for name, value in attributes.items()
        ]
        # Fake tensors hold no results to compare.
        self._patches.append(patch.object(CudaCapture, "checks", False))
        self._patches.append(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        self._patches.append(patch.object(Tensor, "numpy", _numpy))
        self._patches.append(patch.object(torch.backends.cudnn, "is_available", lambda: True))
        self._patches.append(patch.object(kernels, "missing_for_launches", lambda: None))
        if not triton:
            self._patches.append(patch.object(kernels, "missing_triton", lambda: "not installed"))
        # Fake operations take no time that a probe could measure.
        self._patches.append(patch.object(device_probe, "probed", lambda peak, *_: peak))
        rates = LinkRates(gathered=H100.link_bytes, direct=0.0)
        self._patches.append(patch.object(entry_store, "measure_rates", lambda *_, **__: rates))
        self._patches.append(patch.object(entry_store, "on_tmpfs", lambda folder: False))
        # Torch asks `is_available` whether it may first make a real tensor there.
        has_no_gpu = not torch.cuda.is_available()
        self._patches.append(patch.object(FakeTensorMode, "avoid_device_init", has_no_gpu))

    def catch_up(self) -> None:
        """Let the device finish everything requested so far."""
        with self._progress:
            self.passed = next(self.events)
            self._progress.notify_all()

    def reach(self, event: int) -> None:
        """Wait for the device. If this is the thread that drives it, it catches up to the event."""
        with self._progress:
            if threading.get_ident() == self._thread:
                self.passed = max(self.passed, event)
                self._progress.notify_all()
                return
            assert self._progress.wait_for(lambda: event <= self.passed, _PATIENCE_S), "no event"

    def log_wait(self, reason: str) -> None:
        """Log that the host waits, if this is the thread that drives the device; other threads may
        wait.
        """
        if threading.get_ident() != self._thread:
            return
        self._recorder.log.copies.append(
            f"{reason} in {place_of(sys._getframe(1))}, the host waits"
        )

    def __enter__(self) -> FakeCuda:
        for patched in self._patches:
            patched.start()
        kernels.has_kernels.cache_clear()
        self.fake.__enter__()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)  # type: ignore[no-untyped-call]
        self.fake.__exit__(*error)
        for patched in self._patches:
            patched.stop()
        kernels.has_kernels.cache_clear()

    @property
    def log(self) -> Log:
        """Return the current log."""
        return self._recorder.log

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Suspend the logging of single operations while the context lasts."""
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def watch(self) -> Iterator[Log]:
        """Log the operations inside the context."""
        previous_log, self._recorder.log = self._recorder.log, Log()
        try:
            yield self._recorder.log
        finally:
            self._recorder.log = previous_log


def _register_guard() -> None:
    """Let a torch build without CUDA index tensors that report `cuda` as their device.

    A CUDA build has this guard in FakeTensorMode. Here the guard of `meta`, which does nothing,
    takes its place. It knows no current device, so use DEVICE, never `cuda` alone.
    """
    if torch.version.cuda is not None:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    guards[_CUDA] = guards[_META]


def fake_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model made on `meta` fake parameters on `cuda`; call this inside FakeCuda."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                data = torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(data, requires_grad=False)
    return model.eval()
