"""The tensors of every Triton model, declared once: the ports of a worker.

These tables define every config.pbtxt and the ensemble's wiring (`python scripts/bench
model_configs`), the tensors that a front passes on, and those that client, router and probe send.
The denoiser, not Triton, batches edits, step by step. Triton batches only requests of encoder and
decoder: those that arrived while the model was busy go into one `execute` (`Contract.together`).

To let clients send one more tensor, add it to `PICTURES` as optional. `edit` and `edit_stream` then
accept it, and the fronts pass it to the ensemble, empty if a client sent none. The model of the
ensemble that reads it names it among its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

INPUT_KINDS: Final = ("picture", "mask", "text")
"""Kinds of a workflow's inputs."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: Triton data type and dims, -1 where the size varies."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """A Triton model: its tensors, and how Triton runs it."""

    about: str
    """Comment above its config.pbtxt."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False
    """Whether it answers a request with any number of responses."""
    on_device: bool = False
    """Whether the model itself chooses its device (KIND_MODEL); otherwise it runs on the CPU."""
    together: int = 0
    """Most requests in one `execute` (Triton's max_batch_size). They may have any shapes, and no
    request waits for others to come. Each tensor then has a batch dimension of 1 before its dims,
    within the ensemble, too. 0: each `execute` gets one request, without that dimension.
    """

    def input(self, name: str) -> Tensor:
        """Return the input of this name. Raises KeyError: there is none."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        raise KeyError(name)


def text(name: str, *, optional: bool = False) -> Tensor:
    """One BYTES element: UTF-8 JSON or an encoded image."""
    return Tensor(name, "BYTES", (1,), optional)


# The source, empty for a template; then further reference pictures of the model.
IMAGE = Tensor("IMAGE", "BYTES", (-1,), optional=True)
MASK = text("MASK", optional=True)
PROMPT = text("PROMPT")
SETTINGS = text("SETTINGS")
CONTROL = Tensor("CONTROL", "BYTES", (-1,), optional=True)  # control pictures of IMAGE's size
EDITED = text("EDITED")  # IMAGE, as it leaves the ensemble: inputs and outputs share one namespace
META = text("META")

# The accepted edit, as JSON (`contracts.request.AcceptedEdit`).
ACCEPTED = text("ACCEPTED")
# The checked request as JSON (`contracts.request.EditRequest`); or {"op": …} from `control`.
REQUEST = text("REQUEST")
# The source, the settings and the sizes that postprocess needs (`postprocess_context`); empty for
# progress without a preview.
CONTEXT = Tensor("CONTEXT", "UINT8", (-1,))

# [H, W, RGB] at model resolution; [0, 0, 3] without a source.
PIXELS = Tensor("PIXELS", "UINT8", (-1, -1, 3))
DECODED_PIXELS = replace(PIXELS, dims=(-1, -1, -1))  # some models also draw an alpha channel
# Pixels of the further references, one after the other; REQUEST has their sizes.
REFERENCES = Tensor("REFERENCES", "UINT8", (-1,))
EDIT_MASK = Tensor("EDIT_MASK", "UINT8", (-1, -1))  # [H, W] at model resolution, 255 = edit
CONTROLS = Tensor("CONTROLS", "UINT8", (-1, -1, -1, 3))  # [pictures, H, W, RGB] as PIXELS
MOMENTS = Tensor("MOMENTS", "FP32", (-1, -1, -1))  # VAE mean and log-variance [2C, h, w]
MASKED_MOMENTS = Tensor("MASKED_MOMENTS", "FP32", (-1, -1, -1))  # same, masked area blanked; Fill
# VAE moments of the further references, one after the other, each [2C, h, w].
REFERENCE_MOMENTS = Tensor("REFERENCE_MOMENTS", "FP32", (-1,))
# [pictures, 2C, h, w]: moments of the control pictures, for ControlNets that take latents; else
# empty.
CONTROL_MOMENTS = Tensor("CONTROL_MOMENTS", "FP32", (-1, -1, -1, -1))
# Named arrays of the prompt and of the negative prompt, if there is one: safetensors bytes.
CONDITIONING = Tensor("CONDITIONING", "UINT8", (-1,))
ENCODED = text("ENCODED")  # how moments and conditioning were made, and the time it took: JSON
LATENTS = Tensor("LATENTS", "FP32", (-1, -1, -1))  # [C, h, w]; [0, 0, 0]: progress without preview

PICTURES = (IMAGE, MASK, CONTROL)
"""The client's tensors that a front passes to the ensemble unread: BYTES [1], or [-1] if a client
may send any number. An absent one is passed on empty."""


def _optional(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, optional=True) for tensor in tensors)


def _required(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, optional=False) for tensor in tensors)


_CLIENT_IN = (*PICTURES, PROMPT, SETTINGS)
_CLIENT_OUT = (text("IMAGE"), META)
_PIPELINE_IN = (*_required(*PICTURES), ACCEPTED)  # an ensemble has no optional inputs

CONTRACTS: dict[str, Contract] = {
    "edit": Contract(
        "Default mode with a late answer: serves HTTP /infer and gRPC ModelInfer for many edits at "
        "once.",
        _CLIENT_IN,
        _CLIENT_OUT,
    ),
    "edit_stream": Contract(
        "Decoupled: progress and previews before the answer.",
        _CLIENT_IN,
        _CLIENT_OUT,
        decoupled=True,
    ),
    "edit_pipeline": Contract(
        "The whole edit. Internal: clients call `edit` and `edit_stream`, which watch over it, "
        "because neither a cancel nor the death of a model crosses an ensemble.",
        _PIPELINE_IN,
        (EDITED, META),
        decoupled=True,
    ),
    "preprocess": Contract(
        "Decodes, checks and resizes on the CPU, in threads. Default mode with a late answer: one "
        "large image does not hold up the next.",
        _PIPELINE_IN,
        (PIXELS, REFERENCES, EDIT_MASK, CONTROLS, REQUEST, CONTEXT),
    ),
    "encoder": Contract(
        "KIND_MODEL: the model places itself, on the GPU if there is one.",
        (PIXELS, REFERENCES, EDIT_MASK, CONTROLS, REQUEST),
        (MOMENTS, MASKED_MOMENTS, REFERENCE_MOMENTS, CONTROL_MOMENTS, CONDITIONING, ENCODED),
        on_device=True,
        together=8,
    ),
    "denoiser": Contract(
        "Decoupled: progress, previews and the result of an edit are responses of one request. One "
        "instance: edits are batched step by step inside it. `control` sends REQUEST alone, so the "
        "rest is optional.",
        (
            REQUEST,
            *_optional(
                EDIT_MASK,
                CONTROLS,
                MOMENTS,
                MASKED_MOMENTS,
                REFERENCE_MOMENTS,
                CONTROL_MOMENTS,
                CONDITIONING,
                ENCODED,
                CONTEXT,
            ),
        ),
        (LATENTS, META, CONTEXT),
        decoupled=True,
        on_device=True,
    ),
    "decoder": Contract(
        "One instance, so that the events of an edit stay in order.",
        (LATENTS, META, CONTEXT),
        (DECODED_PIXELS, META, CONTEXT),
        on_device=True,
        together=8,
    ),
    "postprocess": Contract(
        "Encodes in threads. Default mode with a late answer: one large image does not hold up the "
        "next. The fronts drop events that are overtaken.",
        (DECODED_PIXELS, META, CONTEXT),
        _CLIENT_OUT,
    ),
    "control": Contract(
        "Operations on the worker; answers status from a file, without waiting for the engine.",
        (text("OP"),),
        (text("RESULT"),),
    ),
}

SERVICES: dict[str, Contract] = {
    "controlnet": Contract(
        "ControlNets of the edits of several workers, in a server of their own. Default mode with "
        "a late answer. The nets' residuals take another way "
        "(maskserve_engine/control_link/transport.py).",
        (text("OP"), Tensor("ARRAYS", "UINT8", (-1,), optional=True)),
        (text("RESULT"),),
        on_device=True,
    ),
    "nodes": Contract(
        "Nodes of workflows. TASK says which, and how VALUES lie "
        "(maskserve_workflows/wire.py). Default mode with a late answer.",
        (text("TASK"), Tensor("VALUES", "BYTES", (-1,))),
        (text("RESULT"), Tensor("MADE", "BYTES", (-1,))),
        on_device=True,
    ),
}
"""Models that no worker loads: a Triton beside the workers serves each of them."""

ENSEMBLE = "edit_pipeline"
STEPS = ("preprocess", "encoder", "denoiser", "decoder", "postprocess")
"""The ensemble's models, in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One model of the ensemble: its tensors' names -> their names in the ensemble."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def ensemble_steps() -> list[Step]:
    """Return the wiring of the ensemble's models.

    Each step takes an input from the nearest earlier step with a tensor of this name, or from the
    ensemble's inputs. The outputs of the last step are the ensemble's, in this order.

    Raises:
        KeyError: neither the ensemble nor an earlier step has a tensor that a step reads.
    """
    ensemble = CONTRACTS[ENSEMBLE]
    nearest = {tensor.name: tensor.name for tensor in ensemble.inputs}
    steps = []
    for model in STEPS:
        contract = CONTRACTS[model]
        inputs = {tensor.name: nearest[tensor.name] for tensor in contract.inputs}
        outputs = {tensor.name: f"{model}_{tensor.name}" for tensor in contract.outputs}
        if model == STEPS[-1]:
            names = [tensor.name for tensor in ensemble.outputs]
            outputs = dict(zip(outputs, names, strict=True))
        steps.append(Step(model, inputs, outputs))
        nearest |= outputs
    return steps
