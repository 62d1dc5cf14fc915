"""Jobs at a router over emulated workers: what clients see, quotas, webhooks, and a lost router."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image
from sqlalchemy import event
from standardwebhooks.webhooks import Webhook

from maskserve_common.config import ConfigError
from maskserve_common.errors import InvalidRequest
from maskserve_router.api.public_hosts import is_public
from maskserve_router.config import JobsConfig, router_config_of
from maskserve_router.jobs.database import database_of
from maskserve_router.jobs.runner import JobRunner, _wait_for
from maskserve_router.jobs.webhooks import Webhooks
from maskserve_router.messages.failures import NotSupported
from maskserve_router.router import Router
from tests.support.postgres import find_postgres, postgres, start, stop
from tests.support.router import Faulty, cluster, until
from tests.support.router_requests import mask_of
from tests.support.tls_host import Host, answer, serving, trusted_by

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def picture(width: int = 64, height: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "png")
    return file.getvalue()


def form(**fields: Any) -> aiohttp.FormData:
    form_data = aiohttp.FormData()
    form_data.add_field("image", picture(), filename="a.png")
    form_data.add_field("mask", mask_of(100, 64), filename="m.png")
    for name, value in {"prompt": "a star", "mask_mode": "white", **fields}.items():
        form_data.add_field(name, str(value))
    return form_data


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str = "") -> None:
        self._session, self._url = session, url
        self._key = {"authorization": f"Bearer {key}"} if key else {}

    async def call(
        self, method: str, path: str = "", data: Any = None, **headers: str
    ) -> tuple[int, Any, Any]:
        ask = self._session.request(
            method, f"{self._url}/v1/jobs{path}", data=data, headers={**self._key, **headers}
        )
        async with ask as response:
            return response.status, json.loads(await response.read()), response.headers

    async def give(self, data: Any = None, **headers: str) -> str:
        status, job, response_headers = await self.call("POST", "", data or form(), **headers)
        assert (status, job["object"]) == (202, "job"), job
        assert response_headers["location"] == f"/v1/jobs/{job['id']}"
        return str(job["id"])

    async def ended(self, name: str) -> dict[str, Any]:
        for _ in range(500):
            status, job, _ = await self.call("GET", f"/{name}")
            assert status == 200
            if job["status"] not in ("queued", "running"):
                return dict(job)
            await asyncio.sleep(0.02)
        raise AssertionError(f"it does not end: {job}")


@asynccontextmanager
async def jobs(
    folder: Path, key: str = "", **tables: Any
) -> AsyncIterator[tuple[Router, list[Faulty], Client]]:
    jobs_table = {"database": str(folder / "jobs.sqlite"), **tables.pop("jobs", {})}
    async with cluster(None, answer=picture(), jobs=jobs_table, **tables) as (router, workers):
        for worker in workers:
            worker.progress = 3
        async with aiohttp.ClientSession() as session:
            yield router, workers, Client(session, f"http://127.0.0.1:{router.http.port}", key)


def runner_of(router: Router) -> JobRunner:
    """The part of a router that runs its jobs."""
    runner = router._jobs.runner
    assert runner is not None
    return runner


def keys(*names: str, **more: Any) -> list[dict[str, Any]]:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    return [{"name": name, "sha256": digest, **more} for name, digest in digests.items()]


async def test_a_job_is_an_edit_that_is_fetched_later(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, workers, client):
        for worker in workers:
            worker.hold()
        name = await client.give(form(n=2, seed=7))
        await until("it runs", lambda: sum(len(w.requests) for w in workers) == 2)
        whole = {"step": 6, "steps": 6}  # of both pictures
        await until("both say so", lambda: runner_of(router).runs.jobs[name].progress == whole)
        _, body, _ = await client.call("GET", f"/{name}")
        assert (body["status"], body["progress"]) == ("running", whole)
        for worker in workers:
            worker.let_go()
        ended = await client.ended(name)
        assert ended["status"] == "succeeded"
        assert ended["expires_at"] == ended["ended_at"] + 86_400
        result = ended["result"]
        assert base64.b64decode(result["data"][0]["b64_json"]) == picture()
        assert [meta["seed"] for meta in result["maskserve"]] == [7, 8]
        assert {request["request_id"] for w in workers for request in w.requests} == {
            f"{name}-0",
            f"{name}-1",
        }
        _, listed, _ = await client.call("GET")
        assert [listed_job["id"] for listed_job in listed["data"]] == [name]
        assert "result" not in listed["data"][0]
        assert listed["today"]["megapixel_steps"] == pytest.approx(2 * 28 * 64 * 64 / 1e6)
        status, body, _ = await client.call("DELETE", f"/{name}")
        assert (status, body["deleted"]) == (200, True)
        status, body, _ = await client.call("GET", f"/{name}")
        assert (status, body["error"]["code"]) == (404, "job_not_found")
        counted = router.metrics.registry.get_sample_value
        assert counted("maskserve_jobs_total", {"state": "succeeded"}) == 1


async def test_a_cancelled_job_leaves_its_worker(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, workers, client):
        for worker in workers:
            worker.hold()
        name = await client.give()
        await until("it runs", lambda: any(w.requests for w in workers))
        status, body, _ = await client.call("DELETE", f"/{name}")
        assert (status, body["status"]) == (200, "cancelled")
        await until("nothing is under way", lambda: not router.admission.edits)
        assert (await client.ended(name))["status"] == "cancelled"
        assert (router.admission.bytes, runner_of(router).runs.jobs) == (0, {})


async def test_a_router_that_stops_as_a_job_wakes_it_stops() -> None:
    wake = asyncio.Event()
    waits = asyncio.create_task(_wait_for(wake, 60.0))
    for _ in range(3):  # until it waits, by whatever tasks
        await asyncio.sleep(0)
    wake.set()
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits


async def test_an_edit_that_fails_is_a_job_that_failed(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (_, workers, client):
        for worker in workers:
            worker.fails, worker.text = 1, "[INVALID_REQUEST] SETTINGS.seed: is odd"
        job = await client.ended(await client.give())
        assert job["status"] == "failed"
        assert job["error"]["param"] == "seed"
        assert job["error"]["code"] == "invalid_request"


async def test_a_job_waits_until_there_is_a_worker(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, workers, client):
        for worker in workers:
            worker.silent = True
        await until("none is up", lambda: not router.pool.ready())
        name = await client.give()
        await until("it has been tried", lambda: runner_of(router).runs.places._served_at)
        for worker in workers:
            worker.silent = False
        assert (await client.ended(name))["status"] == "succeeded"


async def test_a_request_that_comes_twice_is_one_job(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (_, workers, client):
        named = {"Idempotency-Key": "mine"}
        name = await client.give(**named)
        status, body, headers = await client.call("POST", "", form(), **named)
        assert (status, body["id"], headers["idempotent-replayed"]) == (202, name, "true")
        status, body, _ = await client.call("POST", "", form(prompt="a moon"), **named)
        assert status == 400
        assert body["error"]["message"].startswith("Idempotency-Key: was used for another request")
        status, body, _ = await client.call("POST", "", form(), **{"Idempotency-Key": "ü" * 300})
        assert status == 400
        await client.ended(name)
        assert sum(len(w.requests) for w in workers) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "true"}, "stream"),
        ({"webhook": "https://a.example/"}, "webhook"),
        ({"size": "3x3"}, "size"),
        ({"size": "99999x64"}, "size"),
        ({"expand": "[1, 2, 3]"}, "expand"),
        ({"mask_dilate": "-1"}, "mask_dilate"),
        ({"prompts": "x"}, "prompts"),
        ({"priority": "-101"}, "priority"),
        ({"priority": "-1.5"}, "priority"),
    ],
)
async def test_what_cannot_be_a_job_is_refused_at_once(
    tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    async with jobs(tmp_path) as (_, _, client):
        status, body, _ = await client.call("POST", "", form(**fields))
        assert (status, body["error"]["param"]) == (400, param)
        assert (await client.call("GET"))[1]["data"] == []


def cut(file: bytes) -> bytes:
    return file[: len(file) // 2]


@pytest.mark.parametrize(
    ("image", "mask", "settings", "message"),
    [
        (cut(picture()), mask_of(100, 64), {}, "image: "),
        (b"no picture", mask_of(100, 64), {}, "image: "),
        (picture(), cut(mask_of(100, 64)), {}, "mask: "),
        (picture(), mask_of(100, 32), {}, "mask: is 32x32"),
        (picture(), picture(), {"mask_mode": "alpha"}, "mask_mode: is alpha"),
        (picture(), mask_of(0, 64), {}, "mask: selects nothing"),
        (picture(), mask_of(100, 64), {"mask_mode": "strength", "mask_feather": 2}, "mask_feather"),
    ],
)
async def test_pictures_that_no_edit_takes_are_no_job(
    tmp_path: Path, image: bytes, mask: bytes, settings: dict[str, Any], message: str
) -> None:
    async with jobs(tmp_path) as (_, workers, client):
        form_data = aiohttp.FormData({"prompt": "x"})
        for name, value in {"mask_mode": "white", **settings}.items():
            form_data.add_field(name, str(value))
        form_data.add_field("image", image, filename="a.png")
        form_data.add_field("mask", mask, filename="m.png")
        status, answer, _ = await client.call("POST", "", form_data)
        assert status == 400
        assert answer["error"]["message"].startswith(message)
        assert (await client.call("GET"))[1]["data"] == []
        assert not any(w.requests for w in workers)


_NET = '[{"name": "outline"}]'


@pytest.mark.parametrize(
    ("further", "settings", "message"),
    [
        ([b""], {}, "image[1]: is empty"),
        ([cut(picture())], {}, "image[1]: "),
        ([picture(32, 64)], {"controls": _NET}, "image[1]: is 32x64 pixels"),
        ([picture()], {"controls": _NET, "expand": "[0, 8, 0, 0]"}, "image[1]: is 64x64 pixels"),
        ([picture(), picture()], {"controls": _NET}, "image[2]: is named by no control"),
        ([], {"controls": _NET}, "controls[0].image: is 0"),
        ([], {"expand": "[0, 16320, 0, 0]", "output_format": "webp"}, "output_format: webp cannot"),
    ],
)
async def test_pictures_that_do_not_go_together_are_no_job(
    tmp_path: Path, further: list[bytes], settings: dict[str, str], message: str
) -> None:
    async with jobs(tmp_path) as (_, workers, client):
        form_data = form(**settings)
        for file in further:
            form_data.add_field("image", file, filename="b.png")
        status, answer, _ = await client.call("POST", "", form_data)
        assert status == 400
        assert answer["error"]["message"].startswith(message)
        assert (await client.call("GET"))[1]["data"] == []
        assert not any(w.requests for w in workers)


async def test_pictures_that_are_too_large_together_are_no_job(tmp_path: Path) -> None:
    async with jobs(tmp_path, limits={"max_pixels": 2 * 64 * 64 - 1}) as (_, _, client):
        form_data = form()
        form_data.add_field("image", picture(), filename="b.png")
        status, answer, _ = await client.call("POST", "", form_data)
        assert status == 400
        assert answer["error"]["message"].startswith("image: has pictures of 8192 pixels together")


async def test_control_pictures_of_the_answers_size_are_a_job(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (_, _, client):
        form_data = form(controls=_NET, expand="[0, 8, 0, 0]")
        form_data.add_field("image", picture(64, 72), filename="b.png")
        await client.ended(await client.give(form_data))


async def test_a_webhook_belongs_to_a_job(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, _, _), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{router.http.port}/v1/images/edits"
        async with session.post(url, data=form(webhook="https://a.example/")) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "webhook"


async def test_a_job_is_its_keys_alone(tmp_path: Path) -> None:
    key_table = [*keys("a"), *keys("b"), *keys("operator", admin=True)]
    async with jobs(tmp_path, "a", keys=key_table) as (router, _, client):
        name = await client.give()
        await client.ended(name)
        url = f"http://127.0.0.1:{router.http.port}"
        other_client, operator = (Client(client._session, url, key) for key in ("b", "operator"))
        for method in ("GET", "DELETE"):
            assert (await other_client.call(method, f"/{name}"))[0] == 404
        assert (await other_client.call("GET"))[1]["data"] == []
        assert (await operator.call("GET", f"/{name}"))[0] == 200
        assert (await Client(client._session, url, "c").call("GET", f"/{name}"))[0] == 401


@pytest.mark.parametrize(
    "bound", ["jobs_per_day", "job_bytes_per_day", "job_megapixel_steps_per_day"]
)
async def test_a_key_gives_no_more_than_it_may_in_a_day(tmp_path: Path, bound: str) -> None:
    most = {"jobs_per_day": 1, "job_bytes_per_day": 1000, "job_megapixel_steps_per_day": 1}
    fields = {"num_inference_steps": 200}  # 0.8 megapixel-steps, some 600 bytes
    async with jobs(tmp_path, "a", keys=keys("a", **{bound: most[bound]})) as (_, _, client):
        await client.give(form(**fields))
        status, body, headers = await client.call("POST", "", form(**fields))
        assert status == 429
        assert "key a has used its limit of 1" in body["error"]["message"]
        assert int(headers["retry-after"]) > 0


async def test_jobs_beyond_what_may_be_kept_are_refused(tmp_path: Path) -> None:
    async with jobs(tmp_path, jobs={"max_bytes": 2000}) as (_, workers, client):
        for worker in workers:
            worker.hold()
        await client.give()
        status, body, _ = await client.call("POST", "", form())
        assert (status, body["error"]["code"]) == (429, "overloaded")
        for worker in workers:
            worker.let_go()


async def test_a_full_disk_is_told(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, _, client):
        name = await client.give()
        await client.ended(name)
        store = runner_of(router).store
        with store._engine.begin() as db:
            pages = db.exec_driver_sql("PRAGMA page_count").scalar_one()
        store._engine.dispose()

        def small(connection: Any, _: Any) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages + 2}")

        event.listen(store._engine, "connect", small)
        noise = Image.effect_noise((304, 304), 90).convert("RGB")
        file = io.BytesIO()
        noise.save(file, "png")
        big = aiohttp.FormData({"prompt": "x", "mask_mode": "white"})
        big.add_field("image", file.getvalue(), filename="a.png")
        big.add_field("mask", mask_of(100, 304), filename="m.png")
        status, body, _ = await client.call("POST", "", big)
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert "cannot be kept" in body["error"]["message"]
        assert (await client.call("GET", f"/{name}"))[1]["status"] == "succeeded"


async def test_a_router_goes_on_with_a_lost_ones_job(tmp_path: Path) -> None:
    """The first is lost as it would be by SIGKILL: it says nothing more of its job."""
    bounds = {"database": str(tmp_path / "jobs.sqlite"), "lease_s": 0.5}
    async with jobs(tmp_path, jobs=bounds) as (lost, workers, client):
        for worker in workers:
            worker.hold()
        name = await client.give()
        await until("it runs", lambda: any(w.requests for w in workers))
        for task in runner_of(lost).tasks:  # it renews no lease, and does not notice
            task.cancel()
        config = router_config_of(
            {
                "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
                "workers": {"addresses": [w.address for w in workers], "poll_timeout_s": 2.0},
                "jobs": bounds,
            }
        )
        async with Router(config) as router:
            await until("the other has it", lambda: name in runner_of(router).runs.jobs)
            for worker in workers:
                worker.let_go()
            other_client = Client(client._session, f"http://127.0.0.1:{router.http.port}")
            ended = await other_client.ended(name)
            assert ended["status"] == "succeeded"
            await until("the lost one is done", lambda: not runner_of(lost).runs.jobs)
            assert await other_client.ended(name) == ended
            counted = lost.metrics.registry.get_sample_value
            assert not counted("maskserve_jobs_total", {"state": "succeeded"})
        assert len({request["seed"] for w in workers for request in w.requests}) == 1
        assert {request["request_id"] for w in workers for request in w.requests} == {
            name,
            f"{name}.2",
        }


async def test_a_router_that_was_stopped_takes_no_job_that_it_runs(tmp_path: Path) -> None:
    """It is silent for longer than its lease, and goes on: nothing is made twice."""
    bounds = {"database": str(tmp_path / "jobs.sqlite"), "lease_s": 0.5, "running": 4}
    async with jobs(tmp_path, jobs=bounds) as (router, workers, client):
        for worker in workers:
            worker.hold()
        names = [await client.give() for _ in range(6)]
        await until("four run", lambda: sum(len(w.requests) for w in workers) == 4)
        time.sleep(1.5)  # the whole process stands
        await asyncio.sleep(1.0)
        for worker in workers:
            worker.let_go()
        assert {(await client.ended(name))["status"] for name in names} == {"succeeded"}
        request_ids = [request["request_id"] for w in workers for request in w.requests]
        assert sorted(request_ids) == sorted(names)
        await until("its places are free", lambda: runner_of(router).runs.places.total == 0)


async def test_a_router_that_was_taken_for_lost_goes_on(tmp_path: Path) -> None:
    """Another has freed its jobs and has begun none: they are its again, and run once."""
    async with jobs(tmp_path, jobs={"running": 2}) as (router, workers, client):
        for worker in workers:
            worker.hold()
        names = [await client.give() for _ in range(2)]
        await until("two run", lambda: sum(len(w.requests) for w in workers) == 2)
        store = runner_of(router).store
        for _ in range(20):  # at any moment between two beats
            store.free(runner_of(router).owner)
            runner_of(router).wake()
            await asyncio.sleep(0.1)
        for worker in workers:
            worker.let_go()
        assert {(await client.ended(name))["status"] for name in names} == {"succeeded"}
        assert len([request for w in workers for request in w.requests]) == 2
        await until("its places are free", lambda: runner_of(router).runs.places.total == 0)
        counted = router.metrics.registry.get_sample_value
        assert counted("maskserve_jobs_total", {"state": "succeeded"}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "[ENGINE_FAILED] the process of its encoder has died",
        "[OVERLOADED] the ControlNet service does not answer",
        "Stream removed (Socket closed)",
    ],
)
async def test_a_job_outlives_what_fails_in_the_server(tmp_path: Path, text: str) -> None:
    tables: dict[str, Any] = {"faults": {"retry_wait_s": 0.0}}
    async with jobs(tmp_path, **tables) as (_, workers, client):
        for worker in workers:
            worker.fails, worker.text = 2, text
        ended = await client.ended(await client.give())
        assert ended["status"] == "succeeded"
        requests = [request for w in workers for request in w.requests]
        assert len(requests) > 2
        assert len({request["seed"] for request in requests}) == 1


async def test_a_fault_that_stays_ends_a_job(tmp_path: Path) -> None:
    async with jobs(tmp_path, jobs={"retries": 1}) as (_, workers, client):
        for worker in workers:
            worker.fails = 100
        ended = await client.ended(await client.give())
        assert (ended["status"], ended["error"]["code"]) == ("failed", "engine_failed")


async def test_jobs_that_wait_write_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with jobs(tmp_path) as (_, workers, client):
        for worker in workers:
            worker.fails, worker.text = 10**6, "[OVERLOADED] the worker is draining"
        for _ in range(40):
            await client.give()
        await asyncio.sleep(2.0)
        caplog.clear()
        tried = sum(len(w.requests) for w in workers)
        await asyncio.sleep(4.0)
        assert sum(len(w.requests) for w in workers) - tried <= 8
        assert len(caplog.records) <= 16


async def test_a_keys_jobs_are_bounded(tmp_path: Path) -> None:
    async with jobs(tmp_path, jobs={"keep_jobs": 3}) as (_, workers, client):
        names = []
        for _ in range(5):
            names.append(await client.give())
            await client.ended(names[-1])
        _, listed, _ = await client.call("GET")
        assert [listed_job["id"] for listed_job in listed["data"]] == names[:1:-1]
        for worker in workers:
            worker.hold()
        for _ in range(3):
            await client.give()
        status, body, _ = await client.call("POST", "", form())
        assert status == 429
        assert "3 jobs are unfinished" in body["error"]["message"]
        for worker in workers:
            worker.let_go()


async def test_jobs_are_listed_in_pages(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (_, _, client):
        names = [await client.give() for _ in range(5)]
        listed_names: list[str] = []
        more = True
        while more:
            cursor = f"&after={listed_names[-1]}" if listed_names else ""
            _, page, _ = await client.call("GET", f"?limit=2{cursor}")
            listed_names += [listed_job["id"] for listed_job in page["data"]]
            assert (page["first_id"], page["last_id"]) == (
                listed_names[-len(page["data"])],
                listed_names[-1],
            )
            more = page["has_more"]
        assert listed_names == names[::-1]
        for limit in ("0", "101", "x", "-1", "1e1"):
            status, body, _ = await client.call("GET", f"?limit={limit}")
            assert (status, body["error"]["param"]) == (400, "limit")
        assert (await client.call("GET", "?after=nobody"))[0] == 404


async def test_a_result_waits_for_a_database_that_is_away(tmp_path: Path) -> None:
    async with jobs(tmp_path) as (router, workers, client):
        for worker in workers:
            worker.hold()
        name = await client.give()
        await until("it runs", lambda: any(w.requests for w in workers))
        store = runner_of(router).store
        away = [True]

        def refuse(*_: Any) -> None:
            if away[0]:
                raise sqlite3.OperationalError("disk I/O error")

        event.listen(store._engine, "before_cursor_execute", refuse)
        for worker in workers:
            worker.let_go()
        await asyncio.sleep(2.5)
        assert (await client.call("GET", f"/{name}"))[0] == 429
        assert "does not answer" in (await health(client._session, router))["jobs"]
        away[0] = False
        assert (await client.ended(name))["status"] == "succeeded"
        assert sum(len(w.requests) for w in workers) == 1


async def test_postgresql_goes_away_and_comes_back(tmp_path: Path) -> None:
    """While two routers run jobs of it: none is lost, none is made twice, none has two ends."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    with postgres(programs) as url:
        bounds = {"database": url, "lease_s": 4.0, "running": 2}
        async with jobs(tmp_path, jobs=bounds) as (router, workers, client):
            for worker in workers:
                worker.hold()
            addresses = [worker.address for worker in workers]
            config = {
                "listen": {"http_port": 0, "grpc_port": 0, "admin_port": 0},
                "workers": {"addresses": addresses, "poll_timeout_s": 2.0},
                "jobs": bounds,
            }
            async with Router(router_config_of(config)) as other_router:
                names = [await client.give() for _ in range(6)]
                await until("four run", lambda: sum(len(w.requests) for w in workers) == 4)
                await asyncio.to_thread(stop, programs, url)
                assert (await client.call("GET"))[0] == 429
                for worker in workers:
                    worker.let_go()
                await until("it is told", lambda: "not answer" in router._jobs.state)
                assert (await health(client._session, other_router))["edits"]
                await asyncio.sleep(5.0)  # longer than a lease
                await asyncio.to_thread(start, programs, url)
                ends = [await client.ended(name) for name in names]
                assert {end["status"] for end in ends} == {"succeeded"}
                request_ids = [request["request_id"] for w in workers for request in w.requests]
                assert sorted(request_ids) == sorted(names)
                await until("all is well", lambda: router._jobs.state == "on")


async def test_a_router_that_stops_leaves_its_jobs_to_the_next(tmp_path: Path) -> None:
    faults = {"drain_grace_s": 0.05}
    async with jobs(tmp_path, faults=faults) as (router, workers, client):
        for worker in workers:
            worker.hold()
        name = await client.give()
        await until("it runs", lambda: any(w.requests for w in workers))
        await router.stop()
        async with jobs(tmp_path) as (_, _, other_client):
            assert (await other_client.ended(name))["status"] == "succeeded"


@pytest.mark.parametrize(
    "options", [{"webhook_secret": "whsec_short"}, {"webhook_secret": "x" * 40}, {"lease_s": 0}]
)
def test_a_wrong_configuration_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        router_config_of({"jobs": options})


async def test_a_database_that_does_not_open_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    config = router_config_of({"jobs": {"database": str(tmp_path / "file")}})
    with pytest.raises(ConfigError, match=r"\[jobs\] database: .*not a database"):
        await Router(config)._jobs.start()


def test_jobs_lie_beside_the_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = str(tmp_path / "maskserve" / "jobs-8080.sqlite")
    assert database_of(router_config_of({})) == (file, "")
    assert database_of(router_config_of({"listen": {"http_port": 0}}))[0] == ""


async def test_without_a_place_jobs_are_refused() -> None:
    async with cluster(None) as (router, _), aiohttp.ClientSession() as session:
        client = Client(session, f"http://127.0.0.1:{router.http.port}")
        assert (await client.call("POST", "", form()))[0] == 501


async def health(session: aiohttp.ClientSession, router: Router) -> Any:
    async with session.get(f"http://127.0.0.1:{router.http.port}/readyz") as response:
        assert response.status == 200
        return await response.json()


async def test_jobs_that_are_off_are_told_so() -> None:
    async with (
        cluster(None, jobs={"enabled": False}) as (router, _),
        aiohttp.ClientSession() as session,
    ):
        client = Client(session, f"http://127.0.0.1:{router.http.port}")
        status, body, _ = await client.call("POST", "", form())
        assert status == 501
        assert "turned off" in body["error"]["message"]
        assert await health(session, router) == {"edits": True, "jobs": "off"}


async def test_a_root_that_cannot_be_written_keeps_no_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("no folder: as a root of a container it can have no files")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    router = Router(router_config_of({}))
    await router._jobs.start()
    assert router._jobs.state == "off"
    with pytest.raises(NotSupported, match="are not kept here"):
        await router._jobs._opened()


async def test_the_place_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{tmp_path / 'jobs.sqlite'}\n")
    async with (
        cluster(
            None, jobs={"database_file": str(tmp_path / "url")}, answer=picture()
        ) as running_cluster,
        aiohttp.ClientSession() as session,
    ):
        router, _ = running_cluster
        client = Client(session, f"http://127.0.0.1:{router.http.port}")
        assert (await client.ended(await client.give()))["status"] == "succeeded"
        assert await health(session, router) == {"edits": True, "jobs": "on"}
    config = router_config_of({"jobs": {"database_file": str(tmp_path / "nothing")}})
    with pytest.raises(ConfigError, match=r"\[jobs\] database_file: "):
        await Router(config)._jobs.start()


# Webhooks.


def webhooks(host: Host, *, public: bool = True, **more: Any) -> Webhooks:
    async def resolve_here(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    hosts = (f"hooks.example:{host.port}",)
    return Webhooks(
        JobsConfig(webhook_hosts=hosts, webhook_tries=4, **more),
        resolve_here,
        (lambda _: True) if public else is_public,
        trusted_by(host),
        pause_s=0.001,
    )


def headers_of(head: bytes) -> dict[str, str]:
    lines = head.decode().split("\r\n")[1:-2]
    return {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


async def test_a_webhook_is_told_until_it_is_taken(tmp_path: Path) -> None:
    async with serving("hooks.example") as host:
        host.then = [answer(b"", "503 Busy"), answer(b"", "302 Found", "Location: https://a/\r\n")]
        host.answer = answer(b"", "204 No Content")
        jobs_table: dict[str, Any] = {"webhook_hosts": [f"hooks.example:{host.port}"]}
        jobs_table["webhook_secret"] = SECRET
        async with jobs(tmp_path, jobs=jobs_table) as (router, _, client):
            runner = runner_of(router)
            runner.services = runner.services._replace(webhooks=webhooks(host))
            name = await client.give(form(webhook=f"https://hooks.example:{host.port}/done?x=1"))
            ended = await client.ended(name)
            await until("it is told", lambda: len(host.heads) == 3)
            await until("that is known", lambda: not runner_of(router).calls.jobs)
            _, job_body, _ = await client.call("GET", f"/{name}")
            assert job_body["webhook"]["taken"] is True
        for head, body in zip(host.heads, host.bodies, strict=True):
            assert head.startswith(b"POST /done?x=1 HTTP/1.1")
            event = Webhook(SECRET).verify(body, headers_of(head))  # the library of its takers
            assert event["type"] == "job.succeeded"
            assert event["data"]["id"] == headers_of(head)["webhook-id"] == name
            assert "result" not in event["data"]
            with pytest.raises(Exception, match="signature"):
                Webhook(SECRET).verify(body.replace(b"succeeded", b"cancelled"), headers_of(head))
        assert ended["status"] == "succeeded"


async def test_a_webhook_that_nobody_takes_is_given_up() -> None:
    async with serving("hooks.example") as host:
        host.answer = answer(b"", "500 No")
        url = f"https://hooks.example:{host.port}/"
        assert not await webhooks(host).deliver(url, SECRET, "a", {})
        assert len(host.heads) == 4
        assert not await webhooks(host, public=False).deliver(url, SECRET, "a", {})
        assert len(host.heads) == 4  # a private address is not asked
        host.answer = answer(b"", "410 Gone")
        assert not await webhooks(host).deliver(url, SECRET, "a", {})
        assert len(host.heads) == 5
        host.silent = True
        assert not await webhooks(host, webhook_timeout_s=0.1).deliver(url, SECRET, "a", {})
    assert not await webhooks(host).deliver(url, SECRET, "a", {})  # nobody is there


@pytest.mark.parametrize(
    "drips", [b"x", b"HTTP/1.1 102 Processing\r\n\r\n", b"X-A: 1\r\n"], ids=["x", "102", "header"]
)
async def test_a_call_that_drips_is_bounded_as_a_whole(drips: bytes) -> None:
    async with serving("hooks.example") as host:
        host.then = [b"HTTP/1.1 200 OK\r\n"] * 4 if drips.startswith(b"X-") else []
        host.drips = drips
        url = f"https://hooks.example:{host.port}/"
        began = time.monotonic()
        assert not await webhooks(host, webhook_timeout_s=0.5).deliver(url, SECRET, "a", {})
        assert time.monotonic() - began < 60  # four tries of 0.5 s, and drips without an end
        host.drips = b""
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("url", "secret", "message"),
    [
        ("http://hooks.example/", SECRET, "is not an https URL"),
        ("https://169.254.169.254/", SECRET, "host that is not listed"),
        ("https://user@hooks.example/", SECRET, "user or password"),
        ("no url", SECRET, "webhook: is no"),
        ("https://hooks.example/" + "x" * 5000, SECRET, "4096 characters"),
        ("https://hooks.example/", "", "no webhook_secret"),
    ],
)
def test_webhooks_that_are_not_told(url: str, secret: str, message: str) -> None:
    listed = Webhooks(JobsConfig(webhook_hosts=("hooks.example",)))
    with pytest.raises(InvalidRequest, match=message):
        listed.check(url, secret)


def test_without_listed_hosts_there_are_none() -> None:
    with pytest.raises(InvalidRequest, match="no host is listed"):
        Webhooks(JobsConfig()).check("https://hooks.example/", SECRET)
