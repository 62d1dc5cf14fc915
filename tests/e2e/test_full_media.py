"""A worker whose tiers, and whose shared memory, are full while it is at work: what finds no room
is told so, or computes all tokens, and nothing else is touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_client.client import Client
from maskserve_common.errors import EngineFailed
from maskserve_studies.workflows.second_host import can_make_second_host, second_host
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_second_host(), reason="needs root and iproute2"),
]

SIDE, LARGE, PICTURES, STEPS = 64, 1800, 12, 6
BASE = 9000
CONFIG = """\
[cache]
budget_bytes = 4000000
host_dir = "{root}/host/entries"
host_bytes = 14000000
disk_dir = "{root}/disk/entries"
disk_bytes = 22000000
"""


@dataclass
class Site:
    """A worker, and its media as they are seen here."""

    client: Client
    host: Path
    disk: Path
    memory: Path

    def edit(self, number: int, cache: str = "off", side: int = SIDE) -> bytes:
        mask = np.zeros((side, side), np.uint8)
        mask[side // 8 : side // 2, side // 8 : side // 2] = 255
        result = self.client.edit(
            encode(scene(side, side, seed=number)),
            encode(mask),
            "a red star",
            seed=number,
            num_inference_steps=STEPS,
            cache=cache,
            reproducible=True,
            timeout=120,
        )
        return bytes(result.encoded)

    def failures(self) -> float:
        counters = self.client.control("status")["counters"]
        return sum(n for name, n in counters.items() if name.startswith("cache_failures_total"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("media")
    config = root / "worker.toml"
    config.write_text(CONFIG.format(root=root))
    for name in ("host", "disk"):
        (root / name).mkdir()
    with second_host() as host:
        media = {name: host.mount(root / name, mib) for name, mib in (("host", 16), ("disk", 24))}
        memory = host.mount(Path("/dev/shm"), 160)
        serve = ["--model", str(DEMO_MODEL), "--base-port", str(BASE), "--config", str(config)]
        host.serve([*serve, "--log-dir", str(root / "logs")], folder=root)
        with Client(f"{host.remote_address}:{BASE + 1}") as client:
            yield Site(client, media["host"], media["disk"], memory)


def fill(folder: Path) -> Path:
    """Take all that is free; the file that has it."""
    path = folder / "filled"
    with path.open("wb", buffering=0) as file, suppress(OSError):  # no space is left
        while True:
            file.write(bytes(4096))
    return path


def test_full_tiers_cost_their_entries_alone(site: Site) -> None:
    expected = {number: site.edit(number) for number in range(PICTURES)}
    wrong: list[Any] = []
    edit_count, stop = [0], threading.Event()

    def visit(first: int) -> None:
        number = first
        while not stop.is_set():
            number = (number + 5) % PICTURES
            try:
                site.edit(number, "auto")
                if site.edit(number) != expected[number]:
                    wrong.append(number)
                edit_count[0] += 1
            except Exception as error:
                wrong.append(error)

    visitors = [threading.Thread(target=visit, args=(first,)) for first in range(3)]
    for visitor in visitors:
        visitor.start()
    try:
        filled = [fill(site.disk)]
        eventually("the disk has refused something", lambda: site.failures() > 0, 120)
        filled.append(fill(site.host))
        count_before, refused = edit_count[0], site.failures()
        eventually("so has the host's memory", lambda: site.failures() > refused, 120)
        eventually("edits go on", lambda: edit_count[0] >= count_before + 6, 120)
        for file in filled:
            file.unlink()
        eventually("and still do", lambda: edit_count[0] >= count_before + 12, 120)
    finally:
        stop.set()
        for visitor in visitors:
            visitor.join()
    assert not wrong, wrong[:3]
    assert site.client.control("status")["state"] == "ready"


def test_full_shared_memory_fails_what_finds_no_room_and_no_other(site: Site) -> None:
    small = site.edit(1)
    filled = fill(site.memory)
    try:
        assert site.edit(1) == small
        for _ in range(2):
            with pytest.raises(EngineFailed, match="shared memory"):
                site.edit(2, side=LARGE)
            assert site.edit(1) == small
    finally:
        os.unlink(filled)
    assert len(site.edit(2, side=LARGE)) > len(small)
    assert site.edit(1) == small
    status = site.client.control("status")
    assert (status["state"], status["alive"], status["in_flight"]) == ("ready", True, 0)
