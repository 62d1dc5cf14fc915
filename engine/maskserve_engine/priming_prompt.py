"""The embedding of the priming prompt (an empty one), made where the text encoders are.

The denoiser has no text encoders. The encoder writes the embedding to a file once, and the
denoiser reads it when it first primes a template.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PRIMING_PROMPT = ""


@dataclass(frozen=True, slots=True)
class PromptEmbedding:
    prompt_embeds: NDArray[np.float32]
    """[T, width]"""
    pooled: NDArray[np.float32]
    """[width]"""


class EncodesPrompts(Protocol):
    def encode_prompt(self, prompt: str) -> PromptEmbedding: ...


def write_priming_prompt(encoder: EncodesPrompts, path: str | os.PathLike[str]) -> None:
    """Write the embedding; a reader never sees a part of it."""
    path = Path(path)
    embedding = encoder.encode_prompt(PRIMING_PROMPT)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, prompt_embeds=embedding.prompt_embeds, pooled=embedding.pooled)
    temporary.replace(path)


def read_priming_prompt(path: str | os.PathLike[str]) -> PromptEmbedding | None:
    """The embedding, or None while there is no whole file."""
    try:
        with np.load(path) as held:
            return PromptEmbedding(held["prompt_embeds"], held["pooled"])
    except (OSError, ValueError, KeyError, EOFError):
        return None
