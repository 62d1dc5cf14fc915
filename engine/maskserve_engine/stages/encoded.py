"""What the encoder hands to the denoiser, and how a prompt's named arrays travel in one tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from maskserve_engine.base.job import Conditioning

NO_MOMENTS = np.zeros((0, 0, 0), np.float32)
"""Of a masked picture, for models that take none."""
NO_CONTROLS = np.zeros((0, 0, 0, 0), np.float32)
"""Of no control pictures."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One edit, encoded. No random number is drawn here (design §4)."""

    moments: NDArray[np.float32]
    """[2C, h, w] VAE posterior of the source: mean, log-variance."""
    masked_moments: NDArray[np.float32]
    """The same with the masked area blanked; [0, 0, 0] for models that do not take it."""
    conditioning: Conditioning
    """Of the prompt."""
    negative: Conditioning | None = None
    """Of the negative prompt, where there is one."""
    control_moments: NDArray[np.float32] = field(default_factory=lambda: NO_CONTROLS)
    """[pictures, 2C, h, w] of the control pictures, where ControlNets are given latents."""


How = Literal["made", "kept"]


class TokensRead(msgspec.Struct, frozen=True):
    """What a text encoder reads of a prompt, in tokens with those that begin and end it."""

    used: int
    cut: int
    """Behind them, and without any effect, as in diffusers' pipelines."""


class EncodeReport(msgspec.Struct, frozen=True):
    """The ENCODED tensor: how an edit was encoded. META repeats it."""

    ms: float
    """Time that it took."""
    prompt: How
    """Whether the embeddings, those of the negative prompt too, were kept from other edits."""
    template: How
    """Whether the source's moments were."""
    masked: Literal["whole", "pieces"] = "whole"
    """How much of the masked picture was encoded, where the model takes one."""
    batch: int = 1
    """Edits that shared a call: of the text encoders, or of the VAE; the larger of both."""
    tokens: dict[str, dict[str, TokensRead]] = {}
    """By prompt (`prompt`, `negative_prompt`) and text encoder."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> EncodeReport:
        return _decode_report(raw)

    @property
    def meta(self) -> dict[str, Any]:
        """What META says of it."""
        encoded = {
            "prompt": self.prompt,
            "template": self.template,
            "masked": self.masked,
            "batch": self.batch,
        }
        read = {f"{name}_tokens": msgspec.to_builtins(reads) for name, reads in self.tokens.items()}
        return {"encoded": encoded, **read}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Prompts that are longer than what reads them."""
        fields = {"prompt": "PROMPT", "negative_prompt": "SETTINGS.negative_prompt"}
        return tuple(
            f"{fields[prompt]}: {encoder} reads {read.used} tokens and not the last {read.cut}"
            for prompt, reads in self.tokens.items()
            for encoder, read in reads.items()
            if read.cut
        )


_decode_report = msgspec.json.Decoder(EncodeReport).decode


def pack_conditioning(prompt: Conditioning, negative: Conditioning | None) -> NDArray[np.uint8]:
    """The CONDITIONING tensor: safetensors bytes, names behind `prompt.` and `negative.`."""
    arrays = {f"prompt.{name}": array for name, array in prompt.items()}
    arrays |= {f"negative.{name}": array for name, array in (negative or {}).items()}
    return np.frombuffer(save(arrays), np.uint8)


def unpack_conditioning(packed: NDArray[np.uint8]) -> tuple[Conditioning, Conditioning | None]:
    """`pack_conditioning` read back; the arrays are copies."""
    prompt: Conditioning = {}
    negative: Conditioning = {}
    for name, array in load(packed.tobytes()).items():
        prompt_kind, _, name = name.partition(".")
        (prompt if prompt_kind == "prompt" else negative)[name] = array
    return prompt, negative or None
