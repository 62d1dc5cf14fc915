"""Pictures without a mask or a source through OpenAI's API: kinds, sizes, names and URLs."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import grpc
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts import bytes_tensor
from maskserve_common.contracts.request import EditKind
from maskserve_common.errors import InvalidRequest
from maskserve_common.lru_cache import LruCache
from maskserve_router.api.openai.form_reader import FormReader
from maskserve_router.api.openai.picture_urls import PATH, PictureUrls
from maskserve_router.config import OpenAIConfig
from maskserve_router.keys import KeyRing
from maskserve_router.messages.edit_call import make_edit_call, parse_request
from maskserve_router.router import Router
from tests.support.router import SIDE, Faulty, calling, cluster, until
from tests.support.router_requests import edit_request, mask_of

ALL: tuple[EditKind, ...] = ("edit", "generate", "inpaint")


def picture(mode: str = "RGB", alpha: int = 255) -> bytes:
    file = io.BytesIO()
    image = Image.new(mode, (SIDE, SIDE), "red")
    if mode == "RGBA":
        image.putalpha(alpha)
    image.save(file, "png")
    return file.getvalue()


async def make(
    worker: Faulty,
    router: Router,
    kinds: tuple[EditKind, ...],
    *,
    references: bool = False,
    most_pictures: int = 1,
) -> None:
    """Let a worker serve these kinds of edits, and wait until the router knows."""
    served = worker._status.served
    assert served is not None
    expected = worker._status.served = replace(
        served, edit_kinds=kinds, references=references, most_pictures=most_pictures
    )
    number = [w.address for w in router.pool.workers.values()].index(worker.address)
    entry = list(router.pool.workers.values())[number]
    await until("it says so", lambda: entry.served == expected)


class Session:
    """Calls of OpenAI's API at a router."""

    def __init__(self, session: aiohttp.ClientSession, router: Router) -> None:
        self._session, self.url = session, f"http://127.0.0.1:{router.http.port}"

    async def generate(self, **fields: Any) -> tuple[int, Any]:
        url = f"{self.url}/v1/images/generations"
        async with self._session.post(url, json={"prompt": "a star", **fields}) as response:
            return response.status, await body_of(response)

    async def edit(self, image: bytes, mask: bytes | None = None, **fields: Any) -> tuple[int, Any]:
        form = aiohttp.FormData({"prompt": "a star"})
        form.add_field("image", image, filename="a.png")
        if mask is not None:
            form.add_field("mask", mask, filename="m.png")
        for name, value in fields.items():
            form.add_field(name, str(value))
        async with self._session.post(f"{self.url}/v1/images/edits", data=form) as response:
            return response.status, await body_of(response)

    async def get(self, url: str) -> tuple[int, str, bytes]:
        async with self._session.get(url) as response:
            return response.status, response.headers["content-type"], await response.read()


async def body_of(response: aiohttp.ClientResponse) -> Any:
    raw = await response.read()
    return json.loads(raw) if response.content_type == "application/json" else raw.decode()


@asynccontextmanager
async def serving(
    *kinds: tuple[EditKind, ...], **tables: Any
) -> AsyncIterator[tuple[Session, list[Faulty]]]:
    """A router before one worker for each of these sets of kinds."""
    async with (
        cluster(None, answer=picture(), **tables) as (router, workers),
        aiohttp.ClientSession() as session,
    ):
        for worker, kind in zip(workers, kinds, strict=False):
            await make(worker, router, kind)
        for worker in workers[len(kinds) :]:
            await make(worker, router, kinds[-1])
        yield Session(session, router), list(workers)


def settings_of(workers: list[Faulty]) -> list[dict[str, Any]]:
    return [request for worker in workers for request in worker.requests]


async def test_a_generation_has_no_pictures_and_its_size() -> None:
    async with serving(ALL) as (session, workers):
        status, body = await session.generate(size=f"{SIDE}x{SIDE}", n=2, seed=5, user="me")
        assert (status, len(body["data"])) == (200, 2)
        assert base64.b64decode(body["data"][0]["b64_json"]) == picture()
        requests = settings_of(workers)
        assert sorted(request["seed"] for request in requests) == [5, 6]
        assert {request["size"] for request in requests} == {f"{SIDE}x{SIDE}"}
        assert not any("mask_mode" in request for request in requests)


async def test_a_stream_of_a_generation_has_openais_events() -> None:
    async with serving(ALL) as (session, workers):
        for worker in workers:
            worker.progress = 1
        status, body = await session.generate(stream=True)
        assert status == 200
        assert "event: image_generation.completed" in body


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template_id": "0" * 32}, "template_id: is not a field of a generation"),
        ({"size": "huge"}, "size: "),
        ({"quality": "best"}, "quality: "),
        ({"quality": "low", "num_inference_steps": 4}, "quality: is low together with num_inf"),
        ({"response_format": "url", "stream": True}, "response_format: is url in a stream"),
        ({"model": "dall-e-9"}, "model: 'dall-e-9' is not served here"),
        ({"images": [{"image_url": "data:image/png;base64,AAAA"}]}, "image: is not a field"),
        ({"prompt": None}, "prompt: is missing"),
    ],
)
async def test_a_generation_that_cannot_be_is_refused_by_its_field(
    fields: dict[str, Any], message: str
) -> None:
    async with serving(ALL) as (session, workers):
        status, body = await session.generate(**fields)
        assert status in (400, 404)
        assert message in body["error"]["message"]
        assert not settings_of(workers)


@pytest.mark.parametrize(
    ("image", "kinds", "masked"),
    [
        (picture(), ALL, False),
        (picture("RGBA"), ALL, False),  # opaque: no pixel is a mask
        (picture("RGBA", 0), ALL, True),
        (picture(), ("inpaint",), True),  # the worker refuses it, in its own words
    ],
)
async def test_an_image_without_a_mask_is_edited_whole_unless_it_masks_itself(
    image: bytes, kinds: tuple[EditKind, ...], masked: bool
) -> None:
    async with serving(kinds) as (session, workers):
        status, _ = await session.edit(image)
        assert status == (200 if kinds == ALL else 400)
        for request in settings_of(workers):
            assert (request.get("mask_mode") == "alpha") is masked


async def test_a_variation_is_an_edit_of_a_base_model_without_a_prompt() -> None:
    """No model that edits by instructions is chosen, and one that is named is refused."""
    async with (
        cluster(None, ("klein", "flux"), answer=picture()) as (router, workers),
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{router.http.port}/v1/images/variations"

        async def vary(**fields: str) -> tuple[int, Any]:
            form = aiohttp.FormData(fields)
            form.add_field("image", picture("RGBA", 0), filename="a.png")
            async with session.post(url, data=form) as response:
                return response.status, await body_of(response)

        await make(workers[0], router, ALL, references=True)
        await make(workers[1], router, ALL)
        for fields in ({}, {"model": "flux", "strength": "0.3", "size": f"{SIDE}x{SIDE}"}):
            status, body = await vary(n="2", seed="5", **fields)
            assert (status, len(body["data"])) == (200, 2)
        assert not workers[0].requests
        settings = workers[1].requests
        assert [request["strength"] for request in settings] == [0.6, 0.6, 0.3, 0.3]
        assert not any("mask_mode" in request for request in settings)
        for fields, message in (
            ({"model": "klein"}, "model: klein needs a prompt or a mask to change a picture"),
            ({"prompt": "a star"}, "prompt: is not a field of a variation"),
            ({"mask_from": '{"text": "a star"}'}, "mask_from: is not a field of a variation"),
        ):
            status, body = await vary(**fields)
            assert (status, message in body["error"]["message"]) == (400, True), body
        await make(workers[1], router, ("inpaint",))
        status, body = await vary()
        assert "model: every served model needs a prompt or a mask" in body["error"]["message"]


_NO_EFFECT = "has no effect without MASK; accepted: no mask_dilate"
_NOT_SERVED = "is missing: this model repaints masks only; accepted: IMAGE with MASK"


@pytest.mark.parametrize(
    ("text", "param", "generated"),
    [
        (f"SETTINGS.mask_dilate: {_NO_EFFECT}", "mask_dilate", False),
        (f"SETTINGS.mask_dilate: {_NO_EFFECT}", "mask_dilate", True),
        (f"IMAGE: {_NOT_SERVED}", "image", True),
        (f"MASK: {_NOT_SERVED}", "mask", False),
        ("SETTINGS.mask_mode: is alpha, but MASK has no alpha channel", "mask", False),
    ],
)
async def test_a_refusal_names_its_field_though_it_says_mask(
    text: str, param: str, generated: bool
) -> None:
    """A generation was told that its mask is missing."""
    async with serving(ALL) as (session, workers):
        for worker in workers:
            worker.fails, worker.status = 9, grpc.StatusCode.INVALID_ARGUMENT
            worker.text = f"[INVALID_REQUEST] {text}"
        status, body = await (session.generate() if generated else session.edit(picture()))
        assert (status, body["error"]["param"]) == (400, param)
        is_of_mask = "no fully transparent pixels" in body["error"]["message"]
        assert is_of_mask == (param == "mask")


async def test_alpha_is_decoded_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small file can have many pixels."""
    threads: list[threading.Thread] = []
    is_transparent = FormReader._is_transparent

    def watched(self: FormReader, image: bytes) -> bool:
        threads.append(threading.current_thread())
        return is_transparent(self, image)

    monkeypatch.setattr(FormReader, "_is_transparent", watched)
    async with serving(ALL) as (session, _):
        await session.edit(picture())
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_size_is_the_answers_without_a_mask_and_a_canvas_with_one() -> None:
    async with serving(ALL) as (session, workers):
        await session.edit(picture(), size="32x32")
        assert settings_of(workers)[-1]["size"] == "32x32"
        status, body = await session.edit(picture(), mask_of(100, SIDE), size="32x32")
        assert (status, "larger: the picture grows" in body["error"]["message"]) == (400, True)
        status, _ = await session.edit(
            picture(), mask_of(100, SIDE), size="96x96", mask_mode="white"
        )
        assert status == 200
        assert settings_of(workers)[-1]["expand"] == [16, 16, 16, 16]


async def test_quality_is_a_share_of_the_models_steps() -> None:
    async with serving(ALL) as (session, workers):
        served = workers[0]._status.served
        assert served is not None
        steps = served.num_inference_steps
        for quality, share in (("low", 0.5), ("high", 1.5), ("hd", 1.5)):
            await session.generate(quality=quality)
            assert settings_of(workers)[-1]["num_inference_steps"] == round(share * steps)
        for quality in ("auto", "medium", "standard"):
            await session.generate(quality=quality)
            assert "num_inference_steps" not in settings_of(workers)[-1]


async def test_names_that_clients_have_built_in_stand_for_a_served_model() -> None:
    aliases = {"gpt-image-1": "flux", "dall-e-2": "absent"}
    async with serving(ALL, openai={"aliases": aliases}) as (session, workers):
        status, _ = await session.generate(model="gpt-image-1")
        assert (status, settings_of(workers)[-1]["model"]) == (200, "flux")
        status, body = await session.generate(model="dall-e-2")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        _, _, listed = await session.get(f"{session.url}/v1/models")
        assert [model["id"] for model in json.loads(listed)["data"]] == ["flux", "gpt-image-1"]


async def test_a_url_names_a_picture_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    cache = partial(LruCache, now=lambda: now_s[0])
    monkeypatch.setattr("maskserve_router.api.openai.picture_urls.LruCache", cache)
    async with serving(ALL, openai={"url_s": 60.0}) as (session, _):
        status, body = await session.generate(response_format="url", output_format="png")
        assert status == 200
        url = body["data"][0]["url"]
        assert url.startswith(f"{session.url}{PATH}/")
        assert "b64_json" not in body["data"][0]
        assert await session.get(url) == (200, "image/png", picture())
        status, _, _ = await session.get(url.replace("-", "-0"))
        assert status == 404
        now_s[0] = 61.0
        status, _, raw = await session.get(url)
        assert (status, "no longer kept" in json.loads(raw)["error"]["message"]) == (404, True)


def test_urls_begin_as_the_operator_says_and_keys_share_the_room() -> None:
    urls = PictureUrls(OpenAIConfig(url_bytes=100, public_url="https://edits.example/"))
    scope = KeyRing((), 99).client({}).scope

    def keep(picture: bytes, output_format: str) -> str:
        return urls.keep(*urls.name_and_copy(scope, picture, output_format), "http://host:1/")

    first = keep(b"a" * 60, "png")
    assert first.startswith(f"https://edits.example{PATH}/")
    assert keep(b"a" * 60, "png") == first
    keep(b"b" * 60, "jpeg")
    assert len(urls._pictures) == 1
    with pytest.raises(Exception, match="response_format: is url, and the picture has 101 bytes"):
        keep(b"a" * 101, "png")


async def test_kserve_needs_neither_picture_and_chooses_a_model_that_makes_the_kind() -> None:
    async with (
        cluster(None, ("fill", "klein"), answer=picture()) as (router, workers),
        calling(router) as call,
    ):
        await make(workers[0], router, ("inpaint",))
        await make(workers[1], router, ALL)
        message = pb.ModelInferRequest.FromString(edit_request(b"", b""))
        for tensor in list(message.inputs)[:2]:
            message.inputs.remove(tensor)
        del message.raw_input_contents[:2]
        await call(message.SerializeToString())
        assert [len(worker.requests) for worker in workers] == [0, 1]


async def test_an_edit_goes_to_a_model_that_sees_as_many_pictures() -> None:
    """By KServe's API and OpenAI's."""
    async with (
        cluster(None, ("kontext", "klein"), answer=picture()) as (router, workers),
        calling(router) as call,
    ):
        await make(workers[0], router, ALL)
        await make(workers[1], router, ALL, most_pictures=3)
        await call(several(picture(), picture(), picture()))
        assert [len(worker.requests) for worker in workers] == [0, 1]
        url = f"http://127.0.0.1:{router.http.port}/v1/images/edits"
        form = aiohttp.FormData({"prompt": "a star"})
        for _ in range(2):
            form.add_field("image[]", picture(), filename="a.png")
        async with aiohttp.ClientSession() as session, session.post(url, data=form) as response:
            assert response.status == 200
        assert [len(worker.requests) for worker in workers] == [0, 2]


def several(*pictures: bytes) -> bytes:
    """A request to `edit` with these elements of IMAGE."""
    message = pb.ModelInferRequest.FromString(edit_request(b"", b""))
    message.inputs[0].shape[:] = [len(pictures)]
    message.raw_input_contents[0] = bytes_tensor.pack(pictures)
    encoded: bytes = message.SerializeToString()
    return encoded


def test_the_first_picture_of_several_is_the_source() -> None:
    for pictures in ((), (b"a",), (b"a", b"bc"), (b"", b"bc")):
        message = parse_request(several(*pictures))
        call = make_edit_call(message, 0, KeyRing((), 99).client({}))
        assert call.image == (pictures[0] if pictures else b"")
        assert call.references == max(0, len(pictures) - 1)
    broken = pb.ModelInferRequest.FromString(several(b"a", b"bc"))
    broken.raw_input_contents[0] = broken.raw_input_contents[0][:-1]
    with pytest.raises(InvalidRequest, match=r"IMAGE: is not 2 elements in BYTES form"):
        parse_request(broken.SerializeToString())
