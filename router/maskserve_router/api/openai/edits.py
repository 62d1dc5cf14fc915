"""`/v1/images/edits`, `generations` and `variations`, and `/v1/models`: OpenAI's API in front of
the workers.
"""

from __future__ import annotations

import asyncio
import io
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.request import model_steps, steps_run
from maskserve_common.contracts.settings import MAX_MARGIN, EditSettings, parse_settings
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, split_code
from maskserve_common.imaging.images import Size, decode_mask, read_size
from maskserve_common.servers.failure import Failure
from maskserve_router.api.front import Front
from maskserve_router.api.http_answers import JSON, ChunkedResponse, while_connected, whole_answer
from maskserve_router.api.http_body import Bodies
from maskserve_router.api.http_events import Event, event_stream
from maskserve_router.api.openai.answers import (
    completed_event,
    error_event,
    image_at,
    image_parts,
    images_begin,
    images_end,
    in_openais_words,
    json_answer,
    partial_event,
    text_of_picture,
)
from maskserve_router.api.openai.form import (
    PICTURE,
    EditForm,
    Fields,
    ModelForm,
    Source,
    read_form,
)
from maskserve_router.api.openai.image_urls import ImageUrls
from maskserve_router.api.openai.picture_urls import PictureUrls
from maskserve_router.api.openai.served_models import ServedModels
from maskserve_router.api.outputs import Outputs, check_output
from maskserve_router.fair_share import IN_A_THREAD, FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.failures import text_of
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.scheduling.admission import EditRoom
from maskserve_router.scheduling.edit_cost import answer_bytes

_DRAWN_SEED_BITS = 32
_OWNER = "maskserve"
_MOST_STEPS = 1000
DECODED_PIXELS = 2**24
"""Most pixels of a picture that the router decodes; each takes up to six bytes."""
_MIB = 2**20
_ROUTE = "openai"
_VARIATION_STRENGTH = 0.6
"""Share of the steps that a variation runs from its noised source: the default of diffusers'
FluxImg2ImgPipeline."""
Picture: TypeAlias = tuple[memoryview, dict[str, Any]]
"""A picture's file, uncopied, and its META."""
OnProgress: TypeAlias = Callable[[int, Mapping[str, Any]], None]
PlacePicture: TypeAlias = Callable[[int, memoryview], Awaitable[str]]
"""Puts a picture, by its number, where a URL points, and returns the URL."""


@dataclass(frozen=True, slots=True)
class FormCall:
    """A checked form, and the call that brought it."""

    form: EditForm
    context: CallContext
    request_id: str

    @property
    def client(self) -> KeyHolder:
        return self.context.client


class ImageEdits:
    """Handlers of edits, generations, variations and models.

    Args:
        models: models that workers serve.
        urls: fetches pictures of requests.
        outputs: writes pictures to URLs of requests.
        picture_urls: keeps pictures that answers name by URL.
        forms: form of each workflow, by name.
    """

    def __init__(
        self,
        bodies: Bodies,
        limits: LimitsConfig,
        front: Front,
        fair_share: FairShare,
        models: ServedModels,
        urls: ImageUrls,
        outputs: Outputs,
        picture_urls: PictureUrls,
        forms: Mapping[str, ModelForm],
    ) -> None:
        self._bodies, self._limits, self._front, self._forms = bodies, limits, front, forms
        self._fair_share, self._models = fair_share, models
        self._urls, self._outputs, self._picture_urls = urls, outputs, picture_urls

    async def edit(self, request: Request, request_id: str) -> Response:
        """Answer an edit of an image."""
        return await self._respond(request, request_id, "required")

    async def generate(self, request: Request, request_id: str) -> Response:
        """Answer a picture made from a text alone."""
        return await self._respond(request, request_id, "none")

    async def vary(self, request: Request, request_id: str) -> Response:
        """Answer a picture that resembles an image."""
        return await self._respond(request, request_id, "varied")

    async def _respond(self, request: Request, request_id: str, source: Source) -> Response:
        headers = dict(request.headers.items())
        client = self._front.client(headers)  # before the body is read
        with ExitStack() as exit_stack:
            form, size = await self.read(request, client, exit_stack, source)
            if form.fields.webhook is not None:
                raise InvalidRequest("webhook", "is given without a job", "POST /v1/jobs")
            call = FormCall(form, CallContext(client, size, headers, _ROUTE), request_id)
            if form.fields.stream:
                return await self._stream(request, call, exit_stack)
            place = self._picture_place(call, request_id, str(request.base_url))
            if request.scope["http_version"] == "1.0":  # HTTP/1.0 needs the length of a body
                work = self._answer(call, place)
                return self._complete(client, await while_connected(request, work), request_id)
            parts = _parts(form, self._pictures(call), place)
            first = await while_connected(request, _first_of(parts))
            return ChunkedResponse(
                _with_first(first, parts),
                exit_stack.pop_all(),
                headers={"x-request-id": request_id},
                media_type=JSON,
            )

    def _complete(self, client: KeyHolder, body: msgspec.Raw, request_id: str) -> Response:
        """Return a complete answer with its length."""
        with ExitStack() as written:
            room = written.enter_context(self._front.room(client))
            return whole_answer([memoryview(body)], room, written, {"x-request-id": request_id})

    async def read(
        self,
        request: Request,
        client: KeyHolder,
        resources: ExitStack,
        source: Source = "optional",
    ) -> tuple[EditForm, int]:
        """Read and check a request as far as no worker is needed; return it and its bytes.

        Args:
            request: a form or JSON with `Fields` and settings.
            client: holder of the key that sent it.
            resources: counts the bytes of its pictures until it is closed.
            source: whether the request has an image or a template.

        Raises:
            InvalidRequest: naming the field.
            RetryLater: too many bytes are under way.
        """
        body = await self._bodies.read(request, client, resources)

        async def picture(field: str, url: str) -> bytes:
            return await self._urls.read(field, url, client, resources)

        size = len(body)
        parse = partial(self._fair_share.run, client, size)
        form = await read_form(request.headers, body, picture, parse, self._texts, source)
        del body
        self._front.check_pictures(form.fields.n, client)
        if (url := form.fields.output_url) is not None:
            check_output(url, client.output_urls)
            if form.fields.stream:
                raise InvalidRequest("output_url", "is given with a stream", "stream: false")
            if form.fields.n > 1 and not url.endswith("/"):
                raise InvalidRequest("output_url", "is one file for several", "a folder, NAME/")
        if form.kind == "edit":  # a small file can have many pixels, and its alpha is decoded
            parse = partial(self._fair_share.run, client, max(size, IN_A_THREAD))
        return await parse(self._checked, form), size

    async def answer(
        self,
        client: KeyHolder,
        form: EditForm,
        size: int,
        request_id: str,
        on_progress: OnProgress,
        name: str,
    ) -> msgspec.Raw:
        """Run the edits of a job's form and return the answer's JSON.

        Args:
            client: holder of the key that sent it.
            form: result of `read`.
            size: bytes of the form.
            request_id: request id of its edits.
            on_progress: called with the picture's number and META for each event.
            name: name of files written to a folder.

        Raises:
            MaskserveError: the router's error.
            Failure: a worker's error.
        """
        if form.fields.response_format == "url":
            raise InvalidRequest("response_format", "is url of a job", "b64_json, or output_url")
        call = FormCall(form, CallContext(client, size, {}, _ROUTE), request_id)
        return await self._answer(call, self._picture_place(call, name), on_progress)

    async def _answer(
        self, call: FormCall, place: PlacePicture | None, on_progress: OnProgress | None = None
    ) -> msgspec.Raw:
        self._front.check_pictures(call.form.fields.n, call.client)
        if place is None:
            self._check_text(call.client, call.form)
        body, pictures = io.BytesIO(), self._pictures(call, on_progress)
        with self._front.room(call.client) as room:
            async with aclosing(_parts(call.form, pictures, place)) as parts:
                async for part in parts:
                    room.resize(room.size + len(part))
                    body.write(part)
        return msgspec.Raw(body.getvalue())

    def _picture_place(self, call: FormCall, name: str, origin: str = "") -> PlacePicture | None:
        """Return how pictures of a form are put where their URLs point; None: pictures go into the
        answer.

        Args:
            call: the form and its call.
            name: name of files that are written to a folder.
            origin: scheme and host of URLs at this router.
        """
        client, fields = call.client, call.form.fields
        if urls := _output_urls(fields, name):

            async def write(number: int, picture: memoryview) -> str:
                await self._outputs.put(client.scope, urls[number], picture)
                return urls[number]

            return write
        if fields.response_format == "url":

            async def keep(number: int, picture: memoryview) -> str:
                name, content = await self._fair_share.run(
                    client,
                    len(picture),
                    self._picture_urls.name_and_copy,
                    client.scope,
                    picture,
                    fields.output_format,
                )
                return self._picture_urls.keep(name, content, origin)

            return keep
        return None

    def _check_text(self, client: KeyHolder, form: EditForm) -> None:
        """Check that the client can hold the whole answer as one text.

        Raises:
            InvalidRequest: naming `n`.
        """
        if form.kind != "inpaint" or not (sized_image := form.image or form.mask):
            return  # without a mask, the model's area bounds the answer
        fields = form.fields
        settings = EditSettings(
            output_format=fields.output_format,
            output_quality=fields.output_compression,
            background=fields.background,
            output_encoding="base64",
        )
        height, width = read_size(sized_image, "image", self._limits)
        size = fields.n * answer_bytes(height * width, settings)
        if size > (most := self._front.most_bytes(client)):
            most_text = (
                f"up to {size // _MIB} MiB as base64; a response may have {most // _MIB} MiB"
            )
            problem = f"is {fields.n}, and the pictures take {most_text}"
            raise InvalidRequest("n", problem, "fewer pictures, jpeg, or output_url")

    def is_workflow(self, form: EditForm) -> bool:
        """Return whether a form's model is a workflow."""
        return form.fields.model in self._forms

    def work(self, form: EditForm) -> float:
        """Return the megapixels of a form's picture times the steps of all its edits.

        Raises:
            InvalidRequest: the picture is not readable.
        """
        if answer_size := parse_settings(msgspec.json.encode(settings_of(form))).answer_size:
            height, width = answer_size
        elif form.image:
            height, width = read_size(form.image, "image", self._limits)
        else:
            sides = [served.native_resolution for served in self._models.properties()]
            height = width = max(sides, default=1024)
        workflow = self._forms.get(form.fields.model or "")
        edits = [{}] if workflow is None else workflow.edits
        steps = sum(self._steps({**form.settings, **settings}) for settings in edits)
        return form.fields.n * steps * height * width / 1e6

    async def models(self, request: Request, request_id: str) -> Response:
        self._front.client(request.headers)
        listed = [_model(name) for name in self._models.names()]
        return json_answer({"object": "list", "data": listed}, request_id)

    async def model(self, request: Request, request_id: str) -> Response:
        self._front.client(request.headers)
        name = request.path_params["model"]
        self._models.resolved(name)
        return json_answer(_model(name), request_id)

    def _texts(self, model: Any) -> Collection[str] | None:
        workflow = self._forms.get(model) if isinstance(model, str) else None
        return None if workflow is None else workflow.texts

    def _checked(self, form: EditForm) -> EditForm:
        """Check a form, and add what follows from its fields and the models that are served.

        Raises:
            InvalidRequest: naming the field.
        """
        model = self._models.resolved(form.fields.model)
        if form.is_variation:
            model = self._models.varying(model)
            form = replace(form, settings={"strength": _VARIATION_STRENGTH, **form.settings})
        form = replace(form, fields=structs.replace(form.fields, model=model))
        steps = self._models.steps(model, form.fields.quality)
        if steps is not None:
            form = replace(form, settings={**form.settings, "num_inference_steps": steps})
        if workflow := self._forms.get(model or ""):
            workflow.check(form)
            return form
        if form.kind == "edit" and form.image and not form.is_variation:
            edits_whole = self._models.makes("edit", model)
            form = replace(form, masks_itself=not edits_whole or self._is_transparent(form.image))
        if form.kind != "inpaint" or form.fields.size == "auto":
            return form
        size = form.fields.size
        image = read_size(form.image or form.mask or b"", "image", self._limits)
        margins = _margins(size, image, form.fields.anchor)
        if form.settings.get("expand", margins) != margins:
            raise InvalidRequest("size", f"is {size[:20]}", "auto together with expand")
        return replace(form, settings={**form.settings, "expand": margins})

    def _is_transparent(self, image: bytes) -> bool:
        """Return whether an image has fully transparent pixels, which are its mask. Pictures that
        are too large for the router to decode count as opaque.
        """
        height, width = read_size(image, "image", self._limits)
        if height * width > DECODED_PIXELS:
            return False
        alpha = decode_mask(image, "image", self._limits).alpha
        return alpha is not None and not alpha.all()

    async def _pictures(
        self, call: FormCall, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[Picture, None]:
        """Yield the pictures of `n` concurrent edits in order, each with its META.

        The edits differ only in their seeds. The first picture comes when all are made, or when one
        edit waits for memory that earlier pictures hold. If an edit fails, the others are
        cancelled.
        """
        form, context = call.form, call.context
        first_seed = form.settings.get("seed")
        first_seed = secrets.randbits(_DRAWN_SEED_BITS) if first_seed is None else first_seed
        model = "edit" if on_progress is None else "edit_stream"
        request = await self._message(call, model, {})
        rooms = self._front.rooms(call.client)

        async def make_picture(number: int, room: EditRoom) -> Picture:
            name = call.request_id if form.fields.n == 1 else f"{call.request_id}-{number}"
            seed = first_seed + number if isinstance(first_seed, int) else first_seed
            message = _with_settings(request, {"seed": seed, "request_id": name})
            if on_progress is None:
                answer = ModelAnswer.parse(await self._front.infer(message, context, room))
                return await self._picture(call.client, answer)
            message = _with_settings(message, {"progress": True})
            last: Picture | None = None
            async with aclosing(self._events(message, context, room)) as events:
                async for last in events:
                    on_progress(number, last[1])
            if last is None:
                raise EngineFailed("the stream ended before the answer")
            return last

        results: dict[int, Picture] = {}

        async def make(number: int, room: EditRoom) -> None:
            results[number] = await make_picture(number, room)

        with ExitStack() as room_stack:
            numbered = [room_stack.enter_context(rooms.room(i)) for i in range(form.fields.n)]
            tasks = [asyncio.create_task(make(i, room)) for i, room in enumerate(numbered)]
            short = asyncio.create_task(rooms.short.wait())
            all_made = asyncio.gather(*tasks)
            try:
                await asyncio.wait((all_made, short), return_when=asyncio.FIRST_COMPLETED)
                if all_made.done():
                    all_made.result()  # raises the first error
                for number, room in enumerate(numbered):
                    with room:
                        await tasks[number]
                        yield results.pop(number)  # frees the picture after its use
            except (MaskserveError, Failure) as error:
                raise _in_form_words(form, error) from None
            finally:
                for task in (*tasks, short):
                    task.cancel()
                await asyncio.gather(*tasks, short, all_made, return_exceptions=True)

    async def _stream(self, request: Request, call: FormCall, resources: ExitStack) -> Response:
        form = call.form
        settings: dict[str, Any] = {"request_id": call.request_id}
        if form.fields.partial_images:
            settings["preview_every"] = self._preview_every(form)
        message = await self._message(call, "edit_stream", settings)
        room = resources.enter_context(self._front.room(call.client))
        events = self._openai_events(form, self._events(message, call.context, room))

        def failure_event(error: MaskserveError | Failure) -> bytes:
            return error_event(_in_form_words(form, error))

        try:
            headers = {"x-request-id": call.request_id}
            return await event_stream(request, events, resources, failure_event, headers)
        except (MaskserveError, Failure) as error:
            raise _in_form_words(form, error) from None

    async def _openai_events(
        self, form: EditForm, pictures: AsyncGenerator[Picture, None]
    ) -> AsyncGenerator[Event, None]:
        preview_count, last = 0, None
        async with aclosing(pictures):  # read to the end, where the edit is booked
            async for picture, meta in pictures:
                if meta.get("event") != "preview":
                    last = picture, meta
                elif preview_count < form.fields.partial_images:
                    yield partial_event(form, picture, preview_count)
                    preview_count += 1
        if last is None:
            raise EngineFailed("the stream ended before the answer")
        yield completed_event(form, *last)

    async def _events(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> AsyncGenerator[Picture, None]:
        """Yield previews and the final picture, each with its META."""
        async with aclosing(self._front.stream(message, context, room)) as answers:
            async for raw in answers:
                answer = ModelAnswer.parse(raw, streamed=True)
                if answer.head.outputs:
                    yield await self._picture(context.client, answer)

    async def _picture(self, client: KeyHolder, answer: ModelAnswer) -> Picture:
        size = sum(map(len, answer.contents))
        return await self._fair_share.run(client, size, _picture_of, answer)

    async def _message(self, call: FormCall, model: str, settings: dict[str, Any]) -> ModelRequest:
        """Return the request to a model; `settings` are those that the router adds."""
        workflow = self._forms.get(call.form.fields.model or "")
        make = partial(_edit_message, model) if workflow is None else workflow.message
        return await self._fair_share.run(call.client, call.context.size, make, call.form, settings)

    def _preview_every(self, form: EditForm) -> int:
        """Return the steps between previews, so that the requested number comes before the end."""
        steps = self._steps(form.settings)
        return min(max(1, steps // (form.fields.partial_images + 1)), _MOST_STEPS)

    def _steps(self, settings: Mapping[str, Any]) -> int:
        """Return the steps of an edit, from unchecked settings or by default."""
        steps, strength = settings.get("num_inference_steps"), settings.get("strength")
        if not isinstance(steps, int):
            served_models = self._models.properties()
            steps = min((served.num_inference_steps for served in served_models), default=1)
        steps = min(max(steps, 1), _MOST_STEPS)
        if isinstance(strength, int | float) and 0 < strength < 1:
            steps = steps_run(steps, strength)
        interval = settings.get("step_interval")
        return len(model_steps(steps, max(1, interval))) if isinstance(interval, int) else steps


async def _parts(
    form: EditForm, results: AsyncGenerator[Picture, None], place: PlacePicture | None
) -> AsyncGenerator[bytes, None]:
    """Yield the answer's JSON in parts, picture by picture."""
    metas: list[Mapping[str, Any]] = []
    async with aclosing(results) as pictures:
        async for picture, meta in pictures:
            yield images_begin(form.fields, picture) if not metas else b","
            if place is not None:
                yield image_at(await place(len(metas), picture), meta)
            else:
                for part in image_parts(picture, meta):
                    yield part
            metas.append(meta)
            del picture  # it is written; frees its memory
    yield images_end(metas)


def _margins(size: str, image: Size, anchor: str) -> list[int]:
    """Return the pixels left, top, right and bottom by which an image grows to a size.

    Args:
        size: WIDTHxHEIGHT.
        image: (height, width) of the image.
        anchor: position of the image on the canvas.

    Raises:
        InvalidRequest: `size` is malformed, or smaller than the image.
    """
    height, width = image
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size)
    growth = (int(match[2]) - height, int(match[1]) - width) if match else (-1, -1)
    if min(growth) < 0:
        raise InvalidRequest(
            "size", f"is {size[:20]}", f"auto, {width}x{height}, or larger: the picture grows"
        )
    top, left = (
        0 if first in anchor else excess if last in anchor else excess // 2
        for excess, first, last in zip(growth, ("top", "left"), ("bottom", "right"), strict=True)
    )
    margins = [left, top, growth[1] - left, growth[0] - top]
    if max(margins) > MAX_MARGIN:
        raise InvalidRequest("size", f"is {size[:20]}", f"at most {MAX_MARGIN} more on each side")
    return margins


def _output_urls(fields: Fields, name: str) -> list[str]:
    """Return the URL of each picture; none: pictures go into the answer."""
    if fields.output_url is None:
        return []
    if not fields.output_url.endswith("/"):
        return [fields.output_url]
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    numbers = [""] if fields.n == 1 else [f"-{number}" for number in range(fields.n)]
    return [f"{fields.output_url}{plain}{number}.{fields.output_format}" for number in numbers]


async def _first_of(parts: AsyncGenerator[bytes, None]) -> bytes:
    """Return the first part; close the generator if there is none."""
    try:
        return await anext(parts)
    except BaseException:
        await parts.aclose()
        raise


async def _with_first(
    first: bytes, parts: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yield all parts, of which the first is already taken."""
    async with aclosing(parts):
        yield first
        async for part in parts:
            yield part


def _with_settings(message: ModelRequest, more: Mapping[str, Any]) -> ModelRequest:
    """Return the same request with further settings; it shares the pictures."""
    copied = message.copy()
    settings = msgspec.json.decode(copied.view("SETTINGS"))
    copied.write("SETTINGS", msgspec.json.encode({**settings, **more}))
    return copied


def settings_of(form: EditForm) -> dict[str, Any]:
    """Return a form's settings with its size, or with OpenAI's reading of masks unless they choose
    one.
    """
    if form.kind != "inpaint":
        return {**form.settings, "size": form.fields.size}
    chosen = {"mask_mode", "mask_from"} & form.settings.keys()
    return {**form.settings} if chosen else {"mask_mode": "alpha", **form.settings}


def mask_of(form: EditForm) -> bytes:
    """Return MASK of a form; empty without one, and where the canvas grows."""
    if form.masks_itself and form.mask is None and not any(form.settings.get("expand") or ()):
        return form.image
    return form.mask or b""


def _edit_message(model: str, form: EditForm, more_settings: dict[str, Any]) -> ModelRequest:
    """Return the request to a worker; `more_settings` are settings that the router adds."""
    fields = form.fields
    from_fields = {
        "model": fields.model,
        "background": fields.background,
        "output_format": fields.output_format,
        "output_quality": fields.output_compression,
    }
    settings = settings_of(form) | from_fields | more_settings | {"output_encoding": "raw"}
    inputs: dict[str, Sequence[bytes]] = {
        "IMAGE": [form.image, *form.references],
        "MASK": [mask_of(form)],
        "PROMPT": [fields.prompt.encode()],
        "SETTINGS": [msgspec.json.encode(settings)],
        **({"CONTROL": form.control} if form.control else {}),
    }
    message = ModelRequest(pb.ModelInferRequest(model_name=model))
    for name, values in inputs.items():
        message.add(name, values)
    return message


def _picture_of(answer: ModelAnswer) -> Picture:
    outputs = answer.outputs()
    meta = msgspec.json.decode(outputs["META"], type=dict[str, Any])
    if "outputs" in meta:  # kinds of a workflow's outputs
        meta["outputs"] = {
            name: _readable(kind, bytes(outputs[name.upper()]))
            for name, kind in meta["outputs"].items()
            if name != PICTURE
        }
    if "warnings" in meta:
        meta["warnings"] = [in_openais_words(warning) for warning in meta["warnings"]]
    return outputs.get("IMAGE", memoryview(b"")), meta


def _readable(kind: str, value: bytes) -> Any:
    """Return a further output of a workflow in JSON; a picture or mask becomes base64."""
    match kind:
        case "text":
            return value.decode()
        case "verdict":
            return msgspec.json.decode(value)
    return text_of_picture(value)


def _in_form_words(form: EditForm, error: MaskserveError | Failure) -> MaskserveError | Failure:
    """Return an error in the words of this API.

    A client that sent no mask gets no message about a mask's channels.
    """
    text = split_code(text_of(error))[1]
    problems = {"no alpha channel": "no alpha channel", "it is opaque": "no transparent pixels"}
    problem = next((problems[phrase] for phrase in problems if phrase in text), None)
    if form.mask is None and form.has_source and (problem or text.startswith("MASK")):
        return InvalidRequest(
            "mask",
            "is missing, and the image has no fully transparent pixels",
            "a PNG of the image's size, transparent (alpha 0) where to edit",
        )
    if problem:
        accepted = "transparent pixels where to edit, or mask_mode: white"
        return InvalidRequest("mask", f"has {problem}", accepted)
    quality = form.fields.quality
    if quality != "auto" and "SETTINGS.num_inference_steps" in text_of(error):
        too_many = f"is {quality}, which is more steps than the model takes"
        return InvalidRequest("quality", too_many, "auto")
    if isinstance(error, Failure):
        source = 0 if "template_id" in form.settings else 1
        return replace(error, details=in_openais_words(error.details, source))
    return error


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER}
