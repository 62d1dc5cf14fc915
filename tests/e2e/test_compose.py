"""`docker compose --profile cpu up` as a user has it: edits, a worker that dies, metrics, down.

Needs a Docker Engine: skipped where there is none, unless MASKSERVE_COMPOSE=required.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_client.client import Client
from tests.fakes.pictures import blob_mask, encode, scene
from tests.support.calls import Grpc, edit_inputs, eventually, pixels, texts
from tests.support.compose import ROOT, Compose, missing

_LACKS = "" if os.environ.get("MASKSERVE_COMPOSE") == "required" else missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(_LACKS), reason=f"compose: {_LACKS}"),
]
WORKERS = ("cpu-0", "cpu-1")
SERVICES = (*WORKERS, "router-cpu", "prometheus")
EDITS = 24


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    system = Compose(f"maskserve-test-{os.getpid()}")
    # The router shares its workers' image. Builds reach the package index by the host's network.
    flags = f"PIP_FLAGS={os.environ.get('PIP_FLAGS', '')}"
    build = ["docker", "build", "--network", "host", "--build-arg", flags]
    for target in ("cpu", "prometheus"):
        tag = f"maskserve:{target}"
        subprocess.run([*build, "--target", target, "--tag", tag, "."], cwd=ROOT, check=True)
    try:
        # Grafana's image would be fetched, and nothing here asks it.
        system.run("up", "--no-build", "--detach", *SERVICES)
        for service in SERVICES:
            eventually(f"{service} healthy", lambda s=service: system.healthy(s), 600)
        yield system
    finally:
        system.run("down", "--volumes", "--timeout", "90")


@pytest.fixture
def router(compose: Compose) -> Iterator[Grpc]:
    client = Grpc(f"127.0.0.1:{compose.grpc}")
    yield client
    client.close()


def test_an_edit_through_the_router_leaves_the_outside_as_it_was(router: Grpc) -> None:
    source, mask = scene(96, 120), blob_mask(96, 120)
    image, _ = router.edit(edit_inputs(source, mask, num_inference_steps=4))
    edited = pixels(image)
    assert (edited[mask == 0] == source[mask == 0]).all()
    assert (edited[mask > 0] != source[mask > 0]).any()


def test_curl_gets_an_edit_over_http(compose: Compose) -> None:
    inputs = edit_inputs(scene(64, 64), blob_mask(64, 64), output_encoding="base64")
    body = {
        "inputs": [
            {"name": name, "shape": [1], "datatype": "BYTES", "data": [value]}
            for name, value in texts(inputs).items()
        ]
    }
    url = f"http://127.0.0.1:{compose.http}/v2/models/edit/infer"
    result = subprocess.run(
        ["curl", "-sf", url, "-H", "Content-Type: application/json", "--data-binary", "@-"],
        input=json.dumps(body).encode(),
        capture_output=True,
        check=True,
    )
    names = [output["name"] for output in json.loads(result.stdout)["outputs"]]
    assert sorted(names) == ["IMAGE", "META"]


def test_a_worker_that_dies_under_load_costs_nobody_an_edit(compose: Compose, router: Grpc) -> None:
    source, mask = scene(64, 64), blob_mask(64, 64)
    settings = {"reproducible": True, "cache": "auto", "num_inference_steps": 8}
    inputs = [edit_inputs(source, mask, seed=seed, **settings) for seed in range(EDITS)]
    expected = [pixels(router.edit(edit)[0]) for edit in inputs]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(router.edit, edit) for edit in inputs]
        time.sleep(0.3)
        compose.run("kill", "cpu-0")
        edited = [pixels(answer.result()[0]) for answer in answers]
    assert all(np.array_equal(a, b) for a, b in zip(edited, expected, strict=True))
    compose.run("up", "--no-build", "--detach", "--no-recreate", *SERVICES)
    eventually("cpu-0 is back", lambda: compose.healthy("cpu-0"), 300)


def test_status_lists_the_workers(compose: Compose) -> None:
    url = f"127.0.0.1:{compose.grpc}"
    command = [sys.executable, "-m", "maskserve_client.cli", "status", "--url", url]

    def lists_both() -> bool:
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return all(f"{worker}-0" in result.stdout for worker in WORKERS)

    eventually("both workers listed", lists_both, 30)


def test_prometheus_has_workers_and_router(compose: Compose) -> None:
    def value(query: str) -> float:
        url = (
            f"http://127.0.0.1:{compose.prometheus}/api/v1/query?query={urllib.parse.quote(query)}"
        )
        with urllib.request.urlopen(url, timeout=10) as answer:
            samples = json.load(answer)["data"]["result"]
        return float(samples[0]["value"][1]) if samples else 0.0

    eventually("both workers scraped", lambda: value('sum(up{job="workers"})') == 2, 60)
    eventually("the router scraped", lambda: value('sum(up{job="routers"})') == 1, 60)
    eventually("edits counted", lambda: value("sum(maskserve_requests_total)") > 0, 60)


HOSTS = ("edits", "stages", "controls", "nodes", "router-hosts")


@pytest.fixture
def hosts(compose: Compose) -> Iterator[Compose]:
    """The profile of this name, by the images that were built."""
    system = Compose(f"maskserve-test-hosts-{os.getpid()}", "hosts")
    try:
        system.run("up", "--no-build", "--detach", *HOSTS)
        for service in HOSTS:
            eventually(f"{service} healthy", lambda s=service: system.healthy(s), 600)
        assert len(system.containers("stages")) == 2
        yield system
    finally:
        system.run("down", "--volumes", "--timeout", "90")


def test_hosts_run_workflows_and_outlive_a_node_server(hosts: Compose) -> None:
    source, mask = scene(64, 64), blob_mask(64, 64)
    inputs = {"image": encode(source), "mask": encode(mask), "prompt": "a red star"}
    with Client(f"127.0.0.1:{hosts.grpc}") as client:

        def run() -> Any:
            settings = {"seed": 1, "reproducible": True, "num_inference_steps": 4}
            return pixels(client.run_workflow("variants", inputs, **settings)[0]["image"])

        first = run()
        assert (first[mask == 0] == source[mask == 0]).all()
        status = client.control("status")
        assert [item["up"] for item in status["workers"].values()] == [True, True]
        for worker in status["workers"].values():
            states = {node["name"]: node["state"] for node in worker["nodes"]}
            assert states == dict.fromkeys(("denoiser", "encoder", "decoder"), "ready")
        [record] = status["nodes"].values()
        assert {"find", "segment", "enlarge"} <= {item["name"] for item in record["models"]}
        assert status["wanted"] == {"workers": {"demo": 1}, "nodes": 1}
        sketched = {**inputs, "sketch": inputs["image"]}  # with a ControlNet, which is elsewhere
        outputs, _ = client.run_workflow("outline", sketched, seed=1, num_inference_steps=4)
        assert pixels(outputs["image"]).shape == (128, 128, 3)
        hosts.run("restart", "nodes")  # a container has another address then, or may have
        assert run().tolist() == first.tolist()


GPUS = ("gpu-0", "gpu-1")


@pytest.fixture
def gpu_profile(compose: Compose, tmp_path: Path) -> Iterator[Callable[..., Compose]]:
    """Makes the profile gpu-2 on an engine without GPUs.

    Each worker is told of one device that is not there; the image is the profile cpu's, since the
    other's base is not at hand. Commands, ports, folders, user and health checks are the profile's.
    """
    started: list[Compose] = []

    def make(config: str) -> Compose:
        (tmp_path / "worker.toml").write_text(config, encoding="utf-8")
        project = f"maskserve-test-gpu-{os.getpid()}-{len(started)}"
        system = Compose(project, "gpu-2", {"MASKSERVE_MODEL": "/opt/models/demo"})

        def without_gpus(services: dict[str, Any]) -> None:
            for name in (*GPUS, "router"):
                services[name]["image"] = "maskserve:cpu"
                services[name].pop("build", None)
            for name in GPUS:
                [devices] = services[name].pop("deploy")["resources"]["reservations"]["devices"]
                gpu_ids = ",".join(devices["device_ids"])
                services[name]["environment"]["CUDA_VISIBLE_DEVICES"] = gpu_ids
                services[name]["restart"] = "no"
                del services[name]["ulimits"]  # an engine without privileges may not raise them
                services[name]["volumes"] = [
                    f"{tmp_path}/worker.toml:/etc/maskserve.toml:ro"
                    if str(volume).endswith(":/etc/maskserve.toml:ro")
                    else volume
                    for volume in services[name]["volumes"]
                ]

        system.change(tmp_path / "compose.yml", without_gpus)
        started.append(system)
        return system

    yield make
    for system in started:
        system.run("down", "--volumes", "--timeout", "90")


def test_a_gpu_s_container_whose_gpu_cannot_be_used_says_so(
    gpu_profile: Callable[..., Compose],
) -> None:
    system = gpu_profile("")
    system.run("up", "--no-build", "--detach", "gpu-1")
    eventually("it has ended", lambda: not system.container("gpu-1")["State"]["Running"], 300)
    logs = system.run("logs", "gpu-1")
    assert "CUDA_VISIBLE_DEVICES=1 names GPUs that cannot be used" in logs
    assert "[model] device: " in logs
    assert "to do without" in logs
    assert "Traceback" not in logs
    assert system.container("gpu-1")["State"]["ExitCode"] != 0


def test_the_profile_gpu_serves_where_it_is_told_to_do_without(
    gpu_profile: Callable[..., Compose],
) -> None:
    system = gpu_profile('[model]\ndevice = "cpu"\n')
    system.run("up", "--no-build", "--detach", *GPUS, "router")
    for service in (*GPUS, "router"):
        eventually(f"{service} healthy", lambda s=service: system.healthy(s), 600)
    source, mask = scene(64, 64), blob_mask(64, 64)
    with closing(Grpc(f"127.0.0.1:{system.grpc}")) as client:
        image, _ = client.edit(edit_inputs(source, mask, num_inference_steps=2))
    assert (pixels(image)[mask == 0] == source[mask == 0]).all()
