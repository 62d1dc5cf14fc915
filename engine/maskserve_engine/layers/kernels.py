"""Registration of Triton-language kernels, and whether they can be used."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_library = torch.library.Library("maskserve", "FRAGMENT")


def operation(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel launcher as `torch.ops.maskserve.NAME`, so that tensors without memory can
    be traced (`stand_in`).

    torch's own decorator for custom operations takes 15 us of the host per call, three times the
    dispatch itself, and a step has about 280 calls.
    """

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        _library.define(name + schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        registered_op: Callable[..., Any] = getattr(torch.ops.maskserve, name).default
        return registered_op

    return registered


def stand_in(name: str) -> Callable[[F], F]:
    """Register an operation's result for tensors without memory."""
    registered: Callable[[F], F] = torch.library.register_fake(f"maskserve::{name}")
    return registered


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether kernels run on a device; elsewhere plain operations do."""
    return device.type == "cuda" and missing_triton() is None


@cache
def missing_triton(package: str = "triton") -> str | None:
    """Return why Triton cannot be used; None if it can. Logged once."""
    if importlib.util.find_spec(package) is None:
        reason: str | None = f"the package {package} is not installed"
    else:
        reason = missing_for_launches()
    if reason is not None:
        _log.warning("Steps and cached activations take many small kernels: %s", reason)
    return reason


def missing_for_launches(headers: Path | None = None) -> str | None:
    """Return what is missing to compile Triton's launcher, which is C code; None if nothing is."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or another that CC names)"
    headers = headers or Path(sysconfig.get_path("include", "posix_prefix"))
    return None if (headers / "Python.h").exists() else f"there is no {headers}/Python.h"


@operation("addresses")
def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return [n] int64 addresses of the tensors, in host memory."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@stand_in("addresses")
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.int64, device="cpu")
