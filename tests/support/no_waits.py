"""Check that code on a CUDA device does not make the host wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """Turn operations inside that make the host wait for the device into errors."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    try:
        with warnings.catch_warnings():  # warns that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
