"""Measure workflows and scripts that call the same nodes, in turn on one server with the demo
model.

`rivals`: two workflows against scripts. `variants`: eight edits of a new picture; the script makes
its eight calls at once. `detail`: four regions of one picture; the script paints each region on the
last result. Both run with refresh steps (`[cache] own_anchors`, the default) and without
(`*_without_anchors`).
`added`: milliseconds that a run of three nodes on two servers takes beyond calls of the nodes
alone.
`shared`: five prompts for one picture and name at once: how often the name is searched and the
picture is encoded. Also memory and processes with three workflows at once, compared with one.
`verified`: edits with the LoRA `hollow`, three tries and the verifier `find`, judged by the demo's
own judge. The first tries are what a verifier that accepts everything would give.
`stages`: memory that two workers with a stage service save, as a share of one encoder's and one
decoder's processes. Also their edits per second, as a share of two workers with their own stages.
`replicas`: edits per second with two replicas of the stage service over those with one, where the
stages are the bottleneck; and edits that are lost or wrong while a replica is killed.
`monoliths`: memory and seconds of three workflows at once on one server, over those on three
servers with a workflow each (LegoDiffusion Fig. 4 left, Table 3).
`by-name`: 16 MiB from node to node by name, compared with the way through the caller.
`due`: plans with due times over eight emulated workers, compared with single edits and with the
simulator (`due_plans`). It takes 10 minutes with 300 plans of a seed.
`hosts`: time that a link adds to 8 MiB from node to node, and edits per second with a ControlNet at
its other end, as a share of those with a service on the same host. None if this process may not
make network namespaces.
`models`: `find` on held-out scenes, and `enlarge` compared with Lanczos on a photograph never seen.

    python scripts/bench workflows --json workflows.json
    python scripts/bench workflows --json workflows.json --only added models    # adds to the file
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from PIL import Image

from maskserve_benchmarks.checkout import CHECKOUT, DEMO_MODEL
from maskserve_benchmarks.demo_model.scenes import Picture, draw_background, to_bytes
from maskserve_benchmarks.reports import about, write_json, write_page
from maskserve_benchmarks.soak.sampler import sample_process
from maskserve_benchmarks.timing import hardware
from maskserve_client.client import Client
from maskserve_common.imaging.images import encode_png
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor
from maskserve_studies.demo_model.looks import edits_with, shows_look
from maskserve_studies.demo_model.named_scenes import held_out_scenes
from maskserve_studies.demo_model.node_judges import enlarge_db, find_iou
from maskserve_studies.workflows.due_plans import due_plans
from maskserve_studies.workflows.second_host import can_make_second_host, second_host
from maskserve_studies.workflows.services_page import services_text
from maskserve_studies.workflows.shared_stages import (
    replica_killed,
    replicas_edits,
    stages_edits,
    stages_memory,
)
from maskserve_studies.workflows.two_hosts import two_hosts, two_hosts_control
from maskserve_studies.workflows.value_passing import pass_by_name
from maskserve_workflows.definition import Workflow, each, repeat
from maskserve_workflows.nodes import compose, crop, edit, find, outline, shows, split
from maskserve_workflows.passes import compiled
from maskserve_workflows.pictures import encode_mask
from maskserve_workflows.plan import WorkflowPlan, dump_plan

_SIDE: Final = 128
_STEPS: Final = 12
_BOXES: Final = ((8, 8), (8, 80), (80, 8), (80, 80))
_BOX: Final = 40
_PROMPT: Final = "a red star"
_COLOURS: Final = ("red", "green", "blue", "yellow", "purple")
_SURE: Final = 0.5
_ENOUGH: Final = 0.17
"""Share of the mask that a thing must fill to count as found. An outline fills less than the nodes'
default (0.2).
"""
THREE: Final = ("variants_bench", "detail_bench", "added_bench")
"""Workflows that share models."""
NODES: Final = CHECKOUT / "assets" / "nodes"
ADAPTERS: Final = CHECKOUT / "assets" / "adapters"


def plans() -> list[WorkflowPlan]:
    """The workflows, built of nodes that the scripts also call."""
    with Workflow("variants_bench", "Eight edits of one picture.") as variants:
        image, mask = variants.picture("image"), variants.mask("mask")
        with each(8) as variant:
            pictures = variant.all(edit(image, mask, _PROMPT))
        variants.gives(image=compose(image, pictures))
    with Workflow("detail_bench", "Each region of one picture.") as detail:
        image = detail.picture("image")
        with each(split(detail.mask("mask")), most=4, carry=image) as part:
            part.carried = edit(part.picture, part.mask, _PROMPT)
        detail.gives(image=part.carried)
    with Workflow("added_bench", "Three nodes on two servers.") as added:
        image, mask = added.picture("image"), added.mask("mask")
        rims = outline(image)
        added.gives(image=crop(edit(rims, mask, _PROMPT), mask), rims=rims)
    with Workflow("verified_bench", "Until what was asked for stands there.") as verified:
        image, mask, name = verified.picture("image"), verified.mask("mask"), verified.text("name")
        with repeat(most=3) as tries:
            painted = edit(image, mask, name, loras=[{"name": "hollow"}])
            tries.until(shows(painted, mask, name, threshold=_SURE, enough=_ENOUGH))
            verified.gives(image=tries.best(painted))
    with Workflow("shared_bench", "What is found is painted over.") as shared:
        image, prompt = shared.picture("image"), shared.text("prompt")
        shared.gives(image=edit(image, find(image, shared.text("name")), prompt))
    return [compiled(flow.plan) for flow in (variants, detail, added, verified, shared)]


def _mask(boxes: tuple[tuple[int, int], ...]) -> bytes:
    white = np.zeros((_SIDE, _SIDE), np.bool_)
    for row, column in boxes:
        white[row : row + _BOX, column : column + _BOX] = True
    return encode_mask(white)


class Rivals:
    """Workflows and scripts, at one router."""

    def __init__(self, supervisor: Supervisor) -> None:
        assert supervisor.router is not None
        self._url, self.nodes = supervisor.router.grpc_url, supervisor.services[0]
        self.values = supervisor.workers[0].spec.files.values
        self._rng = np.random.default_rng(time.time_ns())

    def picture(self) -> bytes:
        """A new picture."""
        drawn, _ = draw_background(self._rng, "photo", (_SIDE, _SIDE))
        return encode_png(to_bytes(drawn))

    def edit(self, image: bytes, mask: bytes, seed: int) -> bytes:
        with Client(self._url) as client:
            result = client.edit(image, mask, _PROMPT, seed=seed, num_inference_steps=_STEPS)
        return result.encoded

    def run(self, name: str, image: bytes, mask: bytes) -> None:
        with Client(self._url) as client:
            inputs = {"image": image, "mask": mask}
            client.run_workflow(name, inputs, seed=1, num_inference_steps=_STEPS)

    def variants_script(self, image: bytes) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: self.edit(image, _mask(_BOXES[:1]), seed), range(8)))

    def variants(self, image: bytes) -> None:
        self.run("variants_bench", image, _mask(_BOXES[:1]))

    def detail_script(self, image: bytes) -> None:
        for seed, box in enumerate(_BOXES):
            image = self.edit(image, _mask((box,)), seed)

    def detail(self, image: bytes) -> None:
        self.run("detail_bench", image, _mask(_BOXES))

    def seconds(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each side, in turn."""
        sides: dict[str, Callable[[bytes], None]] = {
            "variants_script": self.variants_script,
            "variants": self.variants,
            "detail_script": self.detail_script,
            "detail": self.detail,
        }
        for side in sides.values():
            side(self.picture())  # warm
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                image, begin = self.picture(), time.perf_counter()
                side(image)
                times[name].append(round(time.perf_counter() - begin, 3))
        return times

    def added_ms(self, side: int, rounds: int) -> float:
        """Milliseconds that a run of three nodes takes beyond its nodes' own times. The edit's own
        time comes from a call with another picture that is as new to the worker.
        """
        rng, added = self._rng, list[float]()
        white = np.zeros((side, side), np.bool_)
        white[side // 4 : side // 2, side // 4 : side // 2] = True
        mask = encode_mask(white)
        edit_settings: dict[str, Any] = {"num_inference_steps": 2, "seed": 1, "cache": "off"}
        with Client(self._url) as client:
            for _ in range(rounds + 1):
                drawn, _ = draw_background(rng, "photo", (side, side))
                image = encode_png(to_bytes(drawn))
                begin = time.perf_counter()
                outputs, meta = client.run_workflow(
                    "added_bench", {"image": image, "mask": mask}, **edit_settings
                )
                run_s = time.perf_counter() - begin
                rims = np.asarray(Image.open(io.BytesIO(outputs["rims"])).convert("RGB"))
                mirrored = encode_png(np.ascontiguousarray(rims[:, ::-1]))
                begin = time.perf_counter()
                client.edit(mirrored, mask, _PROMPT, **edit_settings)
                nodes_s = time.perf_counter() - begin
                nodes_s += sum(node["seconds"] for node in meta["nodes"] if node["node"] != "edit")
                added.append(1e3 * (run_s - nodes_s))
        return round(statistics.median(added[1:]), 1)  # the first one warms

    def shared(self) -> dict[str, int]:
        """Calls of `find` and of the source's encoder, for five prompts at once."""
        [(scene, thing)] = held_out_scenes(1, (_SIDE, _SIDE))
        name, image = f"a {thing.colour} {thing.shape}", encode_png(scene.picture)

        def run_nodes(prompt: str) -> list[dict[str, Any]]:
            inputs: dict[str, bytes | str] = {"image": image, "name": name, "prompt": prompt}
            with Client(self._url) as client:
                _, meta = client.run_workflow(
                    "shared_bench", inputs, seed=1, num_inference_steps=_STEPS
                )
            return list(meta["nodes"])

        with ThreadPoolExecutor(5) as pool:
            runs = pool.map(run_nodes, [f"a {colour} star" for colour in _COLOURS])
            nodes = [node for run in runs for node in run]
        encoded = [
            node_report["encoded"]["template"]
            for node_report in nodes
            if node_report["node"] == "edit"
        ]
        return {
            "finds_of_five": sum(
                not node_report["kept"] for node_report in nodes if node_report["node"] == "find"
            ),
            "encodes_of_five": encoded.count("made"),
        }

    def memory(self) -> dict[str, float]:
        """Peak MiB of the server's processes and their number: with one workflow, and with three at
        once. A server for each workflow would need three times the memory of one.
        """
        image, mask = self.picture(), _mask(_BOXES)
        names = THREE
        self.run(names[0], image, mask)  # loads everything that the first use loads
        with peak() as single:
            self.run(names[0], self.picture(), mask)
        with peak() as together, ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: self.run(name, self.picture(), mask), names))
        return {
            "one_workflow_mib": single.mib,
            "three_workflows_mib": together.mib,
            "one_workflow_processes": single.processes,
            "three_workflows_processes": together.processes,
            "three_of_three_servers": round(together.mib / (len(names) * single.mib), 3),
        }

    def verified(self, count: int) -> dict[str, float]:
        """Shares of edits that pass the judge, with the verifier and for first tries alone, and the
        mean number of tries.
        """
        right = first_right = tries = 0
        with Client(self._url) as client:
            for seed, case in enumerate(edits_with("hollow", count)):
                inputs = {"image": encode_png(case.source), "mask": encode_mask(case.mask)}
                outputs, meta = client.run_workflow(
                    "verified_bench", {**inputs, "name": case.prompt}, seed=seed,
                    num_inference_steps=_STEPS,
                )  # fmt: skip
                picture = shows_look("hollow", _pixels(outputs["image"]), case)
                painted = [node for node in meta["nodes"] if node["node"] == "edit"]
                first = picture
                if len(painted) > 1:
                    result = client.edit(
                        inputs["image"], inputs["mask"], case.prompt, loras=[{"name": "hollow"}],
                        seed=painted[0]["seed"], num_inference_steps=_STEPS,
                    )  # fmt: skip
                    first = shows_look("hollow", _pixels(result.encoded), case)
                right, first_right, tries = (
                    right + picture,
                    first_right + first,
                    tries + len(painted),
                )
        return {
            "verified_followed": round(right / count, 4),
            "first_followed": round(first_right / count, 4),
            "verified_tries": round(tries / count, 3),
        }


@dataclass
class Peak:
    """Peak memory and number of this process's descendants."""

    mib: float = 0.0
    processes: int = 0

    def look(self) -> None:
        memory = 0
        family = psutil.Process().children(recursive=True)
        for process in family:
            with suppress(psutil.NoSuchProcess, OSError):
                memory += sample_process(process).pss
        self.mib = max(self.mib, round(memory / 2**20, 1))
        self.processes = max(self.processes, len(family))


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the peak until the context ends, ten times a second."""
    usage, ends = Peak(), threading.Event()

    def looking() -> None:
        while True:
            usage.look()
            if ends.wait(0.1):
                return

    looker = threading.Thread(target=looking)
    looker.start()
    try:
        yield usage
    finally:
        ends.set()
        looker.join()


def _pixels(encoded: bytes) -> Picture:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


@contextmanager
def served(find: Path, *, own_anchors: bool = True) -> Iterator[Rivals]:
    """A router, a worker and a node server with the folder of `find`, if there is one."""
    with tempfile.TemporaryDirectory() as directory:
        folder, base = Path(directory), free_base_port(2)
        for plan in plans():
            (folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
        nodes = f'[nodes]\nfind = "{find}"\n' if find.is_dir() else ""
        (folder / "nodes.toml").write_text(f'[model]\ndevice = "cpu"\n{nodes}')
        (folder / "worker.toml").write_text("" if own_anchors else "[cache]\nown_anchors = 0\n")
        options = ServeOptions(
            model=str(DEMO_MODEL),
            base_port=base,
            router=True,
            router_port=base + 10,
            config=folder / "worker.toml",
            adapters=str(ADAPTERS),
            nodes=folder / "nodes.toml",
            workflows=folder,
            log_dir=folder / "logs",
        )
        with Supervisor(options) as supervisor:
            yield Rivals(supervisor)


def rivals(args: argparse.Namespace) -> dict[str, Any]:
    """The scripts' time over the workflows' time, with refresh steps and without, and
    all seconds.
    """
    figures: dict[str, Any] = {}
    for suffix, own_anchors in (("", True), ("_without_anchors", False)):
        with served(args.find, own_anchors=own_anchors) as sides:
            seconds = sides.seconds(args.rounds)
        middle = {name: statistics.median(samples) for name, samples in seconds.items()}
        for name in ("variants", "detail"):
            ratio = middle[f"{name}_script"] / middle[name]
            figures[f"{name}_vs_script{suffix}"] = round(ratio, 2)
        figures[f"seconds{suffix}"] = seconds
    return figures


def added(args: argparse.Namespace) -> dict[str, Any]:
    with served(args.find) as sides:
        return {f"added_ms_{side}": sides.added_ms(side, 4 * args.rounds) for side in (128, 1024)}


def shared(args: argparse.Namespace) -> dict[str, Any]:
    if not args.find.is_dir():
        return {"finds_of_five": None, "encodes_of_five": None}
    with served(args.find) as sides:
        return {**sides.memory(), **sides.shared()}


def verified(args: argparse.Namespace) -> dict[str, Any]:
    if not args.find.is_dir():
        return {"verified_followed": None}
    with served(args.find) as sides:
        return sides.verified(args.edits)


def models(args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"find_iou": None, "enlarge_db": None}
    if args.find.is_dir():
        figures["find_iou"] = round(find_iou(args.find, 200), 3)
    if args.enlarge.is_dir():
        model_db, lanczos = enlarge_db(args.enlarge)
        figures["enlarge_db"] = round(model_db - lanczos, 2)
    return figures


def stages(args: argparse.Namespace) -> dict[str, Any]:
    return {**stages_memory(DEMO_MODEL), **stages_edits(DEMO_MODEL, args.rounds)}


def replicas(args: argparse.Namespace) -> dict[str, Any]:
    edits = 8 if args.tiny else 48
    return {
        **replicas_edits(DEMO_MODEL, args.rounds, edits),
        **replica_killed(DEMO_MODEL, args.seeds[0], edits),
    }


def monoliths(args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, count in (("shared", 1), ("monoliths", len(THREE))):
        with ExitStack() as running:
            servers = [running.enter_context(served(args.find)) for _ in range(count)]
            sides = list(zip(THREE, itertools.cycle(servers), strict=False))
            _at_once(sides)  # loads everything that the first use loads
            with peak() as used:
                seconds = [_at_once(sides) for _ in range(args.rounds)]
        figures[f"{name}_mib"] = used.mib
        figures[f"{name}_processes"] = used.processes
        figures[f"{name}_s"] = round(statistics.median(map(statistics.mean, seconds)), 3)
        figures[f"seconds_{name}"] = seconds
    for unit in ("mib", "s"):
        ratio = figures[f"shared_{unit}"] / figures[f"monoliths_{unit}"]
        figures[f"shared_of_monoliths_{unit}"] = round(ratio, 3)
    return figures


def _at_once(sides: Sequence[tuple[str, Rivals]]) -> list[float]:
    """Seconds of runs that begin at once, each of a workflow at a server."""
    mask = _mask(_BOXES)

    def seconds(name: str, server: Rivals, image: bytes) -> float:
        begin = time.perf_counter()
        server.run(name, image, mask)
        return round(time.perf_counter() - begin, 3)

    with ThreadPoolExecutor(len(sides)) as pool:
        calls = [pool.submit(seconds, *side, side[1].picture()) for side in sides]
        return [call.result() for call in calls]


def named(args: argparse.Namespace) -> dict[str, Any]:
    with served(args.find) as sides:
        address = f"127.0.0.1:{sides.nodes.ports.grpc}"
        return pass_by_name(address, sides.values, 4 * args.rounds)


def due(args: argparse.Namespace) -> dict[str, Any]:
    return due_plans(args.plans, args.seeds)


def hosts(args: argparse.Namespace) -> dict[str, Any]:
    if not can_make_second_host():
        return {"two_hosts_added_ms": None, "two_hosts_control_ratio": None}
    with tempfile.TemporaryDirectory() as directory, second_host() as remote:
        folder = Path(directory)
        with served(args.find) as sides:
            local_address = f"127.0.0.1:{sides.nodes.ports.grpc}"
            figures = two_hosts(local_address, sides.values, remote, folder, 4 * args.rounds)
        remote.end()
        return {**figures, **two_hosts_control(remote, folder, args.rounds)}


PARTS: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "rivals": rivals, "added": added, "shared": shared, "models": models, "verified": verified,
    "stages": stages, "replicas": replicas, "monoliths": monoliths, "by-name": named,
    "due": due, "hosts": hosts,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--edits", type=int, default=200, help="of `verified`")
    add("--plans", type=int, default=300, help="of `due`, at each load in each order")
    add("--seeds", type=int, nargs="+", default=[1], help="of `due`; the first also of `replicas`")
    add("--tiny", action="store_true", help="few edits of `replicas`")
    add("--find", type=Path, default=NODES / "find", help="folder of a CLIPSeg model")
    add("--enlarge", type=Path, default=NODES / "enlarge", help="folder of a Swin2SR model")
    add("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    add("--json", type=Path, metavar="FILE", help="write the figures there; --only adds to them")
    add("--page", type=Path, metavar="FILE", help="write services and monoliths there (Markdown)")
    args = parser.parse_args()
    report: dict[str, Any] = {"summary": {}, "seconds": {}}
    if args.only and args.json is not None and args.json.exists():
        report = json.loads(args.json.read_text())
    for part in args.only or PARTS:
        for name, value in PARTS[part](args).items():
            report["seconds" if name.startswith("seconds") else "summary"][name] = value
        print(json.dumps(report["summary"], indent=2), flush=True)
        whole = {**report, **about(hardware(torch.device("cpu")))}
        write_json(whole, args.json)
        write_page("Services and monoliths", services_text(report["summary"]), whole, args.page)
    return 0
