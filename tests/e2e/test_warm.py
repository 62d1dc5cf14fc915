"""Cached activations outlive their worker and are shared by the workers of a host."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from maskserve_harness.checkout import CHECKOUT
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from tests.fakes.pictures import encode, scene
from tests.support.calls import Grpc, edit_inputs, pixels
from tests.support.eventually import eventually

SOURCE, MASK = scene(64, 64), np.zeros((64, 64), np.uint8)
MASK[8:30, 20:44] = 255
EDIT = edit_inputs(SOURCE, MASK, cache="auto", reproducible=True, num_inference_steps=4)
"""It waits for what lies in files, and every block takes its entry."""


@contextmanager
def serving(model: Path, folder: Path, workers: int) -> Iterator[list[str]]:
    """Addresses (gRPC) of workers whose activations outlive them in `folder`."""
    options = ServeOptions(
        model=str(model),
        workers=workers,
        share_gpus=True,
        base_port=free_base_port(),
        log_dir=folder / "logs",
        entries=folder / "entries",
        say=lambda line: None,
    )
    with Supervisor(options) as supervisor:
        yield [worker.grpc_url for worker in supervisor.workers]


def templates_ls(url: str) -> str:
    """What `maskserve templates ls` prints."""
    command = [sys.executable, "-m", "maskserve_client.cli", "templates", "ls", "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_template_is_shared_by_a_host_and_outlives_its_workers(
    model: Path, tmp_path: Path
) -> None:
    with serving(model, tmp_path, workers=2) as (first, second):
        with closing(Grpc(first)) as grpc:
            image = base64.b64encode(encode(SOURCE)).decode()
            name = str(grpc.control(op="register", image=image)["template_id"])
            eventually(
                "it is primed",
                lambda: grpc.control(op="prime", template_id=name)["state"] == "primed",
                60.0,
            )
            eventually("it is on disk", lambda: "disk" in templates_ls(first), 60.0)
            line = next(each for each in templates_ls(first).splitlines() if name in each)
            for tier in ("device", "host", "disk"):
                assert re.search(rf"{tier} [\d.]+ [KMG]iB", line), line
            shown, _ = grpc.edit(EDIT)
        with closing(Grpc(second)) as other:  # it has primed nothing
            theirs, meta = other.edit(EDIT)
            assert (meta["cache"], meta["cache_tier"]) == ("hit", "host")
            assert np.abs(pixels(theirs).astype(int) - pixels(shown)).max() <= 1
    with serving(model, tmp_path, workers=1) as (again,), closing(Grpc(again)) as grpc:
        eventually("it has looked", lambda: name in str(grpc.control(op="templates")), 30.0)
        after, meta = grpc.edit(EDIT)  # the host tier went with the workers before
        assert (meta["cache"], meta["cache_tier"]) == ("hit", "disk")
        assert meta["cache_bytes"].get("disk", 0) > 0
        assert np.array_equal(pixels(after)[MASK == 0], SOURCE[MASK == 0])


@pytest.mark.slow
def test_the_second_demo_reads_its_first_edit_from_disk(tmp_path: Path) -> None:
    demo = [sys.executable, str(CHECKOUT / "scripts" / "demo.py"), "--out", str(tmp_path)]
    said = [
        subprocess.run(demo, capture_output=True, text=True, check=True, timeout=300).stdout
        for _ in range(2)
    ]
    tiers = [re.findall(r"the first edit read [\d.]+ MiB from tier (\w+)", each) for each in said]
    assert tiers == [["device"], ["disk"]]
