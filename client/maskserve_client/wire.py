"""Requests and responses as KServe v2 protobuf messages; no IO.

The messages are built by hand: Triton's Python client loses request ids and response parameters of
streams, and cannot cancel one edit of several.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tritonclient.grpc import service_pb2

from maskserve_client.errors import from_text
from maskserve_client.events import EditResult, Event, Final, Preview, Progress
from maskserve_common import transport
from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.contracts.tensors import CONTRACTS
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_common.imaging.colour import PROFILE, find_colour, pillow_words
from maskserve_common.imaging.images import NO_LIMITS, Raster, decode_raster, to_base64

ImageInput: TypeAlias = Image.Image | npt.NDArray[Any] | str | os.PathLike[str] | bytes
"""A PIL image or an array (both sent as their pixels), or a path or encoded bytes (both sent
unchanged). Arrays are uint8 or bool, [H, W] grey or [H, W, 3 or 4] RGB or RGBA."""

DEFAULT_URL = "localhost:9001"
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    *transport.CHANNEL,
)
Answer = TypeVar("Answer")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


@dataclass(frozen=True)
class ModelCall(Generic[Answer]):
    """A request, and the reader of its response.

    `read` raises MaskserveError if the answer is malformed.
    """

    request: service_pb2.ModelInferRequest
    read: Callable[[service_pb2.ModelInferResponse], Answer]


def address(url: str) -> str:
    """Return the host:port of a gRPC address.

    Raises:
        InvalidRequest: it is an HTTP address.
    """
    scheme, separator, location = url.rpartition("://")
    if separator and scheme != "grpc":
        raise InvalidRequest(
            "url", f"{url} is not a gRPC address", f"HOST:PORT of gRPC, as {DEFAULT_URL}"
        )
    return location.rstrip("/")


def image_bytes(image: ImageInput | None, field: str = "image") -> bytes:
    """Return the bytes of the IMAGE or MASK tensor; empty for None.

    Raises:
        InvalidRequest: an array is not a picture; the error names `field`.
        OSError: a path cannot be read.
    """
    if image is None:
        return b""
    if isinstance(image, bytes):
        return image
    if isinstance(image, np.ndarray):
        image = _picture_of(image, field)
    if not isinstance(image, Image.Image):
        with open(image, "rb") as file:
            return file.read()
    out, picture, words = io.BytesIO(), image, pillow_words(image)
    if image.mode not in _PNG_MODES:
        picture, _, _ = find_colour(image, words)
        picture, words = picture.convert("RGB"), {}
    chunks = PngInfo()
    for name, body in words.items():
        if name != PROFILE:
            chunks.add(name, body)
    profile = words.get(PROFILE, b"")  # empty: Pillow would write the unconverted image's
    picture.save(out, "PNG", compress_level=1, pnginfo=chunks, icc_profile=profile)
    return out.getvalue()


def pictures(
    image: ImageInput | None, images: Sequence[ImageInput], settings: Mapping[str, Any]
) -> list[bytes]:
    """Return the elements of IMAGE: the source, empty for a template, then references.

    Args:
        image: the source; None with the setting `template_id`, or if `images` has it.
        images: further pictures; without `image` and a template the first is the source. The last
            one is the IP-Adapter's, if the settings name one.
        settings: settings of the edit.

    Raises:
        InvalidRequest: an array is not a picture.
        OSError: a path cannot be read.
    """
    encoded = [image_bytes(further, f"images[{index}]") for index, further in enumerate(images)]
    is_adapters = len(encoded) == 1 and settings.get("ip_adapter") is not None
    if image is None and encoded and settings.get("template_id") is None and not is_adapters:
        return encoded
    return [image_bytes(image), *encoded]


def _picture_of(array: npt.NDArray[Any], field: str) -> Image.Image:
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if array.dtype not in (np.uint8, np.bool_) or not shaped or not array.size:
        problem = f"is an array of {array.dtype}, {list(array.shape)}"
        accepted = "uint8 from 0 to 255, or bool, [H, W] or [H, W, 3 or 4]"
        raise InvalidRequest(field, problem, accepted)
    flat = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if flat.dtype == np.bool_:
        flat = flat.astype(np.uint8) * np.uint8(255)
    return Image.fromarray(np.ascontiguousarray(flat))


def workflow(
    name: str, inputs: Mapping[str, ImageInput], settings: Mapping[str, Any]
) -> ModelCall[tuple[dict[str, bytes], dict[str, Any]]]:
    """Make a run of a workflow, answered by its outputs by name, and META."""
    settings_bytes = _settings_bytes(settings)
    request = service_pb2.ModelInferRequest(model_name=name)
    for key, value in inputs.items():
        raw = value.encode() if isinstance(value, str) else image_bytes(value, key)
        bytes_tensor.add_input(request, key.upper(), [raw])
    bytes_tensor.add_input(request, "SETTINGS", [settings_bytes])

    def read(response: service_pb2.ModelInferResponse) -> tuple[dict[str, bytes], dict[str, Any]]:
        outputs = {key.lower(): bytes(raw) for key, raw in bytes_tensor.outputs(response).items()}
        return outputs, json.loads(outputs.pop("meta"))

    return ModelCall(request, read)


def edit(
    image: ImageInput | None,
    mask: ImageInput | None,
    prompt: str,
    settings: Mapping[str, Any],
    control: Sequence[ImageInput] = (),
    images: Sequence[ImageInput] = (),
) -> ModelCall[EditResult]:
    """Make one edit, answered once.

    Raises:
        InvalidRequest: a setting is invalid for every server.
        OSError: a path cannot be read.
    """
    request = _edit("edit", image, mask, prompt, settings, control, images)
    return ModelCall(request, _result)


def edit_stream(
    image: ImageInput | None,
    mask: ImageInput | None,
    prompt: str,
    settings: Mapping[str, Any],
    control: Sequence[ImageInput] = (),
    images: Sequence[ImageInput] = (),
) -> service_pb2.ModelInferRequest:
    """Return one edit, answered by events (`stream_event`); errors are those of `edit`."""
    settings = {"progress": True, **settings}
    return _edit("edit_stream", image, mask, prompt, settings, control, images)


def control(op: str, fields: Mapping[str, Any]) -> ModelCall[dict[str, Any]]:
    """Make an operation. Bytes among the fields are sent as base64 text."""
    values = {
        key: to_base64(value).decode() if isinstance(value, bytes) else value
        for key, value in fields.items()
    }
    request = _request("control", {"OP": json.dumps({"op": op, **values}).encode()})
    return ModelCall(request, lambda response: _json(_outputs(response).get("RESULT", b"")))


def register(image: ImageInput, shared: bool) -> ModelCall[str]:
    """Make the operation `register`, answered by the template's id."""
    call = control(
        "register", {"image": image_bytes(image), **({"shared": True} if shared else {})}
    )
    return ModelCall(call.request, lambda response: str(call.read(response)["template_id"]))


def cancel(request_id: str) -> ModelCall[bool]:
    """Make the operation `cancel`, answered by True if an edit was cancelled."""
    call = control("cancel", {"request_id": request_id})
    return ModelCall(call.request, lambda response: bool(call.read(response)["cancelled"]))


def stream_event(message: service_pb2.ModelStreamInferResponse) -> Event | None:
    """Return the event in one message of a stream; None: it only ends the request.

    Raises:
        MaskserveError: the message is the server's error.
    """
    if message.error_message:
        raise from_text(message.error_message)
    if not message.infer_response.outputs:
        return None
    return _event(message.infer_response)


def last_step(final: Final, reported: int) -> Progress | None:
    """Return the event of an edit's last step, which servers leave out before the picture.

    None: the last reported step `reported` is the last one.
    """
    meta = final.result.meta
    steps = int(meta.get("steps", 0))
    return Progress(steps, steps, int(meta.get("restarts", 0))) if reported < steps else None


def _edit(
    model: str,
    image: ImageInput | None,
    mask: ImageInput | None,
    prompt: str,
    settings: Mapping[str, Any],
    control: Sequence[ImageInput],
    images: Sequence[ImageInput],
) -> service_pb2.ModelInferRequest:
    return _request(
        model,
        {
            "IMAGE": pictures(image, images, settings),
            "MASK": image_bytes(mask, "mask"),
            "PROMPT": prompt.encode(),
            "SETTINGS": _settings_bytes(settings),
            **(
                {"CONTROL": [image_bytes(control_image, "control") for control_image in control]}
                if control
                else {}
            ),
        },
    )


def _result(response: service_pb2.ModelInferResponse) -> EditResult:
    event = _event(response)
    if not isinstance(event, Final):
        raise EngineFailed("the server sent something other than the final answer")
    return event.result


def _settings_bytes(settings: Mapping[str, Any]) -> bytes:
    try:
        raw = json.dumps(dict(settings)).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest("SETTINGS", f"is not JSON: {error}", "JSON values") from None
    parse_settings(raw)
    return raw


def _request(
    model: str, tensors: Mapping[str, bytes | list[bytes]]
) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for declared in CONTRACTS[model].inputs:
        if declared.name in tensors:
            tensor = tensors[declared.name]
            values = [tensor] if isinstance(tensor, bytes) else tensor
            bytes_tensor.add_input(request, declared.name, values)
    return request


def _outputs(response: service_pb2.ModelInferResponse) -> dict[str, bytes]:
    """Return output name -> its one element."""
    try:
        return {name: bytes(value) for name, value in bytes_tensor.outputs(response).items()}
    except ValueError as error:
        raise EngineFailed(f"the server's answer cannot be read: {error}") from None


def _json(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise EngineFailed("the server's answer is not a JSON object")
    return values


def _event(response: service_pb2.ModelInferResponse) -> Event:
    outputs = _outputs(response)
    meta = _json(outputs.get("META", b""))
    restarts = int(meta.get("restarts", 0))
    match meta.get("event"):
        case "progress":
            return Progress(int(meta["step"]), int(meta["steps"]), restarts)
        case "preview":
            image = _picture(outputs).image
            return Preview(int(meta["step"]), int(meta["steps"]), image, restarts)
        case "final":
            picture = _picture(outputs)
            return Final(EditResult(picture.image, bytes(picture.encoded), meta))
    raise EngineFailed(f"the server sent an unknown event {meta.get('event')!r}")


def _picture(outputs: Mapping[str, bytes]) -> Raster:
    try:
        raster = decode_raster(outputs.get("IMAGE", b""), "IMAGE", NO_LIMITS)
    except InvalidRequest as problem:
        raise EngineFailed(f"the server's answer is not an image: {problem.message}") from None
    if raster.colour.profile:
        raster.image.info["icc_profile"] = raster.colour.profile
    return raster
