"""Whether kernels written in the Triton language can be used."""

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
_ours = torch.library.Library("maskserve", "FRAGMENT")


def operation(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make what launches a kernel `torch.ops.maskserve.NAME`, so that tensors of no memory can
    stand in for a device's (`stand_in`).

    As torch's decorator of custom operations does, without what that looks at in each call: it took
    15 us of the host, three times what the dispatch itself takes, and a step has some 280 of them.

    Args:
        name: of it.
        mutates_args: arguments that are written to.
    """

    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        _ours.define(name + schema)
        _ours.impl(name, function, "CompositeExplicitAutograd")
        registered_op: Callable[..., Any] = getattr(torch.ops.maskserve, name).default
        return registered_op

    return registered


def stand_in(name: str) -> Callable[[F], F]:
    """Answer an operation for tensors of no memory."""
    registered: Callable[[F], F] = torch.library.register_fake(f"maskserve::{name}")
    return registered


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether they do the work on a device; else plain operations do."""
    return device.type == "cuda" and missing_triton() is None


@cache
def missing_triton(package: str = "triton") -> str | None:
    """Why they cannot; None if they can. Logged once."""
    if importlib.util.find_spec(package) is None:
        reason: str | None = f"the package {package} is not installed"
    else:
        reason = missing_for_launches()
    if reason is not None:
        _log.warning("Steps and cached activations take many small kernels: %s", reason)
    return reason


def missing_for_launches(headers: Path | None = None) -> str | None:
    """What the package triton lacks to launch a kernel: what does it is C, made at the first."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc, clang, or another that CC names)"
    headers = headers or Path(sysconfig.get_path("include", "posix_prefix"))
    return None if (headers / "Python.h").exists() else f"there is no {headers}/Python.h"


@operation("addresses")
def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """[n] int64 in host memory: where they lie."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@stand_in("addresses")
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(len(tensors), dtype=torch.int64, device="cpu")
