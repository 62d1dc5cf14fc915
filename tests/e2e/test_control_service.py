"""Edits whose ControlNets a Triton of its own runs, and what becomes of them when it fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from maskserve_client.client import Client
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_triton.controlnet_calls import ControlNetCalls
from maskserve_triton.loop_thread import LoopThread
from tests.fakes.control_nets import random_net
from tests.fakes.pictures import encode, scene
from tests.support.calls import Pixels, pixels

# Held in each run by tests/unit/engine/control_link (what edits get, also one step ahead, and what
# becomes of them), tests/triton/test_models.py (the service's model, and calls of it),
# tests/unit/engine/triton (what fast edits are refused) and tests/unit/serving/test_services.py.
pytestmark = pytest.mark.slow
SIDE, STEPS = 64, 6
SOURCE = scene(SIDE, SIDE)
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[16:48, 8:40] = 255
PICTURE = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


class Site:
    """Workers with a service, each of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.meta: dict[str, Any] = {}
        """META of the last edit."""

    def edit(
        self, *, control: bool, worker: int = 0, nets: Sequence[str] = ("plain",), **more: Any
    ) -> Pixels:
        settings: dict[str, Any] = {"num_inference_steps": STEPS, "cache": "off", "seed": 1, **more}
        if control:
            settings |= {
                "control": [encode(PICTURE)] * len(nets),
                "controls": [{"name": name, "scale": 0.8} for name in nets],
            }
        with Client(self.supervisor.workers[worker].grpc_url) as client:
            result = client.edit(
                encode(SOURCE), encode(MASK), "a red star", timeout=120, **settings
            )
        self.meta = result.meta
        return pixels(result.encoded)

    def model_pid(self) -> int:
        """The process id of the service's Python process."""
        [service] = self.supervisor.services
        folder = Path(service.config.runtime_dir) / "processes"
        [name] = [path.name for path in folder.glob("controlnet.*")]
        return int(name.rpartition(".")[2])


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nets")
    random_net(11, 1, 1).save_pretrained(folder / "plain")
    random_net(12, 1, 1).save_pretrained(folder / "other")
    return folder


def options(model: Path, nets: Path, logs: Path, **more: Any) -> ServeOptions:
    config = logs / "worker.toml"
    config.write_text("[controls]\nservice_timeout_s = 2.0\n")
    return ServeOptions(
        config=config,
        model=str(model),
        base_port=free_base_port(),
        controlnets=str(nets),
        log_dir=logs,
        **more,
    )


@pytest.fixture(scope="module")
def site(
    tiny_inpaint: Path, nets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    serve_options = options(
        tiny_inpaint, nets, tmp_path_factory.mktemp("service-logs"), services=("controlnet@cpu",)
    )
    with Supervisor(serve_options) as supervisor:
        yield Site(supervisor)


@pytest.fixture(scope="module")
def expected(site: Site) -> Pixels:
    return site.edit(control=True)


def test_fast_edits_ask_ahead_and_say_so(site: Site, expected: Pixels) -> None:
    assert site.edit(control=True).tolist() == expected.tolist()
    assert site.meta["controls_stale_steps"] == 0
    fast = site.edit(control=True, adapters="fast")
    assert site.meta["controls_stale_steps"] == STEPS - 1
    assert not np.array_equal(fast, expected)
    assert site.edit(control=True, adapters="fast").tolist() == fast.tolist()
    with pytest.raises(MaskserveError, match=r"SETTINGS\.adapters"):
        site.edit(control=True, adapters="fast", reproducible=True, cache="auto")


def test_a_service_answers_as_nets_beside_the_base_do(
    expected: Pixels, tiny_inpaint: Path, nets: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Supervisor(options(tiny_inpaint, nets, tmp_path_factory.mktemp("logs"))) as supervisor:
        local_site = Site(supervisor)
        edited = local_site.edit(control=True)
        assert np.abs(edited.astype(int) - expected).max() <= 1
        assert np.abs(local_site.edit(control=False).astype(int) - expected).max() > 5


def test_a_service_for_each_device_shares_the_nets_and_one_that_dies_leaves_them(
    site: Site, tiny_inpaint: Path, nets: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("plain", "other")
    expected = site.edit(control=True, nets=names).astype(int)
    serve_options = options(
        tiny_inpaint, nets, tmp_path_factory.mktemp("two-logs"), services=("controlnet@cpu",) * 2
    )
    with Supervisor(serve_options) as supervisor:
        two = Site(supervisor)
        assert np.abs(two.edit(control=True, nets=names) - expected).max() <= 1
        loaded, loop = [], LoopThread("calls")
        for service in supervisor.services:
            calls = ControlNetCalls(loop, service.grpc_url)
            loaded.append(calls.call({"op": "health"}, b"", 10.0)["nets"])
            calls.close()
        loop.close()
        assert loaded == [1, 1]
        pid = supervisor.services[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert np.abs(edit_after_harm(two, names) - expected).max() <= 1
        assert supervisor.workers[0].restarts == 0


def edit_after_harm(site: Site, nets: Sequence[str] = ("plain",)) -> Pixels:
    """Edit until a service takes it."""
    end = time.monotonic() + 90
    while True:
        try:
            return site.edit(control=True, nets=nets)
        except MaskserveError as refused:
            if "ControlNet service" not in str(refused) or time.monotonic() > end:
                raise
            time.sleep(0.5)


def kill_server(site: Site) -> None:
    [service] = site.supervisor.services
    assert service.pid is not None
    os.kill(service.pid, signal.SIGKILL)


def kill_model(site: Site) -> None:
    os.kill(site.model_pid(), signal.SIGKILL)


def freeze(site: Site) -> None:
    for process in psutil.Process(site.supervisor.services[0].pid).children(recursive=True):
        process.suspend()


@pytest.mark.parametrize("harm", [kill_server, kill_model, freeze])
def test_harm_fails_its_edits_in_words_spares_the_others_and_is_repaired(
    site: Site, expected: Pixels, harm: Callable[[Site], None]
) -> None:
    plain = site.edit(control=False)
    with ThreadPoolExecutor(8) as pool:
        hurt = [pool.submit(site.edit, control=True, num_inference_steps=150) for _ in range(3)]
        plain_edits = [pool.submit(site.edit, control=False, num_inference_steps=STEPS)]
        time.sleep(1.0)
        restarts = site.supervisor.services[0].restarts
        harm(site)
        begin = time.monotonic()
        plain_edits.append(pool.submit(site.edit, control=False, num_inference_steps=STEPS))
        for future in hurt:
            error = future.exception(60)
            assert error is None or isinstance(error, EngineFailed | Overloaded), error
            if error is not None:
                assert "ControlNet service" in str(error), error
        assert time.monotonic() - begin < 30
        for future in plain_edits:
            assert np.abs(future.result(60).astype(int) - plain).max() <= 1
    edited = edit_after_harm(site)
    assert np.abs(edited.astype(int) - expected).max() <= 1
    assert site.meta["controls_stalled_ms"] > 0
    assert site.supervisor.services[0].restarts == restarts + 1
    assert site.supervisor.workers[0].restarts == 0
