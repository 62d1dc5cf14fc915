"""The embedding of the priming prompt (an empty one).

The denoiser has no text encoders. The encoder writes the embedding to a file once, and the denoiser
reads it when it first primes a template. If prompts are about a picture, there is no such file: the
priming prompt is then the encoder's view of the template, which every edit of it carries.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from maskserve_common.files.stages import PRIMING_PROMPT_FILE
from maskserve_common.files.store import FileStore
from maskserve_engine.base.job import Conditioning

PRIMING_PROMPT = ""


def write_priming_prompt(embedding: Conditioning, runtime: str | os.PathLike[str]) -> None:
    """Write the embedding into a runtime folder; a reader never sees a part of it."""
    with FileStore(runtime).aside() as new:
        np.savez(new.file, **embedding)
        new.keep_as(PRIMING_PROMPT_FILE)


class PromptFile:
    """Reads the embedding from a worker's runtime folder when it exists, and keeps it.

    Args:
        runtime: runtime folder; None: the worker has none, and never primes.
    """

    def __init__(self, runtime: Path | None) -> None:
        self._path = runtime / PRIMING_PROMPT_FILE if runtime else None
        self._conditioning: Conditioning | None = None

    def read(self) -> Conditioning | None:
        """The embedding, or None while there is no whole file."""
        if self._conditioning is None and self._path is not None:
            try:
                with np.load(self._path) as archive:
                    self._conditioning = {name: archive[name] for name in archive.files}
            except (OSError, ValueError, KeyError, EOFError):
                return None
        return self._conditioning
