"""A digest of the served weights, for the names of cached activations."""

from __future__ import annotations

import hashlib
from pathlib import Path

_EDGE = 64 * 1024


def model_revision(folder: str | Path) -> str:
    """32 hexadecimal digits over every part that shapes activations.

    Configurations are read whole; of weight files the name, the size and both ends, which hold the
    safetensors header and the last tensor: enough to tell two trainings apart without reading
    tens of gigabytes.
    """
    folder = Path(folder)
    digest = hashlib.blake2b(digest_size=16)
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "scheduler"):
        for path in sorted((folder / part).glob("*")):
            digest.update(f"{part}/{path.name}:{path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE))
                file.seek(max(path.stat().st_size - _EDGE, 0))
                digest.update(file.read(_EDGE))
    return digest.hexdigest()
