"""Real Tritons for the tests of this folder, on free ports: one for each model, which files share.

Tests that harm their worker, or need one of another configuration, have their own. Most ask that of
a tiny random model: what is tested here is the serving, and a step of it takes milliseconds.
MASKSERVE_E2E_MODEL names another model folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from maskserve_common.config import cores
from maskserve_serving.files import folders_of
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import check_free, free_base_port
from maskserve_serving.shm_cleanup import SHARED_MEMORY, region_prefix
from maskserve_serving.supervisor import Supervisor
from maskserve_serving.worker import WorkerProcess
from maskserve_workflows.plan import dump_plan
from tests.fakes.collector import Collector, collector
from tests.fakes.control_nets import made_nets
from tests.support.calls import Grpc, Http
from tests.support.clone import Clone, serving_clone
from tests.support.one_worker import one_worker
from tests.support.plain_triton import PlainWorker, plain_triton
from tests.support.workflows import drawn_plans, plans_of_every_kind

BY_NAME = "[values]\nleast_bytes = 1\n"
"""Every picture and mask of a workflow lies in a file, however small."""

GROUPS = {
    "two workers": ("pair",),
    "a plain Triton": ("plain_worker",),
    "the demo": ("demo",),
    "other models": ("unet_worker", "klein_worker"),
    "one worker": ("worker", "grpc"),
}
"""Fixtures of servers that files share, and that would start anew in each process. A file is of the
first group of which it has one.
"""


class ByServer(LoadFileScheduling):
    """A file keeps to one process, and so do all that share such a server: xdist's own groups do
    nothing with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        text = (Path(__file__).parent / Path(file).name).read_text("utf-8")
        fixture_names = set(re.findall(r"\b(\w+): ", text))
        return next(
            (group for group, of in GROUPS.items() if not fixture_names.isdisjoint(of)), file
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer | None:
    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Entries on disk are shared by all servers of a user, and jobs by routers of one port: those
    of other tests that run beside these, and the user's own, stay out of it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the served model, made in another process: it needs no torch in this one."""
    named = os.environ.get("MASKSERVE_E2E_MODEL")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("models") / "tiny-fill"
    build = "import sys, pathlib; from tests.fakes.tiny_model import build_tiny_model;"
    build += "build_tiny_model(pathlib.Path(sys.argv[1]))"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=root, check=True)
    return folder


@pytest.fixture(scope="session")
def trace_collector() -> Iterator[Collector]:
    """Receives the traces that clients ask for."""
    with collector() as running:
        yield running


@pytest.fixture(scope="session")
def supervisor(
    model: Path, trace_collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervisor]:
    """Runs a worker that traces only edits whose client asks for it."""
    logs = tmp_path_factory.mktemp("logs")
    config = tmp_path_factory.mktemp("config") / "worker.toml"
    config.write_text("[trace]\ninterval_s = 0.1\n")
    messages: list[str] = []
    options = ServeOptions(
        model=str(model),
        base_port=free_base_port(),
        config=config,
        log_dir=logs,
        otlp_url=trace_collector.url,
        trace_rate=10**9,
        report=messages.append,
    )
    running = Supervisor(options)
    running.start()
    try:
        yield running
        assert [worker.restarts for worker in running.workers] == [0], "\n".join(messages)
    finally:
        running.stop(grace_s=5)
        log_copy = os.environ.get("MASKSERVE_E2E_LOGS")
        if log_copy:
            shutil.copytree(logs, log_copy, dirs_exist_ok=True)


@pytest.fixture(scope="session")
def worker(supervisor: Supervisor) -> WorkerProcess:
    return supervisor.workers[0]


@pytest.fixture(scope="session")
def unet_worker(
    tiny_unets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """Serves an SDXL base model, which has most features: sizes, a blend, two text encoders."""
    config = tmp_path_factory.mktemp("unet") / "worker.toml"
    config.write_text('[model]\noutside_noise = "edit"  # as the pipeline draws it\n')
    options = ServeOptions(
        config=config,
        model=str(tiny_unets["sdxl-base"]),
        name="unet",
        base_port=free_base_port(),
        log_dir=tmp_path_factory.mktemp("unet-logs"),
    )
    with one_worker(options) as worker:
        yield worker


@pytest.fixture(scope="session")
def klein_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Serves a FLUX.2 klein whose references have rows of their own."""
    from tests.fakes.tiny_flux2 import build_tiny_flux2

    folder = tmp_path_factory.mktemp("klein")
    config = folder / "worker.toml"
    config.write_text('[model]\noutside_noise = "edit"  # as the pipeline draws it\n')
    options = ServeOptions(
        config=config,
        model=str(build_tiny_flux2(folder / "klein-kv", exact=True)),
        name="klein",
        base_port=free_base_port(),
        log_dir=folder,
    )
    with one_worker(options) as worker:
        yield worker


@pytest.fixture(scope="session")
def plain_worker(
    tiny_inpaint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainWorker]:
    """Serves a model with inpainting semantics and ControlNets: `made_nets` and a `cut` one."""
    nets = tmp_path_factory.mktemp("nets")
    for name, net in made_nets().items():
        net.save_pretrained(nets / name)
    made_nets()["plain"].save_pretrained(nets / "cut")
    [weights] = (nets / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-64])
    tables, folder = f'[controls]\nfolder = "{nets}"\n', tmp_path_factory.mktemp("plain")
    with plain_triton(tiny_inpaint, tables, folder) as running:
        yield running


@pytest.fixture(scope="session")
def workflows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans, models of nodes, and a node server's configuration."""
    from tests.fakes.tiny_nodes import build_enlarge, build_find, build_segment_2

    folder = tmp_path_factory.mktemp("workflows")
    build_find(folder / "find")
    build_enlarge(folder / "big")
    build_segment_2(folder / "segment", films=True)
    (folder / "nodes.toml").write_text(
        f'[model]\ndevice = "cpu"\ntorch_threads = 1\n[nodes]\nfind = "{folder / "find"}"\n'
        f'enlarge = "{folder / "big"}"\nsegment = "{folder / "segment"}"\nload = "use"\n{BY_NAME}'
    )
    for plan in [*plans_of_every_kind(), *drawn_plans()]:
        (folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
    return folder


@pytest.fixture(scope="session")
def pair(
    model: Path, workflows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervisor]:
    """Two workers whose cached activations outlive them, and that have one encoder and decoder;
    nodes of workflows, and a router.
    """
    folder = tmp_path_factory.mktemp("pair")
    config, router_config = folder / "worker.toml", folder / "router.toml"
    # As many threads as a worker alone has: bits depend on it.
    config.write_text(
        f"[model]\ntorch_threads = {cores()}\n[stages]\nservice_timeout_s = 45.0\n{BY_NAME}"
    )
    router_config.write_text(BY_NAME)
    base = free_base_port(3)
    options = ServeOptions(
        model=str(model),
        workers=2,
        base_port=base,
        router=True,
        router_port=base + 20,
        services=("encoder,decoder@cpu",),
        nodes=workflows / "nodes.toml",
        workflows=workflows,
        config=config,
        router_config=router_config,
        entries=folder / "entries",
        log_dir=folder / "logs",
        report=print,
    )
    with Supervisor(options) as running:
        yield running
    specs = [worker.spec for worker in running.workers]
    for ports in (*(s.ports for s in specs), *(service.ports for service in running.services)):
        check_free("127.0.0.1", ports)
        assert list(SHARED_MEMORY.glob(region_prefix(ports.http) + "*")) == []
    assert not [folder for folder in folders_of([s.files for s in specs]) if folder.exists()]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """The demo model as the README serves it, with LoRAs, ControlNets, a router and nodes."""
    with serving_clone(tmp_path_factory.mktemp("clone")) as running:
        yield running


@pytest.fixture
def http(worker: WorkerProcess) -> Iterator[Http]:
    client = Http(worker.http_url, concurrency=32)
    yield client
    client.close()


@pytest.fixture
def grpc(worker: WorkerProcess) -> Iterator[Grpc]:
    client = Grpc(worker.grpc_url)
    yield client
    client.close()
