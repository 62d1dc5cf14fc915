"""Memory of answers in a router: counted before edits are sent, until all is written."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2 as pb

from maskserve_common.contracts.settings import EditSettings
from maskserve_router.api import http_events
from maskserve_router.messages.model_answer import ModelAnswer
from maskserve_router.router import Router
from maskserve_router.scheduling.edit_cost import answer_bytes
from tests.support.router import Faulty, calling, cluster, edit, http_edit, until

MIB = 2**20
SIDE = 590
"""Side of a picture whose answer may have 1 MiB."""


def png(side: int, padding: int = 0) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.zeros((side, side, 4), np.uint8)).save(out, "PNG")
    return out.getvalue() + bytes(padding)


def form(**fields: Any) -> aiohttp.FormData:
    data = aiohttp.FormData()
    data.add_field("image", png(SIDE), filename="a.png")
    for name, value in {"prompt": "x", **fields}.items():
        data.add_field(name, str(value))
    return data


@asynccontextmanager
async def site(
    most_mib: int, mib: int = 1, **more: Any
) -> AsyncIterator[tuple[Router, list[Faulty], Any]]:
    answer = png(8, mib * MIB)
    tables = {"admission": {"max_bytes": most_mib * MIB}}
    async with cluster(answer=answer, **tables, **more) as (router, workers):
        url = f"http://127.0.0.1:{router.http.port}"
        async with aiohttp.ClientSession(url, read_bufsize=2**16) as session:
            yield router, workers, session


async def watch(router: Router, counts: list[int]) -> None:
    while True:
        counts.append(router.admission.bytes)
        await asyncio.sleep(0)


async def test_ten_pictures_go_through_room_for_three():
    async with site(4) as (router, workers, session):
        byte_counts: list[int] = []
        watching = asyncio.create_task(watch(router, byte_counts))
        async with session.post("/v1/images/edits", data=form(n=10, seed=5)) as answer:
            payload = await answer.json()
            assert answer.status == 200, payload
        watching.cancel()
        assert [base64.b64decode(item["b64_json"]) for item in payload["data"]] == [
            png(8, MIB)
        ] * 10
        assert [item["seed"] for item in payload["maskserve"]] == list(range(5, 15))
        assert payload["size"] == "8x8"
        assert max(byte_counts) <= 4 * MIB
        assert sum(len(worker.requests) for worker in workers) == 10
        await until("all is given back", lambda: not router.admission.bytes)


async def test_what_there_is_no_room_for_is_refused_before_it_is_sent():
    async with site(4) as (_, workers, session):
        for worker in workers:
            worker.hold()
        first = asyncio.ensure_future(session.post("/v1/images/edits", data=form(n=3)))
        await until("three are there", lambda: sum(len(w.requests) for w in workers) == 3)
        async with session.post("/v1/images/edits", data=form()) as answer:
            assert answer.status == 429
            assert "bytes of requests and answers" in await answer.text()
        for worker in workers:
            worker.let_go()
        answer = await first
        assert answer.status == 200
        assert len((await answer.json())["data"]) == 3
        assert sum(len(worker.requests) for worker in workers) == 3


async def test_a_picture_that_fails_before_any_is_written_is_the_status():
    async with site(100) as (router, workers, session):
        for worker in workers:
            worker.fails = 9
        async with session.post("/v1/images/edits", data=form(n=4)) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "engine_failed"
        assert router.admission.bytes == router.admission.edits == 0


async def test_a_picture_that_fails_behind_others_ends_the_body_short():
    async with site(3, models=("flux",)) as (router, workers, session):
        (worker,) = workers
        async with session.post("/v1/images/edits", data=form(n=10)) as answer:
            assert answer.status == 200
            worker.fails = 9
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await until("all is given back", lambda: not router.admission.bytes)
        assert router.admission.edits == 0


@pytest.mark.parametrize("door", ["openai", "openai stream", "kserve"])
async def test_an_answer_counts_until_its_client_has_it(door: str):
    async with site(100, mib=24) as (router, _, session):  # more than lies between both
        if door == "kserve":
            head, _, body = http_edit().partition(b"\r\n\r\n")
            lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[2:]]
            named = {name: value for name, value in lines if name != "Content-Length"}
            parts = json.loads(body[: int(named["Inference-Header-Content-Length"])])
            tail = body[int(named["Inference-Header-Content-Length"]) :]
            first = json.dumps({**parts, "parameters": {"binary_data_output": True}}).encode()
            named["Inference-Header-Content-Length"] = str(len(first))
            asking = session.post("/v2/models/edit/infer", data=first + tail, headers=named)
        else:
            more = {"stream": "true"} if "stream" in door else {}
            asking = session.post("/v1/images/edits", data=form(**more))
        async with asking as answer:
            assert answer.status == 200
            await until("the edit has ended", lambda: not router.admission.edits)
            await asyncio.sleep(0.1)
            assert router.admission.bytes > 24 * MIB
            assert len(await answer.read()) > 24 * MIB
        await until("all is given back", lambda: not router.admission.bytes)


async def test_grpc_answers_count_until_they_are_written():
    async with site(100) as (router, _, _), calling(router) as call:
        answer = pb.ModelInferResponse.FromString(await call(edit()))
        assert len(answer.raw_output_contents[0]) > MIB
        await until("all is given back", lambda: not router.admission.bytes)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 3),
        ({"background": "transparent"}, 4),
        ({"output_format": "jpeg"}, 2),
        ({"output_format": "webp"}, 3),
        ({"output_format": "webp", "output_quality": 90}, 2),
        ({"output_encoding": "base64"}, 4),
    ],
)
def test_an_answer_of_noise_is_no_larger_than_its_room(settings: dict[str, Any], most: int):
    edit_settings = EditSettings(**settings)
    room = answer_bytes(256 * 256, edit_settings)
    assert most * 256 * 256 < room < 1.5 * most * 256 * 256
    channels = 4 if edit_settings.background == "transparent" else 3
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, channels), np.uint8)
    out = io.BytesIO()
    quality = {"jpeg": 95, "webp": edit_settings.output_quality or 0}.get(
        edit_settings.output_format, 0
    )
    lossless = (
        {"lossless": edit_settings.output_quality is None}
        if edit_settings.output_format == "webp"
        else {}
    )
    Image.fromarray(noise).save(out, edit_settings.output_format, quality=quality, **lossless)
    text = 4 / 3 if edit_settings.output_encoding == "base64" else 1
    assert len(out.getvalue()) * text <= room


def test_an_answers_contents_stay_where_they_came():
    response = pb.ModelInferResponse(model_name="edit", id="7")
    for name, value in (("IMAGE", b"i" * 1000), ("META", b"{}")):
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(value).to_bytes(4, "little") + value)
    raw = response.SerializeToString()
    answer = ModelAnswer.parse(raw)
    assert answer.head.id == "7"
    assert not answer.head.raw_output_contents
    assert {name: bytes(output) for name, output in answer.outputs().items()} == {
        "IMAGE": b"i" * 1000,
        "META": b"{}",
    }
    assert all(content.obj is raw for content in answer.contents)
    stream = pb.ModelStreamInferResponse(infer_response=response).SerializeToString()
    assert ModelAnswer.parse(stream, streamed=True).outputs().keys() == {"IMAGE", "META"}
    failed = pb.ModelStreamInferResponse(error_message="no").SerializeToString()
    assert ModelAnswer.parse(failed, streamed=True).error == "no"
    for broken in (raw[:-1], b"\xff" * 20):
        with pytest.raises(ValueError, match="is no answer"):
            ModelAnswer.parse(broken)


# What can never be is told so, and not to come back later.


async def test_more_pictures_than_a_key_may_have_under_way_are_refused_for_good():
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = [{"name": "small", "sha256": digest, "max_edits": 3}]
    async with cluster(answer=png(8), keys=keys) as (router, workers):
        url, key = f"http://127.0.0.1:{router.http.port}", {"x-api-key": "secret"}
        async with aiohttp.ClientSession(url, headers=key) as session:
            for path in ("/v1/images/edits", "/v1/jobs"):
                async with session.post(path, data=form(n=4)) as answer:
                    payload = await answer.json()
                    assert (answer.status, payload["error"]["param"]) == (400, "n")
                    assert "1 to 3" in payload["error"]["message"]
            assert not any(worker.requests for worker in workers)
            async with session.post("/v1/images/edits", data=form(n=3)) as answer:
                assert answer.status == 200
                assert len((await answer.json())["data"]) == 3


async def test_a_job_whose_text_can_have_no_room_ends_with_that_sentence(tmp_path: Path):
    jobs = {"database": str(tmp_path / "jobs.db")}
    async with site(8, jobs=jobs) as (_, workers, session):
        async with session.post("/v1/jobs", data=form(n=8)) as answer:
            job = (await answer.json())["id"]
        for _ in range(200):
            async with session.get(f"/v1/jobs/{job}") as answer:
                job_record = await answer.json()
            if job_record["status"] == "failed":
                break
            await asyncio.sleep(0.02)
        assert job_record["error"]["param"] == "n"
        assert "fewer pictures" in job_record["error"]["message"]
        assert not any(worker.requests for worker in workers)


# Streams are not silent.


@pytest.mark.parametrize("door", ["/v1/images/edits", "/v2/models/edit_stream/generate_stream"])
async def test_a_stream_that_waits_has_headers_and_comments(
    monkeypatch: pytest.MonkeyPatch, door: str
):
    monkeypatch.setattr(http_events, "_COMMENT_S", 0.05)
    async with site(100) as (router, workers, session):
        for worker in workers:
            worker.hold()
        post_options: dict[str, Any] = {"data": form(stream="true")}
        if "generate" in door:
            text = {"MASK": base64.b64encode(png(8)).decode(), "PROMPT": "x", "IMAGE": ""}
            settings = {"template_id": "0" * 32, "mask_mode": "alpha"}
            post_options = {"json": {**text, "SETTINGS": json.dumps(settings)}}
        async with session.post(door, **post_options) as answer:
            assert answer.status == 200
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-accel-buffering"] == "no"
            assert [await answer.content.readline() for _ in range(4)] == [b":\n", b"\n"] * 2
            for worker in workers:
                worker.fails = 9
                worker.let_go()
            stream_tail = await answer.read()
            assert stream_tail.strip(b":\n").startswith((b"event: error\ndata: {", b"data: {"))
            assert b"ENGINE_FAILED" in stream_tail or b"engine_failed" in stream_tail
        await until("all is given back", lambda: not router.admission.bytes)
        # What is refused at once is the status, as before.
        async with session.post(
            door, **(post_options if "generate" in door else {"data": form()})
        ) as late:
            assert late.status == 503


async def test_a_stream_whose_client_leaves_before_anything_comes_is_withdrawn():
    async with site(100) as (router, workers, session):
        for worker in workers:
            worker.hold()
        async with session.post("/v1/images/edits", data=form(stream="true")):
            await until("it is there", lambda: any(worker.requests for worker in workers))
        await until("it is withdrawn", lambda: not router.admission.edits)
        await until("all is given back", lambda: not router.admission.bytes)


async def test_http_1_0_is_told_a_length():
    async with site(100) as (router, _, _session):
        port = router.http.port
        request = form(n=2)()
        body = io.BytesIO()

        class Writer:
            async def write(self, data: bytes) -> None:
                body.write(data)

        await request.write(Writer())  # type: ignore[arg-type]
        head = (
            f"POST /v1/images/edits HTTP/1.0\r\nContent-Type: {request.content_type}\r\n"
            f"Content-Length: {len(body.getvalue())}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body.getvalue())
        header_bytes, _, text = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
        assert b"transfer-encoding" not in header_bytes.lower()
        assert f"content-length: {len(text)}".encode() in header_bytes.lower()
        assert len(json.loads(text)["data"]) == 2
        await until("all is given back", lambda: not router.admission.bytes)


# What a proxy names a request by.


@pytest.mark.parametrize(
    "foreign_id", ["f3b2c6de-1#7", "{9d3c2f1e}", "Root=1-67891233-ab", "a" * 300]
)
async def test_a_foreign_id_is_logged_and_names_nothing(foreign_id: str, caplog: Any):
    caplog.set_level(logging.INFO, "maskserve.router")
    async with site(100) as (router, workers, session):
        for worker in workers:
            worker.hold()
        named = {"x-request-id": foreign_id}
        asking = [
            asyncio.ensure_future(session.post("/v1/images/edits", data=form(), headers=named))
            for _ in range(2)
        ]
        await until("both are there", lambda: sum(len(w.requests) for w in workers) == 2)
        for worker in workers:
            worker.let_go()
        for answer in await asyncio.gather(*asking):
            assert answer.status == 200
            assert answer.headers["x-request-id"] == foreign_id[:128]
            await answer.read()
        ids = [request["request_id"] for worker in workers for request in worker.requests]
        assert len(set(ids)) == 2
        assert not any(foreign_id in item for item in ids)
        logged = [vars(item).get("fields", {}).get("x_request_id") for item in caplog.records]
        assert logged.count(foreign_id[:128]) == 2
        async with session.post("/v1/images/edits", data=form()) as answer:
            assert answer.headers["x-request-id"] in [
                request["request_id"] for worker in workers for request in worker.requests
            ]
        assert router.admission.edits == 0
