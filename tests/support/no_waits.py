"""Code on a CUDA device that must not make the host wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """An operation inside that makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    try:
        with warnings.catch_warnings():  # that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
