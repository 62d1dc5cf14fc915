"""The asyncio client against a server in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
from PIL import Image

from maskserve_client import (
    AsyncClient,
    DeadlineExceeded,
    EngineFailed,
    Final,
    InvalidRequest,
    Overloaded,
    Preview,
    Progress,
    ServerUnavailable,
    TemplateNotFound,
)
from tests.fakes.pictures import blob_mask, encode, scene
from tests.fakes.triton_server import PAINT, FakeServer, FakeWorker

SIZE = (40, 56)
SOURCE, MASK = scene(*SIZE), blob_mask(*SIZE)
IMAGES = (encode(SOURCE), encode(MASK))


@pytest.fixture
async def client_and_worker() -> AsyncIterator[tuple[AsyncClient, FakeWorker]]:
    with FakeServer() as worker:
        async with AsyncClient(worker.url) as client:
            yield client, worker


async def _set(event: object, seconds: float = 5) -> bool:
    return await asyncio.to_thread(event.wait, seconds)  # type: ignore[attr-defined]


def check_picture(image: Image.Image) -> None:
    pixels = np.asarray(image)
    np.testing.assert_array_equal(pixels[MASK == 0], SOURCE[MASK == 0])
    assert (pixels[MASK > 0] == PAINT).all()


async def ask(client: AsyncClient, streaming: bool, **settings: object) -> object:
    """The same edit, by either way of asking."""
    if streaming:
        return [event async for event in client.edit_stream(*IMAGES, "x", **settings)]
    return await client.edit(*IMAGES, "x", **settings)


async def test_edits_run_side_by_side(client_and_worker: tuple[AsyncClient, FakeWorker]) -> None:
    client, worker = client_and_worker
    worker.step_s = 0.02
    results = await asyncio.gather(*(client.edit(*IMAGES, "x", seed=n) for n in range(6)))
    assert [result.seed for result in results] == list(range(6))
    for result in results:
        check_picture(result.image)


async def test_a_picture_is_made_by_its_prompt(
    client_and_worker: tuple[AsyncClient, FakeWorker],
) -> None:
    client, worker = client_and_worker
    worker.edit_kinds = frozenset({"edit", "generate"})
    picture = await client.generate("a red star", "48x32")
    assert (picture.meta["kind"], picture.image.size) == ("generate", (48, 32))
    edited = await client.edit(IMAGES[0], prompt="a red star", strength=0.5)
    assert edited.meta["kind"] == "edit"
    events = [event async for event in client.edit_stream(None, prompt="x", size="48x32")]
    assert isinstance(events[-1], Final)


async def test_a_stream_tells_steps_previews_and_the_end(
    client_and_worker: tuple[AsyncClient, FakeWorker],
) -> None:
    client, worker = client_and_worker
    settings = {"num_inference_steps": 2, "preview_every": 1}
    events = [event async for event in client.edit_stream(*IMAGES, "x", **settings)]
    assert [type(event) for event in events] == [Progress, Preview, Progress, Final]
    assert isinstance(events[-1], Final)
    check_picture(events[-1].result.image)
    assert await _set(worker.finished)
    assert not worker.withdrawn.is_set()


async def test_control_and_templates(client_and_worker: tuple[AsyncClient, FakeWorker]) -> None:
    client, _ = client_and_worker
    assert (await client.control("status"))["state"] == "ready"
    name = await client.register(IMAGES[0])
    check_picture((await client.edit(None, IMAGES[1], "x", template_id=name)).image)
    assert await client.cancel("in-flight")
    with pytest.raises(TemplateNotFound):
        await client.edit(None, IMAGES[1], "x", template_id="0" * 32)


async def test_cancelling_the_task_cancels_on_the_server() -> None:
    with FakeServer(step_s=30) as worker:
        async with AsyncClient(worker.url) as client:
            task = asyncio.create_task(client.edit(*IMAGES, "x"))
            assert await _set(worker.started)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await _set(worker.withdrawn)


async def test_closing_a_stream_cancels_on_the_server() -> None:
    with FakeServer(step_s=0.2) as worker:
        async with AsyncClient(worker.url) as client:
            async with aclosing(client.edit_stream(*IMAGES, "x", num_inference_steps=50)) as events:
                async for event in events:
                    assert event == Progress(1, 50)
                    break
            assert await _set(worker.withdrawn)


async def test_cancelling_a_task_in_a_stream_cancels_on_the_server() -> None:
    with FakeServer(step_s=30) as worker:
        async with AsyncClient(worker.url) as client:

            async def follow() -> None:
                async for _ in client.edit_stream(*IMAGES, "x"):
                    pass

            task = asyncio.create_task(follow())
            assert await _set(worker.started)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await _set(worker.withdrawn)


@pytest.mark.parametrize("streaming", [False, True])
async def test_timeouts_cancel_on_the_server(streaming: bool) -> None:
    with FakeServer(step_s=30) as worker:
        async with AsyncClient(worker.url) as client:
            with pytest.raises(DeadlineExceeded):
                await ask(client, streaming, timeout=0.3)
            assert await _set(worker.withdrawn)


async def test_errors_are_mapped_like_the_blocking_clients() -> None:
    with FakeServer(error="[OVERLOADED] full", error_at_step=1) as worker:
        async with AsyncClient(worker.url) as client:
            for streaming in (False, True):
                with pytest.raises(Overloaded, match="full"):
                    await ask(client, streaming)
            with pytest.raises(InvalidRequest, match="MASK"):
                await client.edit(IMAGES[0], b"not an image", "x")
            with pytest.raises(InvalidRequest, match="SETTINGS"):
                await client.edit(*IMAGES, "x", seed=-1)
    with FakeServer(hang_up=True) as worker:
        async with AsyncClient(worker.url) as client:
            with pytest.raises(ServerUnavailable, match="before the final"):
                await ask(client, True)
    with FakeServer(garble=True) as worker:
        async with AsyncClient(worker.url) as client:
            with pytest.raises(EngineFailed, match="not an image"):
                await client.edit(*IMAGES, "x")


async def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{bound_socket.getsockname()[1]}"
        async with AsyncClient(url) as client:
            with pytest.raises(ServerUnavailable, match=url):
                await client.edit(*IMAGES, "x")
