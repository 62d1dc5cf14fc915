"""Two hosts: a worker and a node server here, and a worker, a node server and a ControlNet service
at the other end of a link, which share no folder. Runs of workflows give what they give on one
host, and edits whose ControlNets run there what they give with these beside their base; also where
the link is slow or cut, where that host dies, and where values find no room or are lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskserve_benchmarks.router_site import RouterSite
from maskserve_client.client import Client
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_studies.workflows.second_host import SecondHost, can_make_second_host, second_host
from maskserve_triton.controlnet_calls import ControlNetCalls
from maskserve_triton.loop_thread import LoopThread
from maskserve_workflows.definition import Workflow, each
from maskserve_workflows.nodes import best, edit, enlarge, outline, shows
from maskserve_workflows.passes import compiled
from maskserve_workflows.plan import dump_plan
from tests.fakes.pictures import encode, scene
from tests.support.draws import fresh_seed
from tests.support.eventually import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_second_host(), reason="needs root and iproute2"),
]

SIDE, STEPS, MOST_STEPS, BASE = 64, 400, 1000, 9000
WORKER, NODES, CONTROLS = BASE + 1, BASE + 18, BASE + 25
"""Ports of the other host."""
WHOLE_S, ANSWER_S = 240.0, 400.0
ROOM = "8m"
"""Size of the memory in which values lie."""
_OF_FOLDER = {".host", ".lock", ".new", ".open", ".owners", ".sums", "filled", "results"}
"""Paths in the folder of values that stay."""
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[8:40, 16:56] = 255

with Workflow("both", "The better of two edits, enlarged.") as flow:
    image, mask = flow.picture("image"), flow.mask("mask")
    rims = outline(image)
    with each(2) as one:
        painted = edit(rims, mask, "a red star")
        pictures = one.all(painted)
        verdicts = one.all(shows(painted, mask, "a red star", enough=1.0))
    flow.gives(image=enlarge(best(pictures, verdicts).picture), rims=rims)


@dataclass
class Site:
    """Both hosts, and routers of this one."""

    local_host: Supervisor
    remote_host: SecondHost
    serve_there: Callable[[], None]
    values: Path
    routers: dict[str, RouterSite]
    """`one` knows this host alone, and shares no files; `two` knows both; `far` has edits made on
    both and nodes run there."""

    def at(self, port: int) -> str:
        """An address on the other host."""
        return f"{self.remote_host.remote_address}:{port}"

    def run(self, router: str, seed: int) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Outputs and META of a run whose picture nobody has sent before."""
        picture = np.roll(scene(SIDE, SIDE), seed % SIDE, axis=1) ^ np.uint8(seed % 251)
        inputs = {"image": encode(picture), "mask": encode(MASK)}
        with Client(self.routers[router].grpc_url) as client:
            return client.run_workflow(
                "both",
                inputs,
                seed=seed,
                num_inference_steps=STEPS,
                reproducible=True,
                cache="off",
                timeout=ANSWER_S,
            )

    def names(self) -> set[str]:
        """Paths of all values and of who uses them; routers keep no answers, but could."""
        paths = {str(path.relative_to(self.values)) for path in self.values.rglob("*")}
        could = (".open/unscoped-kept", "results/")
        return {path for path in paths - _OF_FOLDER if not path.startswith(could)}

    def lose(self) -> int:
        """Remove all values that lie there now; how many."""
        files = [path for path in self.values.iterdir() if len(path.name) == 64]
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def up(self) -> bool:
        """Whether routers see both workers and node servers."""
        statuses = [status(self.routers[name].grpc_url) for name in ("two", "far")]
        workers = [worker for record in statuses for worker in record["workers"].values()]
        nodes = [server for record in statuses for server in record["nodes"].values()]
        return all(x["up"] and x["state"] == "ready" for x in workers) and all(nodes)


def build_net(folder: Path) -> None:
    """A random ControlNet, made in another process: it needs no torch in this one."""
    build = "import sys; from tests.fakes.control_nets import random_net;"
    build += "random_net(11, 1, 1).save_pretrained(sys.argv[1])"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=root, check=True)


def status(url: str) -> dict[str, Any]:
    with Client(url) as client:
        return client.control("status")


@pytest.fixture(scope="module")
def other() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host
    for arguments in (["netns", "list"], ["-o", "link", "show"]):
        output = subprocess.run(
            ["ip", *arguments], check=True, capture_output=True, text=True
        ).stdout
        assert not re.search(rf"\b{host.name}\b", output)


@pytest.fixture(scope="module")
def site(
    model: Path, other: SecondHost, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    from tests.fakes.tiny_nodes import build_enlarge, build_find

    folder = tmp_path_factory.mktemp("two-hosts")
    build_find(folder / "find")
    build_enlarge(folder / "big")
    plan = compiled(flow.plan)
    (folder / "plans").mkdir()
    (folder / "plans" / "both.json").write_bytes(dump_plan(plan))
    values = folder / "values"
    values.mkdir()
    threads = "torch_threads = 1\n"  # bits depend on it
    limits = f"[limits]\nmax_steps = {MOST_STEPS}\n"
    of_nodes = f'[model]\ndevice = "cpu"\n{threads}[nodes]\nfind = "{folder / "find"}"\n'
    of_nodes += f'enlarge = "{folder / "big"}"\n'
    shared = f'[values]\nfolder = "{values}"\nleast_bytes = 1\n'
    served = f'[controls]\nservice = "{other.remote_address}:{CONTROLS}"\nservice_timeout_s = 2.0\n'
    build_net(folder / "nets" / "plain")
    # With times of its own, as hosts have.
    shutil.copytree(folder / "nets", folder / "nets-there", copy_function=shutil.copyfile)
    for name, text in {
        "here.toml": f"[model]\n{threads}{limits}{shared}{served}",
        "here-nodes.toml": of_nodes + shared,
        "there.toml": f"[model]\n{threads}{limits}",
        "there-nodes.toml": of_nodes,
    }.items():
        (folder / name).write_text(text)
    base = free_base_port()
    supervisor = Supervisor(
        ServeOptions(
            model=str(model), name="here", config=folder / "here.toml", entries=None,
            nodes=folder / "here-nodes.toml", base_port=base, log_dir=folder / "logs",
            controlnets=str(folder / "nets"),
        )
    )  # fmt: skip
    disk, leftover_files = folder / "disk", list[Path]()
    disk.mkdir()
    logs = ["--log-dir", str(folder / "logs-there")]
    edits_there = ["--model", str(model), "--config", str(folder / "there.toml")]
    edits_there += ["--controlnets", str(folder / "nets-there"), *logs]
    worker_there = ["--name", "there", "--base-port", str(BASE), "--entries", "", *edits_there]
    controls_there = ["--workers", "0", "--service", "controlnet@cpu", *edits_there]
    controls_there += ["--base-port", str(BASE + 20)]
    nodes_there = ["--nodes", str(folder / "there-nodes.toml"), "--workers", "0", *logs]
    nodes_there += ["--base-port", str(BASE + 10)]
    with contextlib.ExitStack() as stack:
        mounted(values, stack)
        stack.callback(lambda: leftover_files.extend(values.glob(".open/*")))
        stack.callback(other.end)

        def serve_there() -> None:
            other.serve(worker_there, nodes_there, controls_there, folder=disk)

        serve_there()
        stack.enter_context(supervisor)
        worker, nodes = (
            supervisor.workers[0].grpc_url,
            f"127.0.0.1:{supervisor.services[0].ports.grpc}",
        )
        files: dict[str, object] = {"folder": str(values), "least_bytes": 1}
        routers = {}
        remote_worker, remote_nodes = (f"{other.remote_address}:{port}" for port in (WORKER, NODES))
        for name, workers, servers, by_name in (
            ("one", [worker], [nodes], {}),
            ("two", [worker, remote_worker], [nodes, remote_nodes], files),
            ("far", [worker, remote_worker], [remote_nodes], files),
        ):
            router_folder = folder / name
            router_folder.mkdir()
            tables: dict[str, dict[str, object]] = {
                "workflows": {"folder": str(folder / "plans"), "nodes": servers, "kept_bytes": 0},
                "values": by_name,
                "routing": {"policy": "round_robin"},
            }
            routers[name] = stack.enter_context(RouterSite(workers, router_folder, tables))
        yield Site(supervisor, other, serve_there, values, routers)
        assert supervisor.workers[0].restarts == 0
    assert not leftover_files


def mounted(folder: Path, stack: contextlib.ExitStack) -> None:
    """Memory of so much room, in which the values of this host lie."""
    options = ["-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs"]
    subprocess.run(["mount", *options, str(folder)], check=True)
    stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    """The link is whole and both hosts serve before each test, and after it no value is left."""
    eventually("both hosts serve", site.up, timeout_s=WHOLE_S)
    yield
    site.remote_host.whole()
    eventually("both hosts serve", site.up, timeout_s=WHOLE_S)
    eventually("no value is left", lambda: not site.names(), timeout_s=30)
    folder = str(site.values).encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command_line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:400]
            eventually(
                f"no value is mapped by {command_line}",
                lambda maps=process / "maps": folder not in maps.read_bytes(),
            )
    assert not list(site.remote_host.memory.glob("*/values"))  # nothing is put there


def a_seed() -> int:
    return fresh_seed()


def hosts_of(meta: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Workers and node servers that a run was at."""
    workers = {node["worker"] for node in meta["nodes"] if "worker" in node}
    return workers, {node["server"] for node in meta["nodes"] if "server" in node}


@pytest.mark.parametrize("router", ["two", "far"])
def test_a_run_over_two_hosts_gives_the_bytes_of_one(site: Site, router: str) -> None:
    seed = a_seed()
    expected, _ = site.run("one", seed)
    output, meta = site.run(router, seed)
    assert output == expected
    workers, servers = hosts_of(meta)
    assert workers == {"here-0", "there-0"}
    assert router == "two" or servers == {site.at(NODES)}
    assert meta["values"]["count"] > 0


def away(site: Site, how: str) -> Callable[[], None]:
    """Harms the other host; returns what makes it whole."""
    if how == "killed":
        site.remote_host.kill()
        return site.serve_there
    getattr(site.remote_host, how)()
    return site.remote_host.whole


@contextlib.contextmanager
def running(site: Site, router: str, seed: int) -> Iterator[Any]:
    """A run whose edits run on both hosts, as a future."""
    urls = (site.local_host.workers[0].grpc_url, site.at(WORKER))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # one may be over before it was seen
            future = pool.submit(site.run, router, seed)
            eventually(
                "edits run on both hosts",
                lambda future=future: future.done() or all(status(url)["running"] for url in urls),
                timeout_s=60,
            )
            if not future.done():
                break
        assert not future.done()
        yield future


@pytest.mark.parametrize("how", ["cut", "deaf", "mute", "killed"])
@pytest.mark.parametrize(("router", "gone_s"), [("two", None), ("far", 3.0)])
def test_a_run_outlives_a_host_that_is_gone(
    site: Site, router: str, gone_s: float | None, how: str
) -> None:
    """The router's host has all values: what is lost is what the other was just doing. It goes on
    without it, unless that one alone runs its nodes: then it waits for it.
    """
    seed = a_seed()
    expected, _ = site.run("one", seed)
    with running(site, router, seed) as future:
        whole = away(site, how)
        if gone_s is not None:
            threading.Timer(gone_s, whole).start()
        output, meta = future.result()
    if gone_s is None:
        whole()
    assert output == expected
    workers, servers = hosts_of(meta)
    assert "here-0" in workers
    assert router == "two" or servers == {site.at(NODES)}


def test_over_a_slow_link_a_run_gives_the_same(site: Site) -> None:
    seed = a_seed()
    expected, _ = site.run("one", seed)
    site.remote_host.slow(mbit=1)
    output, meta = site.run("far", seed)
    assert output == expected
    assert hosts_of(meta)[1] == {site.at(NODES)}


@pytest.mark.parametrize("router", ["two", "far"])
def test_values_that_find_no_room_pass_as_bytes(site: Site, router: str) -> None:
    seed = a_seed()
    expected, _ = site.run("one", seed)
    filled = site.values / "filled"
    with filled.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(site.values).free)
    output, meta = site.run(router, seed)
    filled.unlink()
    assert output == expected
    assert meta["values"]["count"] == 0


@pytest.mark.parametrize("router", ["two", "far"])
def test_values_that_expire_under_their_readers_are_made_again(site: Site, router: str) -> None:
    seed = a_seed()
    expected, _ = site.run("one", seed)
    with running(site, router, seed) as future:
        lost = site.lose()
        while not future.done():
            time.sleep(0.2)
            lost += site.lose()
            if lost > 3:
                break
        output, _ = future.result()
    assert output == expected
    assert lost


def test_the_name_of_a_value_means_nothing_on_the_other_host(site: Site) -> None:
    """Nor to another key on this one: tests/triton/test_nodes.py."""
    with running(site, "two", a_seed()) as future:
        name = next(path for path in site.values.iterdir() if len(path.name) == 64)
        reference = b"value:%s:%d" % (name.name.encode(), name.stat().st_size)
        with Client(site.at(WORKER)) as client, pytest.raises(MaskserveError, match=r"IMAGE|value"):
            client.edit(reference, encode(MASK), "a red star", seed=1, num_inference_steps=1)
        future.result()


# Edits whose ControlNets run on the other host


def controlled(url: str, **options: Any) -> tuple[bytes, dict[str, Any]]:
    """Picture and META of an edit with a ControlNet."""
    picture = np.random.default_rng(5).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    control = {"control": [encode(picture)], "controls": [{"name": "plain", "scale": 0.8}]}
    return plain(url, **control, **options)


def plain(url: str, **options: Any) -> tuple[bytes, dict[str, Any]]:
    settings = {"num_inference_steps": 8, "cache": "off", "seed": 1, "timeout": 120, **options}
    with Client(url) as client:
        answer = client.edit(encode(scene(SIDE, SIDE)), encode(MASK), "a red star", **settings)
    return answer.encoded, answer.meta


def controlled_again(url: str) -> bytes:
    """Once the service is there again."""
    images = list[bytes]()

    def answered() -> bool:
        try:
            images.append(controlled(url)[0])
        except MaskserveError as error:
            if "ControlNet service" not in str(error):
                raise
        return bool(images)

    eventually("the service is found again", answered, timeout_s=WHOLE_S)
    return images[0]


def nothing_is_left_of_rows(site: Site) -> None:
    loop = LoopThread("calls")
    calls = ControlNetCalls(loop, site.at(CONTROLS))
    eventually(
        "the service has let go of what is over",
        lambda: calls.call({"op": "health"}, b"", 5.0) == {"sessions": 1, "rows": 0, "nets": 1},
        timeout_s=WHOLE_S,  # a session whose denoiser has not heard of it stays for a minute
    )
    calls.close()
    loop.close()
    assert not [*site.remote_host.memory.rglob("*.ask"), *site.remote_host.memory.rglob("*.answer")]


@pytest.mark.parametrize("cache", ["off", "own"])
def test_residuals_of_the_other_host_give_the_bytes_of_nets_beside_the_base(
    site: Site, cache: str
) -> None:
    url = site.local_host.workers[0].grpc_url
    expected, _ = controlled(site.at(WORKER), cache=cache)
    image, meta = controlled(url, cache=cache)
    assert image == expected
    assert meta["controls_stalled_ms"] > 0
    assert plain(url, cache=cache)[0] != expected
    nothing_is_left_of_rows(site)


def test_over_a_slow_link_edits_are_the_same_bytes(site: Site) -> None:
    """Also those that add what was said one step ahead: which that is says no link."""
    url = site.local_host.workers[0].grpc_url
    expected, ahead = controlled(url)[0], controlled(url, adapters="fast")[0]
    site.remote_host.slow(mbit=4)
    assert controlled(url)[0] == expected != ahead
    image, meta = controlled(url, adapters="fast")
    assert image == ahead
    assert meta["controls_stale_steps"] == 7
    nothing_is_left_of_rows(site)


@pytest.mark.parametrize("how", ["cut", "deaf", "mute", "killed"])
def test_a_service_that_is_gone_fails_its_edits_in_words_and_is_found_again(
    site: Site, how: str
) -> None:
    """Edits beside them go on, and so do those that come while it is away."""
    url = site.local_host.workers[0].grpc_url
    expected, plain_image = controlled(url)[0], plain(url)[0]
    with ThreadPoolExecutor(3) as pool:
        hurt = [pool.submit(controlled, url, num_inference_steps=MOST_STEPS) for _ in range(2)]
        eventually("both run", lambda: len(status(url)["running"]) == 2, timeout_s=60)
        whole = away(site, how)
        plain_future = pool.submit(plain, url)
        for future in hurt:
            error = future.exception(ANSWER_S)
            assert isinstance(error, EngineFailed | Overloaded), error
            assert "ControlNet service" in str(error)
        plain_future.result(ANSWER_S)
    with pytest.raises(MaskserveError, match="ControlNet service"):
        controlled(url)
    assert plain(url)[0] == plain_image
    whole()
    assert controlled_again(url) == expected
    nothing_is_left_of_rows(site)
