"""Pictures of a form: its edits at the workers, or its run of a workflow."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.errors import EngineFailed, InvalidRequest, MaskserveError, split_code
from maskserve_common.servers.failure import Failure
from maskserve_router.api.front import Front
from maskserve_router.api.openai.answers import in_openais_words, text_of_picture
from maskserve_router.api.openai.form import PICTURE, EditForm, ModelForm
from maskserve_router.api.openai.form_reader import mask_of, settings_of
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.messages.call_context import CallContext
from maskserve_router.messages.failures import text_of
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.messages.model_request import ModelRequest
from maskserve_router.scheduling.admission import EditRoom

_DRAWN_SEED_BITS: Final = 32
Picture: TypeAlias = tuple[memoryview, dict[str, Any]]
"""A picture's file, uncopied, and its META."""
OnProgress: TypeAlias = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class FormCall:
    """A checked form, and the call that brought it."""

    form: EditForm
    context: CallContext
    request_id: str

    @property
    def client(self) -> KeyHolder:
        return self.context.client


class FormPictures:
    """Makes the pictures of forms.

    Args:
        forms: form of each workflow, by name.
    """

    def __init__(self, front: Front, fair_share: FairShare, forms: Mapping[str, ModelForm]) -> None:
        self._front, self._fair_share, self._forms = front, fair_share, forms

    async def make(
        self, call: FormCall, on_progress: OnProgress | None = None
    ) -> AsyncGenerator[Picture, None]:
        """Yield the pictures of `n` concurrent edits in order, each with its META.

        The edits differ only in their seeds. The first picture comes when all are made, or when one
        edit waits for memory that earlier pictures hold. If an edit fails, the others are
        cancelled.
        """
        form = call.form
        model = "edit" if on_progress is None else "edit_stream"
        request = await self._message(call, model, {})
        seed = form.settings.get("seed")
        first_seed = secrets.randbits(_DRAWN_SEED_BITS) if seed is None else seed
        rooms = self._front.rooms(call.client)
        results: dict[int, Picture] = {}

        async def make(number: int, room: EditRoom) -> None:
            message = _with_settings(request, _settings_of_picture(call, number, first_seed))
            results[number] = await self._make_one(call, message, number, room, on_progress)

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
                raise in_form_words(form, error) from None
            finally:
                for task in (*tasks, short):
                    task.cancel()
                await asyncio.gather(*tasks, short, all_made, return_exceptions=True)

    async def _make_one(
        self,
        call: FormCall,
        message: ModelRequest,
        number: int,
        room: EditRoom,
        on_progress: OnProgress | None,
    ) -> Picture:
        if on_progress is None:
            answer = ModelAnswer.parse(await self._front.infer(message, call.context, room))
            return await self._read_picture(call.client, answer)
        message = _with_settings(message, {"progress": True})
        last: Picture | None = None
        async with aclosing(self._events(message, call.context, room)) as events:
            async for last in events:
                on_progress(number, last[1])
        if last is None:
            raise EngineFailed("the stream ended before the answer")
        return last

    async def stream(
        self, call: FormCall, settings: dict[str, Any], room: EditRoom
    ) -> AsyncGenerator[Picture, None]:
        """Return a generator of the previews and the final picture of one edit.

        Args:
            call: the form and its call.
            settings: settings that the router adds.
            room: memory of the answers.
        """
        return self._events(await self._message(call, "edit_stream", settings), call.context, room)

    async def _events(
        self, message: ModelRequest, context: CallContext, room: EditRoom
    ) -> AsyncGenerator[Picture, None]:
        """Yield previews and the final picture, each with its META."""
        async with aclosing(self._front.stream(message, context, room)) as answers:
            async for raw in answers:
                answer = ModelAnswer.parse(raw, streamed=True)
                if answer.head.outputs:
                    yield await self._read_picture(context.client, answer)

    async def _read_picture(self, client: KeyHolder, answer: ModelAnswer) -> Picture:
        size = sum(map(len, answer.contents))
        return await self._fair_share.run(client, size, _picture_of, answer)

    async def _message(self, call: FormCall, model: str, settings: dict[str, Any]) -> ModelRequest:
        """Return the request to a model; `settings` are those that the router adds."""
        workflow = self._forms.get(call.form.fields.model or "")
        make = partial(_edit_message, model) if workflow is None else workflow.message
        return await self._fair_share.run(call.client, call.context.size, make, call.form, settings)


def _settings_of_picture(call: FormCall, number: int, first_seed: Any) -> dict[str, Any]:
    """Return the settings that distinguish one of a form's pictures from the others.

    A seed that is no number is left to the worker, which refuses it.
    """
    return {
        "seed": first_seed + number if isinstance(first_seed, int) else first_seed,
        "request_id": call.request_id if call.form.fields.n == 1 else f"{call.request_id}-{number}",
    }


def _with_settings(message: ModelRequest, more: Mapping[str, Any]) -> ModelRequest:
    """Return the same request with further settings; it shares the pictures."""
    copied = message.copy()
    settings = msgspec.json.decode(copied.view("SETTINGS"))
    copied.write("SETTINGS", msgspec.json.encode({**settings, **more}))
    return copied


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


def in_form_words(form: EditForm, error: MaskserveError | Failure) -> MaskserveError | Failure:
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
