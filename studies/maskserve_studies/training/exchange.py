"""Weight averaging between training processes that never wait for one another.

On a small shared machine, one process per core beats one process with many threads: a busy core
then slows only its own worker. At intervals a worker averages its weights with each peer that has
published new weights since its last look.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


class Exchange:
    """One worker's view of the published weights of all `workers`, in files under `folder`."""

    def __init__(self, folder: Path, worker: int, workers: int, model: nn.Module) -> None:
        self._worker = worker
        self._parameters = list(model.parameters())
        size = sum(p.numel() for p in self._parameters)
        self._weights = _shared(folder / "exchange.f32", np.float32, (workers, size))
        self._versions = _shared(folder / "exchange.i64", np.int64, (workers,))
        self._read_versions = self._versions.copy()

    @torch.no_grad()
    def average(self) -> int:
        """Average in place with peers that have new weights, then publish. Returns the number of
        such peers.
        """
        weights = torch.cat([p.flatten() for p in self._parameters]).numpy()
        versions = self._versions.copy()
        versions[self._worker] = self._read_versions[self._worker]
        peers = np.flatnonzero(versions > self._read_versions)
        if len(peers):
            weights = (weights + self._weights[peers].sum(axis=0)) / (1 + len(peers))
            offset = 0
            for p in self._parameters:
                p.copy_(torch.from_numpy(weights[offset : offset + p.numel()]).view_as(p))
                offset += p.numel()
        self._read_versions[peers] = versions[peers]
        self._weights[self._worker] = weights
        self._versions[self._worker] += 1
        self._read_versions[self._worker] = self._versions[self._worker]
        return len(peers)


def _shared(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    """A file-backed array that the first worker creates and the others open."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    with path.open("ab") as file:  # append mode never overwrites a peer's bytes
        if file.tell() < size:
            file.truncate(size)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
