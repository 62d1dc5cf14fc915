"""A CUDA device that computes nothing: what the engine would run on one, counted on any machine.

Tensors have shapes, dtypes and the device `cuda`, but no memory (torch's FakeTensorMode), and every
operation on them is written down: kernels with the bytes they touch, copies between host and
device, and what would make the host wait. A tensor on the wrong device raises, as on a real GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DEVICE = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # c10/core/DeviceType.h
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_NO_KERNEL = ("empty", "new_empty", "detach")
"""Beginnings of names of operations that compute nothing."""
_ONE_KERNEL = ("linear.", "layer_norm.", "rms_norm.")
"""Operations made of others elsewhere, and of one kernel on CUDA."""
_NORMS = ("layer_norm.", "rms_norm.")
_GATHERS = ("index_select", "embedding", "index.Tensor")
"""Operations that read no more of their first tensor than they write."""
_SCATTERS = ("copy_", "index_copy_")
"""Operations that write no more of their first tensor than they read of their last."""
_PACKAGE = "maskserve_engine"
_PATIENCE_S = 60.0
_MEMORY = 80 * 2**30
WEIGHTS = "weights"
"""Among a log's bytes: what products read of the model."""


@dataclass
class Log:
    """What was asked of the device."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches by operation."""
    places: Counter[str] = field(default_factory=Counter)
    """Launches by the function of ours that asked: `module.function`."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes read and written, by the same; WEIGHTS apart."""
    copies: list[str] = field(default_factory=list)
    """Copies between host and device, each in words."""

    @property
    def launches(self) -> int:
        return self.kernels.total()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.log = fake, Log()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if _on_host(args, kwargs or {}):
            with unset_fake_temporarily():  # samplers compute their schedules there
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._fake, args), tree_map(self._fake, kwargs or {})
        name = str(func).removeprefix("aten.")
        if name.startswith("scaled_dot_product_attention"):
            out = torch.empty_like(args[0])  # CUDA's kernels keep the layout of the queries
        elif name.startswith("dropout."):
            return args[0]  # nothing is trained here
        else:
            if not name.startswith(_ONE_KERNEL):
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            out = func(*args, **kwargs)
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        self._write_down(name, func._schema.is_mutable, given, made, args, kwargs)
        return out

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, FakeTensor):
            return self.fake.from_tensor(x)
        x.constant = None
        return x

    def _write_down(
        self,
        name: str,
        writes: bool,
        given: list[Tensor],
        made: list[Tensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        if not any(t.is_cuda for t in (*given, *made)):
            return
        if name.startswith(_NO_KERNEL) or (not writes and _views(given, made)):
            return
        place = _place(sys._getframe(2))
        moved = {t.device.type for t in (*given, *made) if t.dim() or name.startswith("_to_copy")}
        if len(moved) > 1:
            words = " -> ".join(t.device.type for t in (given[-1], (*made, *given)[0]))
            asked = kwargs.get("non_blocking") or (name.startswith("copy_") and args[2:] == (True,))
            waits = "" if asked else ", the host waits"
            self.log.copies.append(f"{words} in {place} ({name}){waits}")
            return
        launches = 1
        if "_varlen_attn" in name or (name.startswith(_NORMS) and not given[0].is_contiguous()):
            launches = 2  # the first clears a seed that it never reads, norms copy
        self.log.kernels[name] += launches
        self.log.places[place] += launches
        if name.startswith("linear."):
            self.log.nbytes[WEIGHTS] += sum(size_of(t) for t in given[1:])
            given = given[:1]
        if name.startswith(_SCATTERS):
            given, made = given[1:], given[-1:]
        written = sum(size_of(t) for t in made)
        read = written if name.startswith(_GATHERS) else sum(size_of(t) for t in given)
        self.log.nbytes[place] += _placed(*args) if "place" in name else read + written


def _on_host(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation has nothing to do with the device: what is in host memory is real, but
    for pinned memory, of which there is none without one.
    """
    device = kwargs.get("device")
    return (
        (device is None or torch.device(device).type == "cpu")
        and not kwargs.get("pin_memory")
        and not any(isinstance(each, FakeTensor) for each in tree_iter((args, kwargs)))
    )


def _views(given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation answered with nothing but views of what it was given."""
    held = {_storage(t) for t in given}
    return bool(made) and all(_storage(t) in held for t in made)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_real_numpy = Tensor.numpy


def _numpy(tensor: Tensor) -> Any:
    """Zeros of a fake tensor: what comes back to the host."""
    if isinstance(tensor, FakeTensor):
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return _real_numpy(tensor)


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _placed(outs: Any, row_of: Any, local: Any, to: Any, ids: Any, data: Any, *_: Any) -> int:
    """Bytes of `maskserve::place`, which reads and writes no more tokens than it places."""
    stored = {size_of(each) // len(each) for each in data if len(each)}
    return len(to) * len(outs) * (max(stored) + size_of(outs[0]) // len(outs[0]))


def _place(frame: FrameType | None) -> str:
    """The innermost function of ours: `module.function`."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parts:
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class FakeEvent:
    """An event that the device passes when `FakeCuda.catch_up` is called; events are a millisecond
    apart. Who asks more of it than whether it has passed, before it has, would wait.
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
            self._cuda.waits("an event")
            self._cuda.reach(self._number)

    def elapsed_time(self, end: FakeEvent) -> float:
        if not end.query():
            self._cuda.waits("the time between two events")
        return float(end._number - self._number)


class _FakeStream:
    def __init__(self, device: object = None) -> None:
        """All streams are one."""

    def wait_event(self, event: FakeEvent) -> None:
        """The device waits, not the host."""


class FakeCuda:
    """Inside this, tensors on `cuda` are fake and what is done with them is logged. The device says
    it is an H100.
    """

    def __init__(self) -> None:
        _register_guard()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._recorder = _Recorder(self.fake)
        self.events, self.passed = itertools.count(1), 0
        """Numbers for events, and the last one that the device has passed."""
        self._moved, self._thread = threading.Condition(), threading.get_ident()
        facts: dict[str, Any] = {
            "get_device_capability": lambda _=None: (9, 0),
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda _=None: "NVIDIA H100 80GB HBM3",
            "mem_get_info": lambda _=None: (_MEMORY, _MEMORY),
            "current_stream": lambda _=None: _FakeStream(),
            "Stream": _FakeStream,
            "Event": lambda enable_timing=False: FakeEvent(self),
        }
        self._facts = [patch.object(torch.cuda, name, value) for name, value in facts.items()]
        self._facts.append(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        self._facts.append(patch.object(Tensor, "numpy", _numpy))
        # Torch asks `is_available` whether it may make a real tensor there first.
        none = not torch.cuda.is_available()
        self._facts.append(patch.object(FakeTensorMode, "avoid_device_init", none))

    def catch_up(self) -> None:
        """The device has done all that it was asked for."""
        with self._moved:
            self.passed = next(self.events)
            self._moved.notify_all()

    def reach(self, event: int) -> None:
        """Wait for the device, unless this is the thread that alone could have it catch up."""
        if threading.get_ident() != self._thread:
            with self._moved:
                assert self._moved.wait_for(lambda: event <= self.passed, _PATIENCE_S), "no event"

    def waits(self, what: str) -> None:
        """Log that the host waits; other threads than the one that asks the device may."""
        if threading.get_ident() != self._thread:
            return
        self._recorder.log.copies.append(f"{what} in {_place(sys._getframe(1))}, the host waits")

    def __enter__(self) -> FakeCuda:
        for fact in self._facts:
            fact.start()
        self.fake.__enter__()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)  # type: ignore[no-untyped-call]
        self.fake.__exit__(*error)
        for fact in self._facts:
            fact.stop()

    @property
    def log(self) -> Log:
        """What is written to now."""
        return self._recorder.log

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Operations inside are not logged by themselves."""
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def watch(self) -> Iterator[Log]:
        """Log what is done inside."""
        before, self._recorder.log = self._recorder.log, Log()
        try:
            yield self._recorder.log
        finally:
            self._recorder.log = before


def _register_guard() -> None:
    """Let a build of torch without CUDA index tensors that say they are on `cuda`.

    A CUDA build has this in FakeTensorMode; here the guard of `meta`, which does nothing, is used.
    It knows no current device: say DEVICE, never `cuda` alone.
    """
    if torch.version.cuda is not None:
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    guards[_CUDA] = guards[_META]


def fake_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A model made on `meta`, with fake parameters on `cuda`; call inside FakeCuda."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                data = torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(data, requires_grad=False)
    return model.eval()
