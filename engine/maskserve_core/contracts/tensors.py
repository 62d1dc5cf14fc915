"""The tensors of every Triton model, written once.

Every config.pbtxt and every `model.py` is held to these tables (tests/contract). All models have
`max_batch_size: 0`: edits are batched step by step inside the denoiser, never by Triton.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: Triton data type and dims, -1 where the size varies."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False


def text(name: str, *, optional: bool = False) -> Tensor:
    """One BYTES element: UTF-8 JSON or an encoded image."""
    return Tensor(name, "BYTES", (1,), optional)


IMAGE = text("IMAGE")
MASK = text("MASK")
PROMPT = text("PROMPT")
SETTINGS = text("SETTINGS")
EDITED = text("EDITED")  # IMAGE, as it leaves the ensemble: inputs and outputs share one namespace
META = text("META")

# What a front accepted, as JSON (`contracts.request.AcceptedEdit`).
ACCEPTED = text("ACCEPTED")
# The checked request as JSON (`contracts.request.EditRequest`); or {"op": …} from `control`.
REQUEST = text("REQUEST")
# What postprocess needs of all that (`postprocess_context`); empty on plain progress.
CONTEXT = Tensor("CONTEXT", "UINT8", (-1,))

PIXELS = Tensor("PIXELS", "UINT8", (-1, -1, 3))  # [H, W, RGB] at model resolution
EDIT_MASK = Tensor("EDIT_MASK", "UINT8", (-1, -1))  # [H, W] at model resolution, 255 = edit
MOMENTS = Tensor("MOMENTS", "FP32", (-1, -1, -1))  # VAE mean and log-variance [2C, h, w]
MASKED_MOMENTS = Tensor("MASKED_MOMENTS", "FP32", (-1, -1, -1))  # same, masked area blanked; Fill
# Named arrays of the prompt and, where one is given, of the negative prompt: safetensors bytes.
CONDITIONING = Tensor("CONDITIONING", "UINT8", (-1,))
ENCODE_MS = Tensor("ENCODE_MS", "FP32", (1,))
LATENTS = Tensor("LATENTS", "FP32", (-1, -1, -1))  # [C, h, w]; [0, 0, 0] on plain progress

_CLIENT_IN = (IMAGE, MASK, PROMPT, SETTINGS)
_CLIENT_OUT = (IMAGE, META)
_PIPELINE_IN = (IMAGE, MASK, ACCEPTED)


def _optional(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(Tensor(t.name, t.dtype, t.dims, optional=True) for t in tensors)


CONTRACTS: dict[str, Contract] = {
    "edit": Contract(_CLIENT_IN, _CLIENT_OUT),
    "edit_stream": Contract(_CLIENT_IN, _CLIENT_OUT, decoupled=True),
    "edit_pipeline": Contract(_PIPELINE_IN, (EDITED, META), decoupled=True),
    "preprocess": Contract(_PIPELINE_IN, (PIXELS, EDIT_MASK, REQUEST, CONTEXT)),
    "encoder": Contract(
        (PIXELS, EDIT_MASK, REQUEST),
        (MOMENTS, MASKED_MOMENTS, CONDITIONING, ENCODE_MS),
    ),
    # `control` sends REQUEST alone, so the rest is optional.
    "denoiser": Contract(
        (
            REQUEST,
            *_optional(
                EDIT_MASK,
                MOMENTS,
                MASKED_MOMENTS,
                CONDITIONING,
                ENCODE_MS,
                CONTEXT,
            ),
        ),
        (LATENTS, META, CONTEXT),
        decoupled=True,
    ),
    "decoder": Contract((LATENTS, META, CONTEXT), (PIXELS, META, CONTEXT)),
    "postprocess": Contract((PIXELS, META, CONTEXT), _CLIENT_OUT),
    "control": Contract((text("OP"),), (text("RESULT"),)),
}
