"""Where answers are put in place of coming back, and where they are not."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
from PIL import Image

from maskserve_common.config import ConfigError
from maskserve_common.errors import EngineFailed, InvalidRequest
from maskserve_router.api.outputs import Outputs, check_output
from maskserve_router.config import router_config_of
from tests.support.router import cluster
from tests.support.router_requests import mask_of

PREFIXES = ("s3://bucket/edits/", "file:///srv/edits/")


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/edits/",
        "s3://bucket/edits/a.png",
        "s3://bucket/edits/2026-11/of me/a b@2x.png",
        "file:///srv/edits/a/",
    ],
)
def test_below_a_listed_prefix_is_allowed(url: str) -> None:
    check_output(url, PREFIXES)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/edits",
        "s3://bucket/edits-of-others/a.png",
        "s3://other/edits/a.png",
        "S3://bucket/edits/a.png",
        "file:///srv/edits/../../etc/passwd",
        "file:///srv/edits/./a.png",
        "file:///srv/edits/a//b.png",
        "file:///srv/edits/%2e%2e/a.png",
        "file:///srv/edits/a\\b.png",
        "file:///srv/edits/a\0.png",
        "file:///srv/edits/a\n.png",
        "s3://bucket/edits/a.zip::file:///etc/passwd",
        "simplecache::s3://bucket/edits/a.png",
        "s3://bucket/edits/a?versionId=1",
        "s3://bucket/edits/a#b",
        "s3://bucket/edits/" + "x" * 2000,
        "/srv/edits/a.png",
        "",
    ],
)
def test_all_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="output_url: "):
        check_output(url, PREFIXES)
    with pytest.raises(InvalidRequest, match="no prefix is listed"):
        check_output(url, ())


@pytest.mark.parametrize("prefix", ["s3://bucket", "bucket/", "s3://b?/", "s3://a/::file:///"])
def test_a_prefix_ends_with_a_slash_and_is_plain(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"\[outputs\] urls"):
        router_config_of({"outputs": {"urls": [prefix]}})


async def test_a_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(30.0)
    place = tmp_path / "of" / "me" / "a.png"
    await outputs.put("any", f"file://{place}", b"a picture")
    assert place.read_bytes() == b"a picture"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineFailed, match=r"output_url: could not be written: \w+Error"):
        await outputs.put("any", f"file://{tmp_path}/file/a.png", b"a picture")

    def half(self: Any, path: str, content: bytes, **_: Any) -> None:
        Path(path).write_bytes(content[:3])
        raise OSError("the disk is full")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "pipe_file", half)
    with pytest.raises(EngineFailed):
        await outputs.put("any", f"file://{place}", b"another")
    assert place.read_bytes() == b"a picture"
    assert list(place.parent.iterdir()) == [place]
    outputs.close()


async def test_what_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("maskserve_router.api.outputs._write", lambda *_: go_on.wait(30))
    outputs = Outputs(0.05)
    with pytest.raises(EngineFailed, match=r"not within 0\.05 s"):
        await outputs.put("any", "memory://a", b"")
    go_on.set()
    outputs.close()


async def test_a_key_that_puts_many_pictures_delays_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writes of all keys were one line: one key's backlog was before all others."""
    go_on, written = threading.Event(), list[str]()

    def write(url: str, content: bytes) -> None:
        assert go_on.wait(30)
        written.append(url)

    monkeypatch.setattr("maskserve_router.api.outputs._write", write)
    monkeypatch.setattr("maskserve_router.api.outputs._THREADS", 1)
    outputs = Outputs(30.0)
    urls = [("any", f"memory://{number}") for number in range(9)] + [("other", "memory://other")]
    writes = [asyncio.create_task(outputs.put(scope, url, b"")) for scope, url in urls]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*writes)
    assert written.index("memory://other") == 1
    outputs.close()


async def test_an_edits_pictures_are_put_there(tmp_path: Path) -> None:
    prefix = f"file://{tmp_path}/out/"
    async with (
        cluster(None, answer=picture(), outputs={"urls": [prefix]}) as (router, workers),
        aiohttp.ClientSession() as session,
    ):

        async def edit(**fields: Any) -> tuple[int, Any]:
            form = aiohttp.FormData({"prompt": "a star", "mask_mode": "white"})
            form.add_field("image", picture(), filename="a.png")
            form.add_field("mask", mask_of(100, 64), filename="m.png")
            for name, value in fields.items():
                form.add_field(name, str(value))
            url = f"http://127.0.0.1:{router.http.port}/v1/images/edits"
            headers = {"x-request-id": "order/7"}
            async with session.post(url, data=form, headers=headers) as response:
                return response.status, json.loads(await response.read())

        status, body = await edit(output_url=f"{prefix}mine/star.png")
        assert status == 200
        assert body["data"] == [{"url": f"{prefix}mine/star.png"}]
        assert (tmp_path / "out" / "mine" / "star.png").read_bytes() == picture()
        status, body = await edit(output_url=prefix, n=2)
        first, second = (item["url"] for item in body["data"])
        # Named by an id of ours: a proxy's may be of many requests.
        assert re.fullmatch(re.escape(prefix) + r"[0-9a-f]{32}-0\.png", first)
        assert second == first.replace("-0.png", "-1.png")
        edit_count = sum(len(worker.requests) for worker in workers)
        for refused in (
            {"output_url": f"file://{tmp_path}/a.png"},
            {"output_url": f"{prefix}a.png", "n": 2},
            {"output_url": f"{prefix}a.png", "stream": "true"},
        ):
            status, body = await edit(**refused)
            assert (status, body["error"]["param"]) == (400, "output_url")
        assert sum(len(worker.requests) for worker in workers) == edit_count
