"""Answers in the form of OpenAI's API: errors, pictures, events of a stream."""

from __future__ import annotations

import io
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import msgspec
import pybase64
from PIL import Image, UnidentifiedImageError
from starlette.requests import Request
from starlette.responses import Response

from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, split_code
from maskserve_common.servers.failure import Failure
from maskserve_router.api.http_answers import JSON, response_or_error
from maskserve_router.api.openai.form import EditForm, Fields
from maskserve_router.messages import failures
from maskserve_router.messages.forwarded_headers import foreign_id

_FIELD = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_.\[\]]*): ")
_FIELD_NAMES = re.compile(
    r"\b(?:(?:SETTINGS|OP)\.(\w+)|(CONTROL|IMAGE)\[(\d+)\]|(IMAGE|MASK|PROMPT|CONTROL)\b)"
)
_OPENAIS = {
    "output_quality": "output_compression",
    "preview_every": "partial_images",
    "CONTROL": "image",
}
"""KServe's names -> OpenAI's names, where they differ."""
_HEAD = 64 * 1024
"""Bytes of a picture that usually contain its size."""
_ENCODED_AT_A_TIME = 3 * 64 * 1024
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


Picture: TypeAlias = bytes | memoryview
"""A picture's file."""
Handler: TypeAlias = Callable[[Request, str], Awaitable[Response]]
"""A function of a request and its id."""


class NotFound(InvalidRequest):
    """The object named by the path or a field does not exist."""

    openai_code = "not_found"
    """The error's code in OpenAI's form."""


class ModelNotFound(NotFound):
    """No worker serves a model with this name."""

    openai_code = "model_not_found"

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__("model", f"{name[:60]!r} is not served here", ", ".join(served))


def status_of(error: MaskserveError | Failure) -> int:
    return 404 if isinstance(error, NotFound) else failures.http_status(error)


def in_openais_words(text: str, sources: int = 1) -> str:
    """Replace KServe's field names in a worker's message by those of this API.

    Args:
        text: the message.
        sources: number of images before those of the controls, or the references: 0 for a template.
    """

    def field(match: re.Match[str]) -> str:
        setting, picture, index, tensor = match.groups()
        if picture:
            first = sources if picture == "CONTROL" else sources - 1
            return f"image[{max(0, int(index) + first)}]"
        name = setting or tensor
        return _OPENAIS.get(name, name if setting else name.lower())

    return _FIELD_NAMES.sub(field, text)


def error_body(error: MaskserveError | Failure) -> dict[str, Any]:
    """Return OpenAI's error object; `param` is the field that the message names."""
    failures.drop_tracebacks(error)
    code, text = split_code(failures.text_of(error))
    text = in_openais_words(text)
    field = _FIELD.match(text)
    param = field["name"] if field else None
    if isinstance(error, NotFound):
        code = error.openai_code
    elif isinstance(error, failures.Unauthorized):
        code, param = "invalid_api_key", None
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error_object = {"message": text, "type": kind, "param": param, "code": code.lower()}
    return {"error": error_object}


def error_answer(error: MaskserveError | Failure, request_id: str) -> Response:
    seconds = failures.retry_after(error)
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return json_answer(error_body(error), request_id, status_of(error), headers)


def json_answer(
    body: Any, request_id: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    all_headers = {"x-request-id": request_id, **(headers or {})}
    return Response(msgspec.json.encode(body), status, all_headers, JSON)


def error_boundary(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler so that it gets a request id and its errors have OpenAI's form.

    The id is made here. A client's or proxy's `x-request-id` is repeated in the answer and the log,
    but identifies nothing: it may have any form and may be used twice.
    """

    async def answer(request: Request) -> Response:
        request_id = uuid.uuid4().hex
        on_error = partial(error_answer, request_id=request_id)
        response = await response_or_error(handler(request, request_id), on_error, request_id)
        if header_id := foreign_id(request.headers):
            response.headers["x-request-id"] = header_id
        return response

    return answer


def images_begin(fields: Fields, picture: Picture) -> bytes:
    """Return the start of the answer to an edit, before its first picture, which is `picture`."""
    head = {
        "created": int(time.time()),
        **_picture_fields(picture),
        "output_format": fields.output_format,
    }
    return msgspec.json.encode(head)[:-1] + b',"data":['


def image_parts(picture: Picture, meta: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield one picture of the answer, in parts."""
    return _with_picture({}, picture, _stored_fields(meta))


def image_at(url: str, meta: Mapping[str, Any]) -> bytes:
    """Return the answer's entry for a picture that was written to a URL."""
    return msgspec.json.encode({"url": url, **_stored_fields(meta)})


def images_end(metas: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the end of the answer after its pictures; `metas` is their META."""
    tail = msgspec.json.encode({"usage": _usage(metas), "maskserve": metas})
    return b"]," + tail[1:]


def image_bytes(picture: Picture) -> int:
    """Return the bytes of a picture as base64."""
    return -(-len(picture) // 3) * 4


def partial_event(form: EditForm, picture: Picture, index: int) -> Iterator[bytes]:
    """Yield the event of a preview."""
    more = {"partial_image_index": index}
    return _event(form, "partial_image", picture, more)


def completed_event(form: EditForm, picture: Picture, meta: dict[str, Any]) -> Iterator[bytes]:
    more = {**_stored_fields(meta), "usage": _usage([meta]), "maskserve": [meta]}
    return _event(form, "completed", picture, more)


def error_event(error: MaskserveError | Failure) -> bytes:
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error_body(error))


def _event(
    form: EditForm, event: str, picture: Picture, more: Mapping[str, Any]
) -> Iterator[bytes]:
    name = f"image_generation.{event}" if form.kind == "generate" else f"image_edit.{event}"
    behind = {
        "created_at": int(time.time()),
        **_picture_fields(picture),
        "quality": form.fields.quality,
        "output_format": form.fields.output_format,
        **more,
    }
    yield b"event: %b\ndata: " % name.encode()
    yield from _with_picture({"type": name}, picture, behind)
    yield b"\n\n"


def _with_picture(
    before: Mapping[str, Any], picture: Picture, after: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield a JSON object with a picture as base64, which is encoded in small pieces."""
    yield msgspec.json.encode(before)[:-1] + (b"," if before else b"") + b'"b64_json":"'
    for at in range(0, len(picture), _ENCODED_AT_A_TIME):
        yield pybase64.b64encode(picture[at : at + _ENCODED_AT_A_TIME])
    yield b'"' + (b"," if after else b"") + msgspec.json.encode(after)[1:]


def _stored_fields(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id of a kept result, if `keep_result` was set."""
    name = "result_template_id"
    return {"template_id": meta[name]} if name in meta else {}


def text_of_picture(picture: Picture) -> str:
    text: str = pybase64.b64encode_as_string(picture)
    return text


def _picture_fields(picture: Picture) -> dict[str, str]:
    """Return the size and background of a worker's picture for the answer."""
    for part in (picture[:_HEAD], picture):  # the whole file if profiles come before its size
        with (
            suppress(UnidentifiedImageError, OSError, SyntaxError),
            Image.open(io.BytesIO(part)) as picture_file,
        ):
            background = "transparent" if picture_file.mode == "RGBA" else "opaque"
            return {"size": f"{picture_file.width}x{picture_file.height}", "background": background}
    raise EngineFailed("the worker's picture cannot be read")


def _usage(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the image tokens in total and under the mask. Text is not counted."""
    image = sum(int(meta.get("total_tokens", 0)) for meta in metas)
    output_tokens = sum(int(meta.get("active_tokens", 0)) for meta in metas)
    return {
        "input_tokens": image,
        "input_tokens_details": {"image_tokens": image, "text_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"image_tokens": output_tokens, "text_tokens": 0},
        "total_tokens": image + output_tokens,
    }
