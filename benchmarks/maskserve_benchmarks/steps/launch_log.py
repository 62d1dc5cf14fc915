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
"""Beginnings of names of operations that compute nothing."""
_ONE_KERNEL = ("linear.", "layer_norm.", "rms_norm.")
"""Operations made of others elsewhere, and of one kernel on CUDA."""
_PRODUCTS = ("addmm", "_addmm_activation")
_NORMS = ("layer_norm.", "rms_norm.")
_GATHERS = ("index_select", "embedding", "index.Tensor")
"""Operations that read no more of their first tensor than they write."""
_SCATTERS = ("copy_", "index_copy_")
"""Operations that write no more of their first tensor than they read of their last."""
_PACKAGE = "maskserve_engine"
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


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on fake tensors and writes down those on the device; others run as they are.

    Args:
        fake: the mode that the tensors are of.
    """

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
        elif name == "_scaled_mm.out":  # which no fake tensor knows
            out = kwargs.pop("out")
        elif name.startswith("dropout."):
            return args[0]  # nothing is trained here
        else:
            if not name.startswith(_ONE_KERNEL):
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            out = func(*args, **kwargs)
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_iter(out) if isinstance(t, Tensor)] or _written(func, args)
        self._write_down(name, func._schema.is_mutable, inputs, outputs, args, kwargs)
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
        place = place_of(sys._getframe(2))
        moved = {t.device.type for t in (*given, *made) if t.dim() or name.startswith("_to_copy")}
        if len(moved) > 1:
            words = " -> ".join(t.device.type for t in (given[-1], (*made, *given)[0]))
            is_non_blocking = kwargs.get("non_blocking") or (
                name.startswith("copy_") and args[2:] == (True,)
            )
            waits = "" if is_non_blocking else ", the host waits"
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
        elif name.startswith("_scaled_mm."):
            x, weight, of_tokens, *other_inputs = given
            self.log.nbytes[WEIGHTS] += sum(size_of(t) for t in (weight, *other_inputs))
            given = [x, of_tokens]
        elif name.startswith(_PRODUCTS):
            added, x, weight = given[:3]  # a bias, or what other products have made
            self.log.nbytes[WEIGHTS] += size_of(weight) + (
                size_of(added) if added.dim() == 1 else 0
            )
            given = [x] if added.dim() == 1 else [added, x]
        if name.startswith(_SCATTERS):
            given, made = given[1:], given[-1:]
        written = sum(size_of(t) for t in made)
        read = written if name.startswith(_GATHERS) else sum(size_of(t) for t in given)
        placing = name.startswith("maskserve.scatter_kv")
        self.log.nbytes[place] += _placed(*args) if placing else read + written


def _on_host(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation has nothing to do with the device: what is in host memory is real, but
    for pinned memory, of which there is none without one.
    """
    device = kwargs.get("device")
    return (
        (device is None or torch.device(device).type == "cpu")
        and not kwargs.get("pin_memory")
        and not any(isinstance(leaf, FakeTensor) for leaf in tree_iter((args, kwargs)))
    )


def _written(func: Any, args: Any) -> list[Tensor]:
    """What an operation that answers with nothing writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    written = [x for of, x in named if of.alias_info is not None and of.alias_info.is_write]
    return [t for t in tree_iter(written) if isinstance(t, Tensor)]


def _views(given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation answered with nothing but views of what it was given."""
    input_storages = {_storage(t) for t in given}
    return bool(made) and all(_storage(t) in input_storages for t in made)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _placed(outs: Any, row_of: Any, local: Any, to: Any, ids: Any, data: Any, *others: Any) -> int:
    """Bytes of `maskserve::scatter_kv`, which reads and writes no more tokens than it places."""
    *_, terms, _, adds = others
    stored = {size_of(part) // len(part) for part in data if len(part)}
    written = size_of(outs[0]) // len(outs[0])
    placed: int = len(to) * len(outs) * (max(stored) * terms + written * (1 + adds))
    return placed


def place_of(frame: FrameType | None) -> str:
    """The innermost function of ours: `module.function`."""
    while frame is not None:
        module = _module(frame.f_code.co_filename)
        if module:
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@cache  # a launch asks for each function on the stack
def _module(file: str) -> str:
    """Of a file of ours, else empty."""
    path = Path(file)
    return path.stem if _PACKAGE in path.parts else ""
