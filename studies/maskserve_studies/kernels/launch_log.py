"""A log of the operations on a device: kernels with the bytes that they touch, copies between host
and device, and operations that make the host wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

_NO_KERNEL = ("empty", "new_empty", "detach", "maskserve.addresses")
"""Prefixes of names of operations that compute nothing."""
_ONE_KERNEL = ("linear.", "layer_norm.", "rms_norm.")
"""Prefixes of operations that are one kernel on CUDA and several operations elsewhere."""
_PRODUCTS = ("addmm", "_addmm_activation")
_NORMS = ("layer_norm.", "rms_norm.")
_GATHERS = ("index_select", "embedding", "index.Tensor")
"""Operations that read at most as much of their first tensor as they write."""
_SCATTERS = ("copy_", "index_copy_")
"""Operations that write at most as much of their first tensor as they read of their last."""
_PACKAGE = "maskserve_engine"
WEIGHTS = "weights"
"""Name under which a log counts the bytes of the model that products read."""


@dataclass
class Log:
    """A log of requests to the device."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches by operation."""
    places: Counter[str] = field(default_factory=Counter)
    """Launches by the engine's function that requested them: `module.function`."""
    nbytes: Counter[str] = field(default_factory=Counter)
    """Bytes read and written, by the same functions; WEIGHTS are separate."""
    copies: list[str] = field(default_factory=list)
    """Copies between host and device, in words."""

    @property
    def launches(self) -> int:
        return self.kernels.total()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on fake tensors and logs those on the device; other operations run normally.

    Args:
        fake: the mode of the tensors.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake, self.log = fake, Log()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if _on_host(args, kwargs or {}):
            with unset_fake_temporarily():  # samplers compute their schedules here
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._fake, args), tree_map(self._fake, kwargs or {})
        name = str(func).removeprefix("aten.")
        if name.startswith("scaled_dot_product_attention"):
            out = torch.empty_like(args[0])  # CUDA's kernels keep the layout of the queries
        elif name == "_scaled_mm.out":  # fake tensors do not support this operation
            out = kwargs.pop("out")
        elif name.startswith("dropout."):
            return args[0]  # there is no training here
        else:
            if not name.startswith(_ONE_KERNEL):
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            out = func(*args, **kwargs)
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, Tensor)] or _written(func, args)
        self._record(name, func._schema.is_mutable, inputs, outputs, args, kwargs)
        return out

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not isinstance(x, FakeTensor):
            return self.fake.from_tensor(x)
        x.constant = None
        return x

    def _record(
        self,
        name: str,
        writes: bool,
        inputs: list[Tensor],
        outputs: list[Tensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        if not any(t.is_cuda for t in (*inputs, *outputs)):
            return
        if name.startswith(_NO_KERNEL) or (not writes and _views(inputs, outputs)):
            return
        place = place_of(sys._getframe(2))
        moved = {
            t.device.type for t in (*inputs, *outputs) if t.dim() or name.startswith("_to_copy")
        }
        if len(moved) > 1:
            words = " -> ".join(t.device.type for t in (inputs[-1], (*outputs, *inputs)[0]))
            is_non_blocking = kwargs.get("non_blocking") or (
                name.startswith("copy_") and args[2:] == (True,)
            )
            waits = "" if is_non_blocking else ", the host waits"
            self.log.copies.append(f"{words} in {place} ({name}){waits}")
            return
        launches = 1
        if "_varlen_attn" in name or (name.startswith(_NORMS) and not inputs[0].is_contiguous()):
            launches = 2  # the first kernel clears a seed that is never read, norms copy
        self.log.kernels[name] += launches
        self.log.places[place] += launches
        if name.startswith("linear."):
            self.log.nbytes[WEIGHTS] += sum(size_of(t) for t in inputs[1:])
            inputs = inputs[:1]
        elif name.startswith("_scaled_mm."):
            x, weight, of_tokens, *other_inputs = inputs
            self.log.nbytes[WEIGHTS] += sum(size_of(t) for t in (weight, *other_inputs))
            inputs = [x, of_tokens]
        elif name.startswith(_PRODUCTS):
            added, x, weight = inputs[:3]  # a bias, or the sum of other products
            self.log.nbytes[WEIGHTS] += size_of(weight) + (
                size_of(added) if added.dim() == 1 else 0
            )
            inputs = [x] if added.dim() == 1 else [added, x]
        if name.startswith(_SCATTERS):
            inputs, outputs = inputs[1:], inputs[-1:]
        written = sum(size_of(t) for t in outputs)
        read = written if name.startswith(_GATHERS) else sum(size_of(t) for t in inputs)
        placing = name.startswith("maskserve.scatter_kv")
        self.log.nbytes[place] += _placed(*args) if placing else read + written


def _on_host(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation does not concern the device. Tensors in host memory are real,
    except for pinned memory, which does not exist without a device.
    """
    device = kwargs.get("device")
    return (
        (device is None or torch.device(device).type == "cpu")
        and not kwargs.get("pin_memory")
        and not any(isinstance(leaf, FakeTensor) for leaf in tree_iter((args, kwargs)))
    )


def _written(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors that an operation without a result writes to."""
    arguments = zip(func._schema.arguments, args, strict=False)
    written = [x for of, x in arguments if of.alias_info is not None and of.alias_info.is_write]
    return [t for t in tree_iter(written) if isinstance(t, Tensor)]


def _views(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether an operation returned only views of its arguments."""
    input_storages = {_storage(t) for t in inputs}
    return bool(outputs) and all(_storage(t) in input_storages for t in outputs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _placed(
    outs: Any, row_of: Any, local: Any, to: Any, ids: Any, data: Any, *arguments: Any
) -> int:
    """Return the bytes of `maskserve::scatter_kv`, which reads and writes only the tokens that it
    places.
    """
    *_, terms, _, adds = arguments
    stored = {size_of(part) // len(part) for part in data if len(part)}
    written = size_of(outs[0]) // len(outs[0])
    placed: int = len(to) * len(outs) * (max(stored) * terms + written * (1 + adds))
    return placed


def place_of(frame: FrameType | None) -> str:
    """Return the innermost function of the engine: `module.function`."""
    while frame is not None:
        module = _module(frame.f_code.co_filename)
        if module:
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@cache  # a launch asks for each function on the stack
def _module(file: str) -> str:
    """Return the module of a file of the engine, else an empty string."""
    path = Path(file)
    return path.stem if _PACKAGE in path.parts else ""
