"""`/v1/images/edits`, `generations` and `variations`: OpenAI's API in front of the workers."""

from __future__ import annotations

import io
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from maskserve_common.config import LimitsConfig
from maskserve_common.contracts.settings import EditSettings
from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError
from maskserve_common.imaging.images import read_size
from maskserve_common.servers.failure import Failure
from maskserve_router.api.front import Front
from maskserve_router.api.http_answers import JSON, ChunkedResponse, while_connected, whole_answer
from maskserve_router.api.http_events import Event, event_stream
from maskserve_router.api.openai import answers
from maskserve_router.api.openai.form import EditForm, Fields, Source
from maskserve_router.api.openai.form_pictures import (
    FormCall,
    FormPictures,
    OnProgress,
    Picture,
    in_form_words,
)
from maskserve_router.api.openai.form_reader import MOST_STEPS, FormReader
from maskserve_router.api.openai.picture_urls import PictureUrls
from maskserve_router.api.outputs import Outputs
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.scheduling.edit_cost import answer_bytes

_MIB: Final = 2**20
_ROUTE: Final = "openai"
PlacePicture: TypeAlias = Callable[[int, memoryview], Awaitable[str]]
"""Puts a picture, by its number, where a URL points, and returns the URL."""


class ImageEdits:
    """Handlers of edits, generations and variations.

    Args:
        reader: reads and checks forms.
        pictures: makes the pictures of forms.
        outputs: writes pictures to URLs of requests.
        picture_urls: keeps pictures that answers name by URL.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        front: Front,
        fair_share: FairShare,
        reader: FormReader,
        pictures: FormPictures,
        outputs: Outputs,
        picture_urls: PictureUrls,
    ) -> None:
        self._limits, self._front, self._fair_share = limits, front, fair_share
        self._reader, self._pictures = reader, pictures
        self._outputs, self._picture_urls = outputs, picture_urls

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
            form, size = await self._reader.read(request, client, exit_stack, source)
            if form.fields.webhook is not None:
                raise InvalidRequest("webhook", "is given without a job", "POST /v1/jobs")
            call = FormCall(form, CallContext(client, size, headers, _ROUTE), request_id)
            if form.fields.stream:
                return await self._stream(request, call, exit_stack)
            place = self._picture_place(call, request_id, str(request.base_url))
            answer_headers = {"x-request-id": request_id}
            if request.scope["http_version"] == "1.0":  # HTTP/1.0 needs the length of a body
                body = await while_connected(request, self._answer(call, place))
                room = exit_stack.enter_context(self._front.room(client))
                return whole_answer([memoryview(body)], room, exit_stack, answer_headers)
            parts = _parts(form, self._pictures.make(call), place)
            first = await while_connected(request, _first_of(parts))
            body_parts, resources = _with_first(first, parts), exit_stack.pop_all()
            return ChunkedResponse(body_parts, resources, headers=answer_headers, media_type=JSON)

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
            form: a form that a `FormReader` has read.
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
        body, pictures = io.BytesIO(), self._pictures.make(call, on_progress)
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

    async def _stream(self, request: Request, call: FormCall, resources: ExitStack) -> Response:
        form = call.form
        settings: dict[str, Any] = {"request_id": call.request_id}
        if form.fields.partial_images:
            settings["preview_every"] = self._preview_every(form)
        room = resources.enter_context(self._front.room(call.client))
        pictures = await self._pictures.stream(call, settings, room)
        events = _openai_events(form, pictures)

        def failure_event(error: MaskserveError | Failure) -> bytes:
            return answers.error_event(in_form_words(form, error))

        try:
            headers = {"x-request-id": call.request_id}
            return await event_stream(request, events, resources, failure_event, headers)
        except (MaskserveError, Failure) as error:
            raise in_form_words(form, error) from None

    def _preview_every(self, form: EditForm) -> int:
        """Return the steps between previews, so that the requested number comes before the end."""
        steps = self._reader.steps(form.settings)
        return min(max(1, steps // (form.fields.partial_images + 1)), MOST_STEPS)


async def _openai_events(
    form: EditForm, pictures: AsyncGenerator[Picture, None]
) -> AsyncGenerator[Event, None]:
    preview_count, last = 0, None
    async with aclosing(pictures):  # read to the end, where the edit is booked
        async for picture, meta in pictures:
            if meta.get("event") != "preview":
                last = picture, meta
            elif preview_count < form.fields.partial_images:
                yield answers.partial_event(form, picture, preview_count)
                preview_count += 1
    if last is None:
        raise EngineFailed("the stream ended before the answer")
    yield answers.completed_event(form, *last)


async def _parts(
    form: EditForm, results: AsyncGenerator[Picture, None], place: PlacePicture | None
) -> AsyncGenerator[bytes, None]:
    """Yield the answer's JSON in parts, picture by picture."""
    metas: list[Mapping[str, Any]] = []
    async with aclosing(results) as pictures:
        async for picture, meta in pictures:
            yield answers.images_begin(form.fields, picture) if not metas else b","
            if place is not None:
                yield answers.image_at(await place(len(metas), picture), meta)
            else:
                for part in answers.image_parts(picture, meta):
                    yield part
            metas.append(meta)
            del picture  # it is written; frees its memory
    yield answers.images_end(metas)


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
