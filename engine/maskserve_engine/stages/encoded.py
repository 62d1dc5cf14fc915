"""The encoder's result for the denoiser, and the packing of a prompt's arrays into one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from maskserve_engine.base.job import Conditioning

NO_MOMENTS = np.zeros((0, 0, 0), np.float32)
"""Masked moments for models without a masked picture."""
NO_CONTROLS = np.zeros((0, 0, 0, 0), np.float32)
"""Control moments without control pictures."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded edit. It contains no random numbers (design §4)."""

    moments: NDArray[np.float32]
    """[2C, h, w] VAE posterior of the source: mean, log-variance; zeros without a source."""
    masked_moments: NDArray[np.float32]
    """The same with the masked area blanked; [0, 0, 0] for models without it."""
    conditioning: Conditioning
    negative: Conditioning | None = None
    control_moments: NDArray[np.float32] = field(default_factory=NO_CONTROLS.copy)
    """[pictures, 2C, h, w] of the control pictures, if ControlNets take latents."""
    references: tuple[NDArray[np.float32], ...] = ()
    """[2C, h, w] of each further reference."""


Origin = Literal["made", "kept"]


class TokensRead(msgspec.Struct, frozen=True):
    """Tokens of a prompt that a text encoder reads, including begin and end tokens."""

    used: int
    cut: int
    """Number of cut tokens behind these; they have no effect, as in diffusers' pipelines."""


class EncodeReport(msgspec.Struct, frozen=True):
    """The ENCODED tensor: how an edit was encoded. META repeats it."""

    ms: float
    prompt: Origin
    """Whether the embeddings, including the negative prompt's, were cached."""
    template: Origin | None
    """Whether the source's moments were cached; None: there is no source."""
    references: Origin | None = None
    """Whether the moments of all further references were cached; None: there are none."""
    masked: Literal["whole", "pieces"] = "whole"
    """Origin much of the masked picture was encoded, if the model takes one."""
    batch: int = 1
    """Edits that shared a call of the text encoders or of the VAE; the larger number."""
    tokens: dict[str, dict[str, TokensRead]] = {}
    """Token counts by prompt (`prompt`, `negative_prompt`) and text encoder."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> EncodeReport:
        return _decode_report(raw)

    @property
    def meta(self) -> dict[str, Any]:
        encoded = {
            "prompt": self.prompt,
            "template": self.template,
            "masked": self.masked,
            "batch": self.batch,
        }
        if self.references is not None:
            encoded["references"] = self.references
        read = {f"{name}_tokens": msgspec.to_builtins(reads) for name, reads in self.tokens.items()}
        return {"encoded": encoded, **read}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about prompts that were cut."""
        fields = {"prompt": "PROMPT", "negative_prompt": "SETTINGS.negative_prompt"}
        return tuple(
            f"{fields[prompt]}: {encoder} reads {read.used} tokens and not the last {read.cut}"
            for prompt, reads in self.tokens.items()
            for encoder, read in reads.items()
            if read.cut
        )


_decode_report = msgspec.json.Decoder(EncodeReport).decode


def pack_references(moments: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Pack the REFERENCE_MOMENTS tensor: the moments one after the other."""
    return np.concatenate([NO_MOMENTS.reshape(-1), *(array.reshape(-1) for array in moments)])


def unpack_references(
    packed: NDArray[np.float32], sizes: Sequence[tuple[int, int]], channels: int
) -> tuple[NDArray[np.float32], ...]:
    """Unpack `pack_references`; the arrays are views.

    Args:
        packed: the tensor.
        sizes: (height, width) of each, in latents.
        channels: 2C.
    """
    ends = np.cumsum([channels * height * width for height, width in sizes])
    parts = np.split(packed, ends[:-1]) if len(sizes) else []
    return tuple([part.reshape(channels, *size) for part, size in zip(parts, sizes, strict=True)])


def pack_conditioning(prompt: Conditioning, negative: Conditioning | None) -> NDArray[np.uint8]:
    """Pack the CONDITIONING tensor: safetensors bytes with names behind `prompt.` and
    `negative.`.
    """
    arrays = {f"prompt.{name}": array for name, array in prompt.items()}
    arrays |= {f"negative.{name}": array for name, array in (negative or {}).items()}
    return np.frombuffer(save(arrays), np.uint8)


def unpack_conditioning(packed: NDArray[np.uint8]) -> tuple[Conditioning, Conditioning | None]:
    """Unpack `pack_conditioning`; the arrays are copies."""
    prompt: Conditioning = {}
    negative: Conditioning = {}
    for name, array in load(packed.tobytes()).items():
        prompt_kind, _, name = name.partition(".")
        (prompt if prompt_kind == "prompt" else negative)[name] = array
    return prompt, negative or None
