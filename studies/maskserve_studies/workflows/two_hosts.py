"""Time to pass 8 MiB from one node to the next, and edits with a ControlNet service: with both ends
on one host, and with a link between them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.timing import rates_in_turn
from maskserve_client.client import Client
from maskserve_common.config import ValuesConfig
from maskserve_common.files.values import Values
from maskserve_common.imaging.images import as_file, encode_png
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.key_holder import KeyHolder
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.workflows.run_values import RunValues
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import Ports, free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_studies.workflows.second_host import SecondHost
from maskserve_workflows.plan import NodeCall
from maskserve_workflows.run import Task

_SMALL, _PADDED = 648, 512
"""Sides of a picture of 1 MiB, and the padding on each side that makes it 8 MiB."""
_SIDE: Final = _SMALL + 2 * _PADDED
_CLIENT: Final = KeyHolder("bench", 64, admin=True)
_HOST_PAIRS: Final = (("here", "here"), ("here", "there"), ("there", "here"), ("there", "there"))
"""Hosts of the node that makes the value and of the node that reads it, seen from the router."""
_BASE_PORT: Final = 9000
_CONTROLS_PORT: Final = 9020
_CONTROLNETS: Final = CHECKOUT / "assets" / "controlnets"
_AT_ONCE, _OF_A_ROUND = 8, 32
"""Edits in flight, and edits of a round."""


def two_hosts(
    local_server: str, folder: Path, other: SecondHost, files_folder: Path, rounds: int
) -> dict[str, Any]:
    """Milliseconds that a link adds: medians of each way, in turn. `pad` makes 8 MiB out of 1 MiB
    of noise, which its host gets in any case, and `crop` reads them.

    Args:
        local_server: address of a node server of this host.
        folder: of the values that it shares with its router.
        other: serves nothing yet.
        files_folder: folder for its files.
        rounds: of each way.

    Raises:
        AssertionError: the ways give different pictures.
    """
    (files_folder / "nodes.toml").write_text('[model]\ndevice = "cpu"\n')
    files = [
        "--nodes",
        str(files_folder / "nodes.toml"),
        "--log-dir",
        str(files_folder / "logs-there"),
    ]
    other.serve(["--workers", "0", "--base-port", str(_BASE_PORT), *files], folder=files_folder)
    addresses = {"here": local_server, "there": f"{other.remote_address}:{_BASE_PORT + 8}"}
    return asyncio.run(_measured(addresses, Values(ValuesConfig(str(folder))), rounds))


async def _measured(addresses: dict[str, str], values: Values, rounds: int) -> dict[str, Any]:
    pools = {
        host: NodePool(WorkflowFiles(nodes=(item,), kept_bytes=0), FairShare(2), values=values)
        for host, item in addresses.items()
    }
    rng, seconds = np.random.default_rng(), {host_pair: list[float]() for host_pair in _HOST_PAIRS}
    white = np.zeros((_SIDE, _SIDE), np.uint8)
    white[800:840, 800:840] = 255
    mask = encode_png(white)
    with ExitStack() as exit_stack:
        for _ in range(rounds + 1):  # the first one warms
            picture = encode_png(rng.integers(0, 256, (_SMALL, _SMALL, 3), np.uint8))
            cuts = set()
            for host_pair in _HOST_PAIRS:
                files = RunValues(values, _CLIENT.scope)
                exit_stack.callback(files.end)
                begin = time.perf_counter()
                maker, reader = host_pair
                cut = await _two(pools[maker], pools[reader], picture, mask, files)
                seconds[host_pair].append(round(time.perf_counter() - begin, 4))
                cuts.add(as_file(files.read(cut)["picture"]))
                files.end()
            assert len(cuts) == 1
    for pool in pools.values():
        await pool.close()
    medians_ms = {
        host_pair: 1e3 * statistics.median(item[1:]) for host_pair, item in seconds.items()
    }
    one_host = medians_ms[_HOST_PAIRS[0]]
    added = {host_pair: round(medians_ms[host_pair] - one_host, 1) for host_pair in _HOST_PAIRS[1:]}
    return {
        "two_hosts_added_ms": max(added[_HOST_PAIRS[1]], added[_HOST_PAIRS[2]]),
        **{f"two_hosts_{maker}_to_{reader}_ms": ms for (maker, reader), ms in added.items()},
        "two_hosts_one_host_ms": round(one_host, 1),
        "seconds_two_hosts": {" to ".join(host_pair): item for host_pair, item in seconds.items()},
    }


async def _two(
    maker: NodePool, reader: NodePool, picture: bytes, mask: bytes, files: RunValues
) -> dict[str, Any]:
    """The second node's outputs. Between the nodes, the router's work in a run is done."""
    sides = dict.fromkeys(("left", "top", "right", "bottom"), _PADDED)
    pad = Task("pad", NodeCall("pad", "pad", settings=sides), {"picture": picture})
    padded = files.store_bytes((await maker.call(pad, _CLIENT, run=files.run)).outputs)
    inputs = {"picture": padded["picture"], "mask": mask}
    cut = Task("crop", NodeCall("crop", "crop"), inputs)
    return files.store_bytes((await reader.call(cut, _CLIENT, run=files.run)).outputs)


def two_hosts_control(other: SecondHost, files_folder: Path, rounds: int) -> dict[str, Any]:
    """Edits per second of a worker whose ControlNet runs on the other host, over those of a worker
    with a service on its own host. Medians; both always run and take turns. All compute with one
    thread.

    Args:
        other: serves on other ports, or nothing.
        files_folder: folder for the files of both.
        rounds: of each side.
    """
    service = f"{other.remote_address}:{Ports.of_service(_CONTROLS_PORT).grpc}"
    for name, controls in (("one", ""), ("two", f'[controls]\nservice = "{service}"\n')):
        (files_folder / f"{name}.toml").write_text(f"[model]\ntorch_threads = 1\n{controls}")
    nets = ["--controlnets", str(_CONTROLNETS), "--service", "controlnet@cpu"]
    files = [
        "--config",
        str(files_folder / "one.toml"),
        "--log-dir",
        str(files_folder / "logs-controls"),
    ]
    served = ["--workers", "0", "--model", str(DEMO_MODEL), "--base-port", str(_CONTROLS_PORT)]
    other.serve([*served, *nets, *files], folder=files_folder)
    with ExitStack() as exit_stack:
        sides = {}
        for name, services in (("one", ("controlnet@cpu",)), ("two", ())):
            options = ServeOptions(
                model=str(DEMO_MODEL),
                config=files_folder / f"{name}.toml",
                controlnets=str(_CONTROLNETS),
                services=services,
                base_port=free_base_port(),
                log_dir=files_folder / f"logs-{name}",
            )
            supervisor = exit_stack.enter_context(Supervisor(options))
            sides[name] = supervisor.workers[0].grpc_url
            _edits_s(sides[name], _AT_ONCE)  # warms
        rates = rates_in_turn(sides, lambda side: _edits_s(side, _OF_A_ROUND), rounds)
    medians_ms = {name: statistics.median(samples) for name, samples in rates.items()}
    return {
        "two_hosts_control_ratio": round(medians_ms["two"] / medians_ms["one"], 3),
        "seconds_two_hosts_control_edits_s": rates,
    }


def _edits_s(url: str, count: int) -> float:
    """Edits per second of `count` edits, each with a ControlNet and a new picture."""
    begin = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda rng: _controlled(url, rng), np.random.default_rng().spawn(count)))
    return count / (time.monotonic() - begin)


def _controlled(url: str, rng: np.random.Generator) -> None:
    mask = np.zeros((128, 128), np.uint8)
    mask[32:80, 40:96] = 255
    picture, outline = (encode_png(rng.integers(0, 256, (128, 128, 3), np.uint8)) for _ in range(2))
    with Client(url) as client:
        client.edit(
            picture, encode_png(mask), "a red star", control=[outline],
            controls=[{"name": "outline"}], timeout=600,
        )  # fmt: skip
