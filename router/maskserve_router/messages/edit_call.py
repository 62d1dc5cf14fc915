"""One edit on its way through the router, with the parts of its request that routing needs.

The message is parsed once, and only its SETTINGS are written again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.keys import scoped
from maskserve_common.contracts.settings import dump_settings, parse_settings
from maskserve_common.contracts.tensors import CONTRACTS, Contract, Tensor
from maskserve_common.errors import InvalidRequest
from maskserve_common.reading import nearest
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.client_call import ClientCall, identified
from maskserve_router.messages.forwarded_headers import Metadata
from maskserve_router.messages.model_request import MOST_ELEMENTS, ModelRequest

EDITS = ("edit", "edit_stream")
PUBLIC = (*EDITS, "control")
"""Models that clients may call; the other models are internal to a worker."""
MODELS: Mapping[str, Contract] = {name: CONTRACTS[name] for name in PUBLIC}
VERSIONS = ("", "1", "-1")
"""Versions that Triton accepts for a model with one version: none, its number, "the latest"."""


@dataclass(slots=True, eq=False, kw_only=True)
class EditCall(ClientCall):
    """An edit, from a client's request to its answer."""

    kind = "edit"
    image: memoryview
    mask: bytes
    references: int = 0
    """Pictures beside the source."""
    prompted: bool
    """True if its prompt has any text."""
    size: int
    """Bytes of the request."""
    metadata: Metadata = ()
    """Headers that are forwarded to the worker."""
    worker: str = ""
    """Address of the worker of the last try."""
    sent_as: str = field(init=False)
    """Request id of the current try: a worker may still hold the previous try."""
    tries: int = 0
    restarts: int = 0
    """Tries that failed after the client had received events of them."""
    answer_bytes: int = 0
    """Most bytes of its answer; 0: unknown."""
    waits_until: float | None = None
    """Time from which no worker can finish it in time, on time.monotonic's clock; None: none."""
    starts_by: float | None = None
    """Time at which it must begin to be in time, on time.monotonic's clock; None: it has no due
    time, and waits in order of arrival."""

    def __post_init__(self) -> None:
        self.sent_as = self.request_id

    @property
    def primed(self) -> bool:
        """True if it waits for its template and then runs cached (`cache: require`)."""
        return self.settings is not None and self.settings.cache == "require"

    def left(self) -> float | None:
        """Return the seconds that the client still waits; None: without limit."""
        if self.timeout is None:
            return None
        return max(self.timeout - (time.monotonic() - self.arrival), 0.001)

    def drop_pictures(self) -> None:
        """Free the request's pictures, once the edit is answered."""
        self.message.contents.clear()
        self.image, self.mask = memoryview(b""), b""

    def encoded(self, host: str = "") -> bytes:
        """Return the request to send to a worker of this host now, with the remaining deadline.

        Raises:
            TemplateNotFound: a value in a file of a host no longer exists.
        """
        message = self.message
        if message.elsewhere is not None and message.host != host:
            message = message.elsewhere()
        if self.settings is not None:
            settings = structs.replace(self.settings, request_id=self.sent_as)
            if settings.deadline_ms is not None:
                elapsed_ms = int(1e3 * (time.monotonic() - self.arrival))
                settings = structs.replace(
                    settings, deadline_ms=max(settings.deadline_ms - elapsed_ms, 1)
                )
            message.write("SETTINGS", dump_settings(settings))
        return message.encoded()


def parse_request(raw: bytes, models: Mapping[str, Contract] = MODELS) -> ModelRequest:
    """Parse and check a request to one of these models.

    Raises:
        InvalidRequest: it is not a valid request (`check_request`).
    """
    message = ModelRequest.parse(raw)
    check_request(message, models)
    return message


_ACCEPTED_PARAMETERS = {
    "priority": "0, and SETTINGS.priority, which may be negative",
    "timeout": "microseconds, or SETTINGS.deadline_ms",
}
"""KServe parameters that Triton reads, and the values accepted for them."""


def check_request(message: ModelRequest, models: Mapping[str, Contract] = MODELS) -> None:
    """Check a request before it goes to a worker.

    Triton rejects wrong tensors without an error code, which looks like a failure of the worker.

    Raises:
        InvalidRequest: it names another model, uses an extension that is not supported, or its
            tensors are not those of the model.
    """
    head = message.head
    if head.model_name not in models:
        raise UnknownModel(head.model_name, models=models)
    if head.model_version not in VERSIONS:
        raise UnknownModel(head.model_name, head.model_version)
    if any("classification" in output.parameters for output in head.outputs):
        # TRITON-2.51: it ends with SIGFPE if it is to classify text.
        raise InvalidRequest(
            "outputs", "ask for the classification extension", "outputs as they are"
        )
    for name in ("priority", "timeout"):
        if name in head.parameters and not _is_count(head.parameters[name]):
            raise InvalidRequest(
                f"parameters.{name}", "is not a whole number from 0", _ACCEPTED_PARAMETERS[name]
            )
    tensors = (*head.inputs, *head.outputs)
    if any("shared_memory_region" in tensor.parameters for tensor in tensors):
        raise InvalidRequest(
            "inputs or outputs", "are in shared memory of a host", "tensors as bytes"
        )
    _check_tensors(message, models[head.model_name])


def _is_count(parameter: pb.InferParameter) -> bool:
    kind = parameter.WhichOneof("parameter_choice")
    return bool(kind == "uint64_param" or (kind == "int64_param" and parameter.int64_param >= 0))


def _check_tensors(message: ModelRequest, contract: Contract) -> None:
    """Raise InvalidRequest if the request's tensors are not those of the model. Add an empty
    element for an absent picture, as a worker reads it.
    """
    declared = {tensor.name: tensor for tensor in contract.inputs}
    _check_inputs(message, declared)
    _check_contents(message, declared)
    input_names = {tensor.name for tensor in message.head.inputs}
    for name, declaration in declared.items():
        if declaration.dims == (1,) and name not in input_names:
            message.add(name, [b""])
    outputs = [tensor.name for tensor in contract.outputs]
    for output in message.head.outputs:
        if output.name not in outputs:
            raise InvalidRequest(
                "outputs", f"{output.name[:40]!r} is not an output of the model", ", ".join(outputs)
            )


def _check_inputs(message: ModelRequest, declared: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest if an input's name, type or shape is not the model's."""
    input_names = [tensor.name for tensor in message.head.inputs]
    for tensor in message.head.inputs:
        declaration = declared.get(tensor.name)
        if declaration is None:
            raise InvalidRequest(
                "inputs",
                f"{tensor.name[:40]!r} is not an input of the model"
                f"{nearest(tensor.name, declared)}",
                ", ".join(declared),
            )
        if input_names.count(tensor.name) > 1:
            raise InvalidRequest(tensor.name, "is given more than once")
        if tensor.datatype != declaration.dtype:
            raise InvalidRequest(
                f"{tensor.name}.datatype", f"is {tensor.datatype[:20]!r}", declaration.dtype
            )
        shape = list(tensor.shape)
        fits = len(shape) == len(declaration.dims) and all(
            size == dim or (dim == -1 and 0 <= size <= MOST_ELEMENTS)
            for size, dim in zip(shape, declaration.dims, strict=True)
        )
        if not fits:
            raise InvalidRequest(
                f"{tensor.name}.shape", f"is {shape[:8]}", str(list(declaration.dims))
            )
    for name, declaration in declared.items():
        if not declaration.optional and name not in input_names:
            raise InvalidRequest(name, "is missing", ", ".join(declared))


def _check_contents(message: ModelRequest, declared: Mapping[str, Tensor]) -> None:
    """Raise InvalidRequest if the inputs' bytes are not elements in BYTES form, as many as their
    shapes say.
    """
    inputs = message.head.inputs
    if len(message.contents) != len(inputs):
        raise InvalidRequest(
            "raw_input_contents",
            f"has {len(message.contents)} elements for {len(inputs)} inputs",
            "one per input",
        )
    if any(tensor.HasField("contents") for tensor in inputs):
        raise InvalidRequest("inputs", "have both contents and raw_input_contents", "one of them")
    for tensor in inputs:
        if declared[tensor.name].dims == (1,):
            try:
                message.view(tensor.name)
            except LookupError:
                raise InvalidRequest(
                    tensor.name,
                    "is not one element in BYTES form",
                    "a length of 4 bytes, then the element",
                ) from None
        elif message.count(tensor.name) != tensor.shape[0]:
            size = tensor.shape[0]
            raise InvalidRequest(
                tensor.name,
                f"is not {'one element' if size == 1 else f'{size} elements'} in BYTES form",
                "for each, a length of 4 bytes, then the element",
            )


class UnknownModel(InvalidRequest):
    """The request names a model or a version that clients cannot call."""

    def __init__(
        self, name: str, version: str = "", models: Mapping[str, Contract] = MODELS
    ) -> None:
        if version:
            problem = f"there is no version {version[:20]!r} of {name[:60]!r}"
            super().__init__("model_version", problem, "1, or none")
        else:
            super().__init__("model", f"there is no model {name[:60]!r}", ", ".join(models))


def make_edit_call(
    message: ModelRequest,
    size: int,
    owner: KeyHolder,
    metadata: Metadata = (),
    timeout: float | None = None,
) -> EditCall:
    """Return the edit of a request.

    Its id gets the owner's scope. Its prompt is private if the owner or the settings say so.

    Raises:
        InvalidRequest: naming the setting.
    """
    try:
        image, references = message.first("IMAGE"), max(0, message.count("IMAGE") - 1)
        mask, raw = message.read("MASK"), message.read("SETTINGS")
        prompted = len(message.view("PROMPT")) > 0
    except LookupError:
        name = scoped(owner.scope, uuid.uuid4().hex)
        return EditCall(
            message=message,
            settings=None,
            owner=owner,
            request_id=name,
            timeout=timeout,
            image=memoryview(b""),
            mask=b"",
            prompted=False,
            size=size,
            metadata=metadata,
        )
    settings = identified(parse_settings(raw), owner.scope)
    adapts = settings.ip_adapter is not None  # the last picture is not among what the model sees
    private = settings.private_prompt or owner.private_prompts
    settings = structs.replace(settings, private_prompt=private)
    assert settings.request_id is not None
    return EditCall(
        message=message,
        settings=settings,
        owner=owner,
        request_id=settings.request_id,
        timeout=timeout,
        image=image,
        mask=mask,
        references=max(0, references + len(settings.reference_ids) - adapts),
        prompted=prompted,
        size=size,
        metadata=metadata,
    )
