"""Templates' VAE moments, passed from the encoder's process to the decoder's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maskserve_common.files.store import FileStore, make_private

MOMENTS = "moments"


class MomentsFolder:
    """One file per template in the worker's runtime folder, which is best in memory. The encoder
    writes what it caches and deletes what it evicts; a reader only sees complete files, and an open
    file stays readable.
    """

    def __init__(self, runtime: str | os.PathLike[str]) -> None:
        self._store = FileStore(Path(runtime) / MOMENTS)

    def clear(self) -> None:
        """Empty the folder: the encoder that wrote it has ended."""
        shutil.rmtree(self._store.folder, ignore_errors=True)
        make_private(self._store.folder)

    def write(self, pixels_id: str, moments: NDArray[np.float32]) -> None:
        with self._store.aside() as new:
            np.save(new.file, moments)
            new.keep_as(_name(pixels_id))

    def read(self, pixels_id: str) -> NDArray[np.float32] | None:
        """Return [2C, h, w], or None if there is no complete file."""
        try:
            moments: NDArray[np.float32] = np.load(self._path(pixels_id), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return moments

    def drop(self, pixels_id: str) -> None:
        self._path(pixels_id).unlink(missing_ok=True)

    def _path(self, pixels_id: str) -> Path:
        return self._store.folder / _name(pixels_id)


def _name(pixels_id: str) -> str:
    return f"{pixels_id}.npy"
