"""Two node servers with room for one model each, behind routers that place their models live.

Whatever is loaded, unloaded or fails meanwhile: each call gives the bytes of the same node in this
process.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client.client import Client
from maskserve_common.config_file import config_of
from maskserve_common.errors import MaskserveError
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_workflows.definition import Workflow
from maskserve_workflows.node_request import ModelSetup
from maskserve_workflows.nodes import enlarge, find, segment
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import dump_plan
from maskserve_workflows.wire import RECORD, NodeTask
from tests.fakes.pictures import encode, scene
from tests.support.eventually import eventually
from tests.support.workflows import run_one

pytestmark = pytest.mark.slow

NODES = ("find", "enlarge", "segment")
CALLERS, SIDE = 6, 256
BOX = (8.0, 8.0, 200.0, 180.0)
PLACED_S, ANSWER_S, WHOLE_S = 120.0, 200.0, 240.0
PICTURES = [encode(np.roll(scene(SIDE, SIDE), 20 * number, axis=1)) for number in range(CALLERS)]


def plan_of(node: str) -> bytes:
    with Workflow(node) as flow:
        image = flow.picture("image")
        if node == "find":
            flow.gives(made=find(image, "a star", threshold=0.5))
        elif node == "segment":
            flow.gives(made=segment(image, box=BOX).mask)
        else:
            flow.gives(made=enlarge(image))
    return dump_plan(compiled(flow.plan))


def expected_of(models: Path) -> dict[tuple[str, int], bytes]:
    """The output of each node for each picture."""
    from maskserve_engine.nodes.enlarge import EnlargeNodes
    from maskserve_engine.nodes.find import FindNodes
    from maskserve_engine.nodes.segment import SegmentNodes

    config = config_of({"model": {"device": "cpu", "torch_threads": 1}})
    setups = {name: ModelSetup(str(models / name), config) for name in NODES}
    node_calls: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
        "find": (FindNodes(setups["find"]), "mask", {"name": "a star"}, {"threshold": 0.5}),
        "enlarge": (EnlargeNodes(setups["enlarge"]), "picture", {}, {}),
        "segment": (SegmentNodes(setups["segment"]), "mask", {}, {"points": (), "box": BOX}),
    }
    return {
        (name, number): run_one(nodes, name, {"picture": picture, **inputs}, settings)[output]
        for name, (nodes, output, inputs, settings) in node_calls.items()
        for number, picture in enumerate(PICTURES)
    }


def node_states(address: str, **settings: Any) -> dict[str, str]:
    """State by model of a node server, which may be told what it is to have."""
    task = msgspec.json.encode(NodeTask(RECORD, (), settings))
    inputs = [
        grpcclient.InferInput(name, [size], "BYTES") for name, size in (("TASK", 1), ("VALUES", 0))
    ]
    inputs[0].set_data_from_numpy(np.array([task], np.object_))
    inputs[1].set_data_from_numpy(np.array([], np.object_))
    with grpcclient.InferenceServerClient(address) as client:
        answer = client.infer("nodes", inputs)
    record = msgspec.json.decode(answer.as_numpy("RESULT")[0])
    loaded_bytes = sum(
        model["bytes"] for model in record["models"] if model["state"] in ("ready", "loading")
    )
    assert loaded_bytes <= record["device_bytes"]
    return {model["name"]: model["state"] for model in record["models"]}


class Site:
    """Server `any` has room for any one model, `small` for all but `segment`."""

    def __init__(self, models: Path, plans: Path, servers: dict[str, Supervisor]) -> None:
        self.models, self.plans, self.servers = models, plans, servers
        self.expected = expected_of(models)

    def address(self, server: str) -> str:
        return f"127.0.0.1:{self.servers[server].services[0].ports.grpc}"

    def states(self, server: str) -> dict[str, str]:
        return node_states(self.address(server))

    def lies(self, node: str, server: str) -> bool:
        return self.states(server)[node] == "ready"

    def lay(self, **lying: str) -> None:
        """Have a server have this model loaded, and others none."""
        for server in self.servers:
            expected_nodes = {lying[server]} if server in lying else set()
            address = self.address(server)

            def lies(address: str = address, expected_nodes: set[str] = expected_nodes) -> bool:
                states = node_states(address, placed=sorted(expected_nodes))
                return {name for name in NODES if states[name] == "ready"} == expected_nodes

            eventually(f"{server} has {expected_nodes}", lies, timeout_s=60)

    def kill(self, server: str) -> None:
        process: Any = self.servers[server].services[0]
        os.kill(process.pid, signal.SIGKILL)

    def whole(self) -> bool:
        try:
            return all(map(self.states, self.servers))
        except Exception:
            return False


class Calls:
    """Callers of one node, each with a picture of its own, that call until they are to stop."""

    def __init__(self, site: Site, router: RouterSite, node: str) -> None:
        self._site, self._url, self._node = site, router.grpc_url, node
        self.servers: list[str] = []
        """Who made each answer."""
        self.wrong: list[int] = []
        self.failed: list[str] = []
        self.stops = threading.Event()

    def once(self, number: int = 0) -> None:
        with Client(self._url) as client:
            inputs = {"image": PICTURES[number]}
            try:
                outputs, meta = client.run_workflow(self._node, inputs, timeout=ANSWER_S)
            except MaskserveError as error:
                self.failed.append(str(error))
                return
        if outputs["made"] != self._site.expected[self._node, number]:
            self.wrong.append(number)
        self.servers.append(next(node["server"] for node in meta["nodes"]))

    def again(self, number: int) -> None:
        while not self.stops.is_set():
            self.once(number)

    def check(self) -> None:
        assert (self.wrong, self.failed) == ([], [])
        assert self.servers


@contextmanager
def calling(site: Site, router: RouterSite, node: str) -> Iterator[Calls]:
    """Calls under way; behind it each was answered, and rightly."""
    calls = Calls(site, router, node)
    threads = [threading.Thread(target=calls.again, args=(n,)) for n in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        calls.stops.set()
        for thread in threads:
            thread.join()
    calls.check()


def once(site: Site, router: RouterSite, node: str) -> None:
    calls = Calls(site, router, node)
    calls.once()
    calls.check()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from tests.fakes.tiny_nodes import build_enlarge, build_find, build_segment

    folder = tmp_path_factory.mktemp("placement")
    models, plans = folder / "models", folder / "plans"
    plans.mkdir()
    build = {"find": build_find, "enlarge": build_enlarge, "segment": build_segment}
    sizes = {}
    for name in NODES:
        build[name](models / name)
        (plans / f"{name}.json").write_bytes(plan_of(name))
        sizes[name] = sum(file.stat().st_size for file in (models / name).glob("*.safetensors"))
    single_bytes = max(sizes["find"], sizes["enlarge"])
    assert single_bytes < sizes["segment"] < sizes["find"] + sizes["enlarge"]
    servers = {}
    with ExitStack() as stack:
        for name, room in (("any", sizes["segment"]), ("small", single_bytes)):
            server_folder = folder / name
            shutil.copytree(models, server_folder)
            tables = "".join(
                f'{node_name} = "{server_folder / node_name}"\n' for node_name in NODES
            )
            config = folder / f"{name}.toml"
            config.write_text(
                '[model]\ndevice = "cpu"\ntorch_threads = 1\n'
                f'[nodes]\nload = "use"\ndevice_bytes = {room}\n{tables}'
            )
            options = ServeOptions(
                workers=0, nodes=config, base_port=free_base_port(), log_dir=folder / f"logs-{name}"
            )
            servers[name] = stack.enter_context(Supervisor(options))
        yield Site(models, plans, servers)


@pytest.fixture(autouse=True)
def whole(site: Site) -> None:
    """Both serve, and have nothing loaded."""
    eventually("both serve", site.whole, timeout_s=WHOLE_S)
    site.lay()


@contextmanager
def routing(site: Site, folder: Path) -> Iterator[RouterSite]:
    """A router that keeps no answers: each call is a call. It has looked at the servers once."""
    nodes = [site.address(server) for server in site.servers]
    workflows: dict[str, object] = {"folder": str(site.plans), "nodes": nodes, "kept_bytes": 0}
    folder.mkdir()
    with RouterSite([], folder, {"workflows": workflows}, ready=False) as running:
        metric = b'maskserve_node_servers_busy{model="find"}'
        eventually("it has looked", lambda: metric in running.read("/metrics"), timeout_s=60)
        yield running


def test_what_is_asked_for_is_loaded_live_where_an_idle_one_lay(site: Site, tmp_path: Path) -> None:
    site.lay(any="enlarge", small="find")
    with (
        routing(site, tmp_path / "router") as router,
        calling(site, router, "enlarge") as calls,
        Client(router.grpc_url) as client,
    ):
        eventually("it lies on both", lambda: site.lies("enlarge", "small"), timeout_s=PLACED_S)
        assert not site.lies("find", "small")
        answered = len(calls.servers)
        eventually("both answer", lambda: len(set(calls.servers[answered:])) == 2, timeout_s=60)
        assert client.control("status")["wanted"]["nodes"] >= 2
        once(site, router, "find")  # what made room is there again for whoever asks


@contextmanager
def damaged(weights: Path) -> Iterator[None]:
    """A file that is shorter than it says."""
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-64])
    try:
        yield
    finally:
        weights.write_bytes(whole)


@pytest.mark.parametrize("trigger", ["by a call", "by the router"])
def test_a_load_that_fails_costs_no_call(site: Site, tmp_path: Path, trigger: str) -> None:
    """A copy of the model is damaged. The server gets the call again if no other can do it."""
    [weights] = (site.models.parent / "small" / "enlarge").glob("*.safetensors")
    called = trigger == "by a call"
    site.lay(**({"any": "segment"} if called else {"any": "enlarge", "small": "find"}))
    with routing(site, tmp_path / "router") as router:
        with damaged(weights), calling(site, router, "enlarge") as calls:
            failed = "it was tried, and failed"
            eventually(
                failed, lambda: site.states("small")["enlarge"] == "failed", timeout_s=PLACED_S
            )
            answered = len(calls.servers)
            eventually("calls go on", lambda: len(calls.servers) > answered + CALLERS, timeout_s=60)
        if called:
            site.lay(small="enlarge")
            return
        with calling(site, router, "enlarge"):
            site.kill("any")
            loaded = "the other has loaded it"
            eventually(loaded, lambda: site.lies("enlarge", "small"), timeout_s=60)


def test_what_is_too_large_for_a_server_is_done_by_the_other(site: Site, tmp_path: Path) -> None:
    with (
        routing(site, tmp_path / "router") as router,
        calling(site, router, "segment") as calls,
    ):
        eventually("calls are answered", lambda: len(calls.servers) > CALLERS, timeout_s=60)
        site.kill("any")  # they wait until it is back
    assert site.states("small")["segment"] == "absent"


def test_loads_at_once_and_unloads_under_load_harm_no_answer(site: Site, tmp_path: Path) -> None:
    """Two routers with calls of all models, while a third has servers let go what they have."""
    with (
        routing(site, tmp_path / "one") as first_router,
        routing(site, tmp_path / "other") as second_router,
        calling(site, first_router, "find") as find_calls,
        calling(site, first_router, "enlarge") as enlarged,
        calling(site, second_router, "segment") as cut,
        calling(site, second_router, "enlarge") as also,
    ):
        for _ in range(40):
            for server in site.servers:
                node_states(site.address(server), placed=[])
        all_calls = (find_calls, enlarged, cut, also)
        eventually(
            "all go on",
            lambda: min(len(x.servers) for x in all_calls) > CALLERS,
            timeout_s=PLACED_S,
        )
