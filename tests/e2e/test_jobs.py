"""Jobs through a real worker and routers that are killed."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client import DeadlineExceeded, EditJobs, InvalidRequest
from maskserve_client.cli import main
from maskserve_client.jobs import pictures
from maskserve_serving.worker import WorkerProcess
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import Grpc, edit_inputs, pixels
from tests.support.draws import fresh_random


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_jobs_outlive_routers_that_are_killed(
    worker: WorkerProcess, tmp_path: Path, kills: int
) -> None:
    """At random moments: no job is lost, none has two ends, and a client that asks anew after a
    broken connection gives none twice.
    """
    jobs = {"database": str(tmp_path / "jobs.sqlite"), "lease_s": 1.0, "running": 2}
    site = RouterSite([worker.grpc_url], tmp_path, {"jobs": jobs})
    draw = fresh_random()
    source, where = encode(scene(64, 64)), encode(blob_mask(64, 64))
    picture, mask = (base64.b64encode(image).decode() for image in (source, where))
    payload = {
        "prompt": "a star",
        "images": [{"image_url": f"data:image/png;base64,{picture}"}],
        "mask": {"image_url": f"data:image/png;base64,{mask}"},
        "mask_mode": "white",
        "cache": "off",
        "num_inference_steps": 30,
    }

    def call(method: str, path: str, body: Any = None, **headers: str) -> Any:
        while True:  # as a client does whose connection breaks
            url = f"http://{site.http_url}/v1/jobs{path}"
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(url, data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as refused:
                if refused.code < 500:
                    raise AssertionError(refused.read()) from None
            except (OSError, http.client.HTTPException):
                pass
            threading.Event().wait(0.05)

    def give(number: int) -> str:
        headers = {"content-type": "application/json", "idempotency-key": f"job-{number}"}
        return str(call("POST", "", {**payload, "seed": number}, **headers)["id"])

    def end_of(name: str) -> dict[str, Any]:
        while (job := call("GET", f"/{name}"))["status"] in ("queued", "running"):
            threading.Event().wait(0.1)
        return dict(job)

    with site, ThreadPoolExecutor(8) as clients:
        count = 4 + 2 * kills
        job_futures = [clients.submit(give, number) for number in range(count)]
        ends = [clients.submit(lambda one=one: end_of(one.result())) for one in job_futures]
        for _ in range(kills):
            threading.Event().wait(draw.uniform(0.2, 1.5))
            site.kill()
            site.start()
        ended = [one.result(240) for one in ends]
        assert [end["status"] for end in ended] == ["succeeded"] * count
        assert {one["id"] for one in call("GET", "")["data"]} == {end["id"] for end in ended}
        assert [call("GET", f"/{end['id']}") for end in ended] == ended
    images = [base64.b64decode(end["result"]["data"][0]["b64_json"]) for end in ended]
    with closing(Grpc(worker.grpc_url)) as client:  # each is its own edit, whole
        for number in (0, count - 1):
            edit = edit_inputs(source, where, "a star", seed=number, num_inference_steps=30)
            expected = client.begin(edit).wait()[0]
            assert np.array_equal(pixels(images[number]), pixels(expected))


def test_jobs_are_given_and_fetched_from_a_shell_and_from_python(
    worker: WorkerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, where = scene(64, 64), blob_mask(64, 64)
    for name, picture in (("a.png", source), ("m.png", where)):
        (tmp_path / name).write_bytes(encode(picture))
    settings = {"seed": 5, "num_inference_steps": 3, "cache": "off"}
    with closing(Grpc(worker.grpc_url)) as client:
        expected, _ = client.edit(edit_inputs(source, where, "a star", **settings))
    with RouterSite([worker.grpc_url], tmp_path, {"jobs": {"database": ""}}) as site:
        url = f"http://{site.http_url}"

        def cli_output(*words: str, code: int = 0) -> str:
            assert main(["jobs", *words, "--url", url]) == code
            return capsys.readouterr().out.strip()

        edit_options = ["--image", str(tmp_path / "a.png"), "--mask", str(tmp_path / "m.png")]
        edit_options += ["--prompt", "a star", "--seed", "5", "--steps", "3", "--cache", "off"]
        name = cli_output("add", *edit_options, "--idempotency-key", "order-17")
        assert cli_output("add", *edit_options, "--idempotency-key", "order-17") == name
        out = tmp_path / "b.png"
        assert cli_output("get", name, "--wait", "--out", str(out)).startswith(f"{name}  succeeded")
        assert np.array_equal(pixels(out.read_bytes()), pixels(expected))
        assert name in cli_output("ls")
        jobs = EditJobs(url)
        repeated_job = jobs.add(source, where, "a star", **settings)
        [edited_picture] = pictures(jobs.wait(repeated_job["id"], 120))
        assert np.array_equal(pixels(edited_picture), pixels(expected))
        endless = jobs.add(source, where, "a star", **{**settings, "num_inference_steps": 900})
        assert jobs.delete(endless["id"])["status"] in ("queued", "running", "cancelled")
        assert jobs.wait(endless["id"], 60)["status"] == "cancelled"
        late = jobs.add(source, where, "a star", num_inference_steps=900)["id"]
        with pytest.raises(DeadlineExceeded, match="after 0 s"):
            jobs.wait(late, 0)
        jobs.delete(late)
        with pytest.raises(InvalidRequest, match="n: "):
            jobs.add(source, where, "a star", n=99)
        cli_output("get", endless["id"], "--out", str(out), code=2)
        assert cli_output("rm", name) == f"{name}  deleted"
        cli_output("get", name, code=2)
