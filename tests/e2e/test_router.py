"""Two real workers behind a router: unmodified Triton clients get what a worker gives them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.perf.errors import PerfError
from maskserve_benchmarks.perf.tool import find_tool
from maskserve_benchmarks.router_site import RouterSite
from maskserve_benchmarks.soak.visitor import DONE
from maskserve_client import Client
from maskserve_common.errors import Cancelled, InvalidRequest, TemplateNotFound
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import (
    LONG,
    WHOLE,
    Grpc,
    Http,
    InferenceServerException,
    edit_inputs,
    eventually,
    pixels,
    plain_edit,
    stream,
    tensors,
    texts,
)
from tests.support.draws import fresh_rng
from tests.support.faults.cluster_faults import Cluster, Fault, faults, try_fault
from tests.support.faults.judged_load import LOST, WRONG, known_edits

SOON_S = 60.0
SHORT = ("clients that leave at random", "router killed and started again")
"""Faults that are tried in each run; tests/unit/router loses workers, test_serve.py kills one."""


@pytest.fixture(scope="module")
def workers(pair: Supervisor) -> list[WorkerProcess]:
    return pair.workers


@pytest.fixture(scope="module")
def router(
    workers: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterSite]:
    folder = tmp_path_factory.mktemp("router")
    tables = {"http": {"header_timeout_s": 2.0, "max_chunks": 1000}}
    with RouterSite([worker.grpc_url for worker in workers], folder, tables) as site:
        condition = "both workers serve"
        eventually(condition, lambda: all(w["state"] == "ready" for w in workers_of(site).values()))
        yield site


@pytest.fixture(autouse=True)
def both_serve(router: RouterSite, workers: list[WorkerProcess]) -> None:
    """Undo the previous test, and wait for a worker that the supervisor starts again (it prints
    why), so that one failure is one failed test.
    """
    router.write_config(workers={"addresses": [worker.grpc_url for worker in workers]})
    router.reload()
    for name in workers_of(router):
        router.read(f"/workers/{name}/resume", post=True)
    eventually(
        "both workers serve",
        lambda: all(w["state"] == "ready" for w in workers_of(router).values()),
        timeout_s=60.0,
    )


@pytest.fixture
def grpc(router: RouterSite) -> Iterator[Grpc]:
    with closing(Grpc(router.grpc_url)) as client:
        yield client


@pytest.fixture
def http_client(router: RouterSite) -> Iterator[Http]:
    with closing(Http(router.http_url)) as client:
        yield client


@pytest.fixture
def direct(workers: list[WorkerProcess]) -> Iterator[Grpc]:
    with closing(Grpc(workers[0].grpc_url)) as client:
        yield client


def workers_of(site: RouterSite) -> dict[str, dict[str, Any]]:
    """The router's record of each worker, by name."""
    records: dict[str, dict[str, Any]] = json.loads(site.read("/workers"))["workers"]
    return records


def running(grpc: Grpc) -> set[str]:
    status = grpc.control("status")
    return {row["request_id"] for row in (*status["running"], *status["waiting"])}


def body_of(inputs: dict[str, bytes]) -> bytes:
    listed = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}
        for name, text in texts(inputs).items()
    ]
    return json.dumps({"inputs": listed}).encode()


def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(f"http://{url.removeprefix('http://')}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def get(url: str, path: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            f"http://{url.removeprefix('http://')}{path}", timeout=60
        ) as page:
            raw = page.read()
            return page.status, json.loads(raw) if raw else None
    except urllib.error.HTTPError as error:
        return error.code, None


# The same answers.


def test_unary_http_grpc_and_streams_give_what_a_worker_gives(
    router: RouterSite, grpc: Grpc, http_client: Http, direct: Grpc
) -> None:
    inputs = plain_edit(seed=3)
    expected = direct.edit(inputs)
    for client in (grpc, http_client):
        picture, meta = client.edit(inputs)
        assert (pixels(picture) == pixels(expected[0])).all()
        assert {k: meta[k] for k in ("seed", "template_id", "steps")} == {
            k: expected[1][k] for k in ("seed", "template_id", "steps")
        }
    with stream(router.grpc_url) as opened:
        opened.send(plain_edit(seed=3, progress=True, num_inference_steps=2))
        events = [opened.next()]
        while events[-1][1]["event"] != "final":
            events.append(opened.next())
    assert (pixels(events[-1][0]) == pixels(expected[0])).all()
    assert [meta["event"] for _, meta in events[:-1]].count("progress") >= 1


async def test_asyncio_clients(router: RouterSite, direct: Grpc) -> None:
    import tritonclient.grpc as triton_grpc
    import tritonclient.http as triton_http

    inputs = plain_edit(seed=4)
    expected = pixels(direct.edit(inputs)[0])
    async with grpc_aio.InferenceServerClient(router.grpc_url) as client:
        answers = await asyncio.gather(
            *(client.infer("edit", tensors(triton_grpc, inputs)) for _ in range(4))
        )
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("edit")
    async with http_aio.InferenceServerClient(router.http_url) as client:
        answers.append(await client.infer("edit", tensors(triton_http, inputs)))
        assert await client.is_model_ready("edit_stream")
        assert not await client.is_model_ready("denoiser")
    for answer in answers:
        assert (pixels(answer.as_numpy("IMAGE")[0]) == expected).all()


def test_json_forms_generate_and_events(router: RouterSite, direct: Grpc) -> None:
    inputs = plain_edit(seed=5, output_encoding="base64")
    expected = direct.edit(inputs)[0]
    # As curl -d sends it: it says form, and is JSON.
    status, _, raw = post(router.http_url, "/v2/models/edit/infer", body_of(inputs))
    assert status == 200
    outputs = {o["name"]: o["data"][0] for o in json.loads(raw)["outputs"]}
    assert outputs["IMAGE"].encode() == expected
    generate = json.dumps(texts(inputs)).encode()
    for model in ("edit", "edit_stream"):
        status, _, raw = post(router.http_url, f"/v2/models/{model}/generate", generate)
        assert (status, json.loads(raw)["IMAGE"].encode()) == (200, expected)
        path = f"/v2/models/{model}/generate_stream"
        status, headers, raw = post(router.http_url, path, generate)
        assert status == 200
        assert headers["content-type"].startswith("text/event-stream")
        last = raw.decode().strip().split("\n\n")[-1].removeprefix("data: ")
        assert json.loads(last)["IMAGE"].encode() == expected


def test_what_a_server_says_of_itself_is_what_a_worker_says(
    router: RouterSite, workers: list[WorkerProcess], http_client: Http
) -> None:
    worker = workers[0].http_url
    for path in ("/v2/models/edit", "/v2/models/edit_stream", "/v2/models/control/config"):
        assert get(router.http_url, path) == get(worker, path)
    http_client.edit(plain_edit())
    paths = [f"/v2/models/{name}/stats" for name in ("edit", "control")]
    for path in paths:
        router_stats, worker_stats = (
            get(url, path)[1]["model_stats"][0] for url in (router.http_url, worker)
        )
        assert set(router_stats) == set(worker_stats)

    def adds_up() -> bool:
        """A probe of the supervisor's may come between."""
        summed, *worker_counts = [
            get(url, "/v2/models/edit/stats")[1]["model_stats"][0]["inference_count"]
            for url in (router.http_url, *(w.http_url for w in workers))
        ]
        return bool(summed == sum(worker_counts) > 0)

    eventually("the router counts what its workers do", adds_up)
    assert get(router.http_url, "/v2")[1]["version"] == get(worker, "/v2")[1]["version"]
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert get(router.http_url, path)[0] == 200
    with closing(socket.create_connection(router.http_url.split(":"))) as connection:
        assert connection


def test_errors_are_the_workers_own(router: RouterSite, grpc: Grpc, direct: Grpc) -> None:
    for bad in (
        {"seed": "x"},
        {"nonsense": 1},
        {"model": "another"},
        {"template_id": "0" * 32},
        {"negative_prompt": "x"},
    ):
        errors = []
        for client in (grpc, direct):
            with pytest.raises(InferenceServerException) as refused:
                client.edit(plain_edit(**bad))
            errors.append((refused.value.status(), refused.value.message()))
        assert errors[0] == errors[1]
    status, _, raw = post(router.http_url, "/v2/models/edit/infer", body_of(plain_edit(nonsense=1)))
    assert status == 400
    assert "[INVALID_REQUEST] SETTINGS.nonsense" in json.loads(raw)["error"]
    status, _, raw = post(
        router.http_url, "/v2/models/edit/infer", body_of(plain_edit(deadline_ms=1, **LONG))
    )
    assert status in (429, 504), raw


def test_a_streams_errors_carry_the_request_and_others_go_on(router: RouterSite) -> None:
    with stream(router.grpc_url) as opened:
        opened.send(plain_edit(seed="x"))
        with pytest.raises(InferenceServerException, match=r"\[INVALID_REQUEST\] SETTINGS.seed"):
            opened.next()
        opened.send(plain_edit(seed=1))
        assert opened.next()[1]["event"] == "final"


def test_what_a_router_does_not_serve_is_refused_clearly(router: RouterSite) -> None:
    import tritonclient.grpc as triton_grpc
    import tritonclient.http as triton_http

    for module, url in ((triton_grpc, router.grpc_url), (triton_http, router.http_url)):
        with closing(module.InferenceServerClient(url)) as client:
            assert "region" not in str(client.get_system_shared_memory_status())
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            with pytest.raises(InferenceServerException, match="shared memory"):
                client.register_system_shared_memory("x", "/x", 10)
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="is not served by a router"):
                    call("edit")
            with pytest.raises(InferenceServerException, match="INVALID_REQUEST"):
                client.update_trace_settings(settings={"trace_rate": "1"})
            with pytest.raises(InferenceServerException, match="no model 'denoiser'"):
                client.infer("denoiser", tensors(module, {"REQUEST": b"{}"}))
            outputs = [module.InferRequestedOutput("META", class_count=2)]
            with pytest.raises(InferenceServerException, match="classification"):
                client.infer("edit", tensors(module, plain_edit()), outputs=outputs)
            assert client.is_server_ready()


# Cancelling.


@pytest.mark.parametrize("protocol", ["http", "generate_stream", "grpc", "grpc_stream"])
def test_an_edit_whose_client_leaves_gives_up_its_row(
    router: RouterSite, grpc: Grpc, protocol: str
) -> None:
    inputs = plain_edit(**LONG, request_id=f"left-{protocol}", output_encoding="base64")

    def is_running() -> bool:
        return f"left-{protocol}" in running(grpc)

    match protocol:
        case "http" | "generate_stream":
            connection = http.client.HTTPConnection(router.http_url)
            ways = {
                "http": ("/v2/models/edit/infer", body_of(inputs)),
                "generate_stream": (
                    "/v2/models/edit_stream/generate_stream",
                    json.dumps(texts(inputs)).encode(),
                ),
            }
            connection.request("POST", *ways[protocol])
            eventually("the edit runs", is_running)
            connection.close()
        case "grpc":
            pending = grpc.begin(inputs)
            eventually("the edit runs", is_running)
            pending.call.cancel()
        case "grpc_stream":
            with stream(router.grpc_url) as opened:
                opened.send(inputs)
                eventually("the edit runs", is_running)
    assert eventually("the row is free", lambda: not is_running()) < SOON_S


def test_control_cancel_reaches_the_worker_that_holds_the_edit(
    router: RouterSite, grpc: Grpc
) -> None:
    names = list(workers_of(router))
    for number, name in enumerate(names):
        for other in set(names) - {name}:
            router.read(f"/workers/{other}/drain", post=True)
        request_id = f"c{number}"

        def is_cancelled(request_id: str = request_id) -> bool:
            edit = grpc.begin(plain_edit(512, 512, **LONG, **WHOLE, request_id=request_id))
            eventually("it runs", lambda: edit.answered or request_id in running(grpc), 60.0)
            if grpc.control("cancel", request_id=request_id)["cancelled"]:
                with pytest.raises(InferenceServerException, match="CANCELLED"):
                    edit.wait()
                return True
            edit.wait()  # on a busy machine it may end before anybody cancels it
            return False

        eventually(f"an edit of {name} is cancelled", is_cancelled, 120.0)
        for other in names:
            router.read(f"/workers/{other}/resume", post=True)
    assert not grpc.control("cancel", request_id="nobody")["cancelled"]


# Our own client and command line, unchanged.


def test_our_client_and_command_line(router: RouterSite, tmp_path: Path) -> None:
    image = encode(scene(64, 64))
    (tmp_path / "a.png").write_bytes(image)
    (tmp_path / "m.png").write_bytes(encode(blob_mask(64, 64)))

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "maskserve_client.cli", *arguments]
        where = ["--url", router.grpc_url]
        ran = subprocess.run(
            command + where, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    run(
        *("edit", "--image", "a.png", "--mask", "m.png", "--prompt", "a star"),
        *("--out", "b.png", "--steps", "2"),
    )
    assert (tmp_path / "b.png").stat().st_size
    with Client(router.grpc_url) as client:
        name = client.register(image)
        templates = client.control("templates")["templates"]
        (template,) = [t for t in templates if t["template_id"] == name]
        assert len(template["workers"]) == 2
        # Every worker has it, so any may serve edits that name it.
        results = [
            client.edit(None, encode(blob_mask(64, 64)), "x", template_id=name, seed=i)
            for i in range(4)
        ]
        assert {result.meta["template_id"] for result in results} == {name}
        status = client.control("status")
        assert len(status["workers"]) == 2
        listed = run("status")
        assert all(address in listed for address in status["workers"])
        assert "predicted times were off by" in listed
        client.control("evict", template_id=name)
        with pytest.raises(TemplateNotFound):
            client.edit(None, encode(blob_mask(64, 64)), "x", template_id=name)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/edit/versions/1/ready",
        "/v2/models/edit/versions/7",
        "/v2/models/edit/versions/7/config",
        "/v2/models/edit/versions/7/ready",
        "/v2/models/edit/versions/7/stats",
        "/v2/models/edit/",
        "/no/such/path",
    ],
)
def test_paths_answer_as_one_tritons(
    router: RouterSite, workers: list[WorkerProcess], path: str
) -> None:
    def status(url: str, method: str) -> int:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        with closing(connection):
            connection.request(method, path)
            return connection.getresponse().status

    for method in ("GET", "HEAD", "DELETE"):
        assert status(router.http_url, method) == status(workers[0].http_url, method), method


# Clients that are told apart by keys.


@pytest.fixture
def keyed(workers: list[WorkerProcess], tmp_path: Path) -> Iterator[RouterSite]:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": name == "ops"}
        for name in ("ann", "bob", "ops")
    ]
    with RouterSite([worker.grpc_url for worker in workers], tmp_path, {"keys": keys}) as site:
        yield site


def held_by(site: RouterSite, key: str) -> Client:
    return Client(site.grpc_url, headers={"x-api-key": key})


def ids(status: dict[str, Any]) -> set[str]:
    listed = [status, *status["workers"].values()]
    return {
        row["request_id"]
        for worker_status in listed
        for rows in ("running", "waiting")
        for row in worker_status.get(rows, ())
    }


def test_edits_belong_to_the_key_that_sent_them(keyed: RouterSite) -> None:
    picture, mask = encode(scene(1024, 1024)), encode(blob_mask(1024, 1024))
    with held_by(keyed, "ann") as ann, held_by(keyed, "bob") as bob, held_by(keyed, "ops") as ops:
        over = threading.Event()

        def long_edit(client: Client) -> str:
            """Edit again and again, since no edit outlasts a busy machine's looks for sure."""
            settings = {"request_id": "mine", "cache": "off", **WHOLE, **LONG}
            while not over.is_set():
                try:
                    client.edit(picture, mask, "a star", **settings)
                except Cancelled:
                    return "cancelled"
            return "done"

        with ThreadPoolExecutor(2) as pool, ExitStack() as exit_stack:
            exit_stack.callback(over.set)
            # Both may use the same name at the same time.
            of_ann, of_bob = pool.submit(long_edit, ann), pool.submit(long_edit, bob)
            # An edit that goes from a worker's queue to its rows may be in no list for a record.
            eventually("both run", lambda: len(ids(ops.control("status"))) == 2)
            eventually("ann sees hers", lambda: ids(ann.control("status")) == {"mine"})
            eventually("bob sees his", lambda: ids(bob.control("status")) == {"mine"})
            scoped = set[str]()

            def both_listed() -> bool:
                scoped.clear()
                scoped.update(ids(ops.control("status")))
                return len(scoped) == 2

            eventually("both are listed", both_listed)
            assert all(name.endswith("!mine") for name in scoped)
            for client in (ann, bob):  # nobody else's can be named
                refused = [name for name in scoped if not _may_name(client, name)]
                assert len(refused) == 1
            eventually("bob cancels his", lambda: bob.cancel("mine"))
            assert of_bob.result(timeout=30) == "cancelled"
            # Its worker may know it a moment longer; then there is none that bob could end.
            eventually("bob has none", lambda: not bob.cancel("mine"))
            assert not of_ann.done()
            (remaining_id,) = scoped - {name for name in scoped if _may_name(bob, name)}
            eventually("an admin ends anybody's", lambda: ops.cancel(remaining_id))
            assert of_ann.result(timeout=30) == "cancelled"
        result = ann.edit(picture, mask, "a star", request_id="again", num_inference_steps=1)
        assert result.meta["request_id"] == "again"


def _may_name(client: Client, name: str) -> bool:
    """Whether the client may name edits of this name's scope."""
    with suppress(InvalidRequest):
        client.cancel(f"{name.partition('!')[0]}!no-such-edit")
        return True
    return False


def test_templates_belong_to_the_key_that_registered_them(keyed: RouterSite) -> None:
    mask = encode(blob_mask(64, 64))
    with held_by(keyed, "ann") as ann, held_by(keyed, "bob") as bob, held_by(keyed, "ops") as ops:

        def seen_by(client: Client) -> set[str]:
            return {t["template_id"] for t in client.control("templates")["templates"]}

        def edited_by(client: Client, name: str) -> None:
            client.edit(None, mask, "a star", template_id=name, num_inference_steps=1)

        template_id = ann.register(encode(scene(64, 64, seed=11)))
        assert template_id in seen_by(ann)
        assert template_id in seen_by(ops)
        assert template_id not in seen_by(bob)
        edited_by(ann, template_id)
        with pytest.raises(TemplateNotFound):
            edited_by(bob, template_id)
        for op in ("prime", "pin", "unpin", "evict"):
            with pytest.raises(TemplateNotFound):
                bob.control(op, template_id=template_id)
        assert ann.control("pin", template_id=template_id)["pinned"]
        # Who registers the same picture has it, too; one's evict is not the other's.
        assert bob.register(encode(scene(64, 64, seed=11))) == template_id
        ann.control("evict", template_id=template_id)
        assert template_id not in seen_by(ann)
        edited_by(bob, template_id)
        bob.control("evict", template_id=template_id)
        assert template_id not in seen_by(ops)

        shared = ann.register(encode(scene(64, 64, seed=12)), shared=True)
        edited_by(bob, shared)
        with pytest.raises(TemplateNotFound):
            bob.control("evict", template_id=shared)
        ops.control("evict", template_id=shared)
        with pytest.raises(TemplateNotFound):
            edited_by(ann, shared)


def test_what_answers_without_a_key(keyed: RouterSite) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/edit/ready"):
        assert get(keyed.http_url, path)[0] == 200
    for path in ("/v2", "/v2/models/edit", "/v2/models/edit/config", "/v2/models/stats"):
        assert get(keyed.http_url, path)[0] == 401
    with grpc_sync.InferenceServerClient(keyed.grpc_url) as keyless_client:
        assert keyless_client.is_server_live()
        assert keyless_client.is_server_ready()
        assert keyless_client.is_model_ready("edit")
        for call in (
            keyless_client.get_server_metadata,
            lambda: keyless_client.get_model_metadata("edit"),
            lambda: keyless_client.get_model_config("edit"),
            keyless_client.get_inference_statistics,
            keyless_client.get_model_repository_index,
        ):
            with pytest.raises(InferenceServerException, match="API key"):
                call()
        # Statistics are those of the key: what an admin's say of all is not told to a client.
        with held_by(keyed, "ann") as ann:
            ann.edit(encode(scene(64, 64)), encode(blob_mask(64, 64)), "x", num_inference_steps=1)

        def counted(key: str) -> int:
            statistics = keyless_client.get_inference_statistics("edit", headers={"x-api-key": key})
            return int(statistics.model_stats[0].inference_count)

        assert counted("ann") == 1
        assert counted("bob") == 0
        assert counted("ops") >= 1


def test_the_command_line_sends_the_key(keyed: RouterSite, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maskserve_client.cli", "status", "--url", keyed.grpc_url]

    def status(*more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    assert status().returncode == 2
    assert "API key" in status().stderr
    assert status("--key", "ann").returncode == 0
    assert status(MASKSERVE_KEY="ann").returncode == 0


# Hostile clients.


def test_hostile_bodies_stop_here(router: RouterSite, http_client: Http) -> None:
    path = "/v2/models/edit/infer"
    for body in (b"[" * 10**6, b'{"inputs":' + b"[" * 10**5, b"\xff" * 1000, b""):
        status, _, raw = post(router.http_url, path, body)
        assert status == 400, raw
    host, port = router.http_url.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\n")
        assert slow.recv(1) == b""  # headers that do not come
    with socket.create_connection((host, int(port)), timeout=30) as chunky:
        chunky.sendall(
            b"POST /v2/models/edit/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        try:
            chunky.sendall(b"1\r\n \r\n" * 200_000)
            answer = chunky.recv(100)
        except OSError:
            answer = b"400"
        assert b"400" in answer
    for url in (router.http_url, router.grpc_url):
        for _ in range(20):
            name, number = url.split(":")
            with socket.create_connection((name, int(number)), timeout=30) as noise:
                try:
                    noise.sendall(fresh_rng().bytes(4096))
                    noise.settimeout(0.2)
                    noise.recv(1000)
                except OSError:
                    pass
    assert http_client.edit(plain_edit())[0]


# Operations.


def test_metrics_and_logs_tell_of_edits(router: RouterSite, grpc: Grpc) -> None:
    grpc.edit(plain_edit(request_id="told"))
    page = router.read("/metrics").decode()
    assert 'maskserve_requests_total{code="OK",route="grpc"}' in page
    assert page.count("maskserve_worker_up{") == 2
    assert "maskserve_predicted_vs_actual_seconds_count" in page
    assert "maskserve_prediction_relative_error_count" in page
    lines = [json.loads(line) for line in router.log.read_text().splitlines()]
    (line,) = [log_record for log_record in lines if log_record.get("request_id") == "told"]
    assert (line["event"], line["code"], line["route"]) == ("edit", "OK", "grpc")
    assert line["upstream"] in workers_of(router)


def test_a_drained_worker_gets_nothing_and_comes_back(router: RouterSite, grpc: Grpc) -> None:
    first, _ = sorted(workers_of(router))
    answer = json.loads(router.read(f"/workers/{first}/drain?wait=30", post=True))
    assert answer == {"draining": True, "in_flight": 0}
    pending = [grpc.begin(plain_edit(seed=i, request_id=f"d{i}")) for i in range(6)]
    names = {edit.wait()[1]["worker"] for edit in pending}
    assert len(names) == 1
    router.read(f"/workers/{first}/resume", post=True)
    eventually(
        "both serve", lambda: all(w["state"] == "ready" for w in workers_of(router).values())
    )


def test_workers_are_added_and_removed_while_it_runs(
    router: RouterSite, workers: list[WorkerProcess], grpc: Grpc
) -> None:
    addresses = [worker.grpc_url for worker in workers]
    router.write_config(workers={"addresses": addresses[:1]})
    router.reload()
    assert set(workers_of(router)) == set(addresses[:1])
    assert grpc.edit(plain_edit())[0]
    router.write_config(workers={"addresses": addresses})
    router.reload()
    eventually(
        "both serve", lambda: all(w["state"] == "ready" for w in workers_of(router).values())
    )
    assert set(workers_of(router)) == set(addresses)


# tests/unit/engine/cache/test_cache_files.py has an engine that begins with what files hold.
@pytest.mark.parametrize("outlives", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_template_is_shared_by_a_host_and_outlives_its_workers(
    pair: Supervisor, tmp_path: Path, outlives: bool
) -> None:
    source, mask = scene(64, 64, seed=671 + outlives), blob_mask(64, 64)  # not primed before
    # It waits for what lies in files, and every block takes its entry.
    edit = edit_inputs(source, mask, cache="auto", reproducible=True, num_inference_steps=4)
    first, second = (worker.grpc_url for worker in pair.workers)
    with closing(Grpc(first)) as grpc:
        image = base64.b64encode(encode(source)).decode()
        name = str(grpc.control(op="register", image=image)["template_id"])

        def listed() -> str:
            """The template's line in what `maskserve templates ls` prints."""
            command = [sys.executable, "-m", "maskserve_client.cli", "templates", "ls"]
            output = subprocess.run(
                [*command, "--url", first], capture_output=True, text=True, check=True, timeout=60
            ).stdout
            return next(line for line in output.splitlines() if name in line)

        eventually(
            "it is primed",
            lambda: grpc.control(op="prime", template_id=name)["state"] == "primed",
            60.0,
        )
        eventually("it is on disk", lambda: "disk" in listed(), 60.0)
        for tier in ("device", "host", "disk"):
            assert re.search(rf"{tier} [\d.]+ [KMG]iB", listed())
        first_image, _ = grpc.edit(edit)
    with closing(Grpc(second)) as other_client:  # it has primed nothing
        other_image, meta = other_client.edit(edit)
        assert (meta["cache"], meta["cache_tier"]) == ("hit", "host")
        assert np.abs(pixels(other_image).astype(int) - pixels(first_image)).max() <= 1
    if not outlives:
        return
    # What is left when both are gone: their files, and no host tier.
    options, entries = pair.workers[0].spec.options, tmp_path / "entries"
    assert options.entries is not None
    shutil.copytree(options.entries, entries)
    single_options = ServeOptions(
        model=options.model, base_port=free_base_port(), log_dir=tmp_path, entries=entries
    )
    with (
        Supervisor(single_options) as new_supervisor,
        closing(Grpc(new_supervisor.workers[0].grpc_url)) as grpc,
    ):
        eventually("it has looked", lambda: name in str(grpc.control(op="templates")), 30.0)
        restarted_image, meta = grpc.edit(edit)
        assert (meta["cache"], meta["cache_tier"]) == ("hit", "disk")
        assert meta["cache_bytes"].get("disk", 0) > 0
        assert np.array_equal(pixels(restarted_image)[mask == 0], source[mask == 0])


@pytest.mark.slow  # test_perf_analyzer.py has it at a worker; a router's fronts are tested above
def test_perf_analyzer(router: RouterSite, tmp_path: Path) -> None:
    try:
        find_tool(None, CHECKOUT / ".cache" / "perf_analyzer")
    except PerfError as error:
        pytest.skip(str(error))
    script = [sys.executable, str(CHECKOUT / "scripts" / "bench"), "perf_analyzer"]
    where = ["--url", router.grpc_url, "--http-url", router.http_url]
    edits = ["--size", "64", "--steps", "2", "--entries", "4", "--templates", "2", "--cache", "off"]
    load = ["--warmup", "1", "--request-rate", "2", "--requests", "6", "--progress"]
    results = tmp_path / "perf.json"
    output_options = ["--json", str(results), "--hardware", "x", "--timeout", "30"]
    ran = subprocess.run(
        [*script, *where, *edits, *load, *output_options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(results.read_text())


# Faults.


def test_a_router_that_stops_finishes_what_it_took(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    site = RouterSite([worker.grpc_url for worker in workers], tmp_path)
    with site, closing(Grpc(site.grpc_url)) as client:
        pending = [client.begin(plain_edit(num_inference_steps=100)) for _ in range(4)]
        eventually("they run", lambda: sum(w["sent"] for w in workers_of(site).values()) == 4)
        assert site.stop(60) == 0
        assert all(edit.wait()[1]["event"] == "final" for edit in pending)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in SHORT else pytest.mark.slow)
        for fault in faults()
    ],
)
async def test_no_edit_is_lost_or_wrong(pair: Supervisor, router: RouterSite, fault: Fault) -> None:
    edits = await asyncio.to_thread(known_edits, [w.grpc_url for w in pair.workers], 64, 2, 3)
    tally = await try_fault(Cluster(pair, router, edits), fault)
    assert (tally.ends[LOST], tally.ends[WRONG]) == (0, 0)
    assert tally.ends[DONE] > 0
    if "router" not in fault.name:
        assert not tally.errors  # what one worker held was done by the other
