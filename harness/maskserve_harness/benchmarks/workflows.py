"""Workflows beside scripts that call the same nodes, in turn on one server with the demo model.

`variants`: eight edits of a picture that nobody has sent before; the script sends its eight calls
at once. `detail`: four regions of one; the script paints each on the last result. Both twice: with
rows' own anchors (`[cache] own_anchors`, the default) and without. Medians of the rounds.

    python scripts/bench workflows --json workflows.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from maskserve_client.client import Client
from maskserve_core.imaging.images import encode_png
from maskserve_core.workflows.definition import Workflow, each
from maskserve_core.workflows.nodes import compose, edit, split
from maskserve_core.workflows.passes import compiled
from maskserve_core.workflows.pictures import encode_mask
from maskserve_core.workflows.plan import WorkflowPlan, dump_plan
from maskserve_harness.benchmarks.timing import hardware
from maskserve_harness.checkout import DEMO_MODEL
from maskserve_harness.demo_model.scenes import draw_background, to_bytes
from maskserve_harness.reports import about, write_json
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

_SIDE: Final = 128
_STEPS: Final = 12
_BOXES: Final = ((8, 8), (8, 80), (80, 8), (80, 80))
_BOX: Final = 40
_PROMPT: Final = "a red star"


def plans() -> list[WorkflowPlan]:
    """The workflows, of nodes that the scripts call, too."""
    with Workflow("variants_bench", "Eight edits of one picture.") as variants:
        image, mask = variants.picture("image"), variants.mask("mask")
        with each(8) as one:
            made = one.all(edit(image, mask, _PROMPT))
        variants.gives(image=compose(image, made))
    with Workflow("detail_bench", "Each region of one picture.") as detail:
        image = detail.picture("image")
        with each(split(detail.mask("mask")), most=4, carry=image) as part:
            part.carried = edit(part.picture, part.mask, _PROMPT)
        detail.gives(image=part.carried)
    return [compiled(flow.plan) for flow in (variants, detail)]


def _mask(boxes: tuple[tuple[int, int], ...]) -> bytes:
    white = np.zeros((_SIDE, _SIDE), np.bool_)
    for row, column in boxes:
        white[row : row + _BOX, column : column + _BOX] = True
    return encode_mask(white)


class Rivals:
    """Both sides, at one router."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rng = np.random.default_rng(time.time_ns())

    def picture(self) -> bytes:
        """One that nobody has sent before."""
        drawn, _ = draw_background(self._rng, "photo", (_SIDE, _SIDE))
        return encode_png(to_bytes(drawn))

    def edit(self, image: bytes, mask: bytes, seed: int) -> bytes:
        with Client(self._url) as client:
            made = client.edit(image, mask, _PROMPT, seed=seed, num_inference_steps=_STEPS)
        return made.encoded

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
        """Of each side, in turn."""
        sides: dict[str, Callable[[bytes], None]] = {
            "variants_script": self.variants_script,
            "variants": self.variants,
            "detail_script": self.detail_script,
            "detail": self.detail,
        }
        for side in sides.values():
            side(self.picture())  # warm
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                image, begin = self.picture(), time.perf_counter()
                side(image)
                taken[name].append(round(time.perf_counter() - begin, 3))
        return taken


def measured(rounds: int, *, own_anchors: bool) -> dict[str, Any]:
    """Seconds of each side, and how many times as long the scripts took."""
    with tempfile.TemporaryDirectory() as kept:
        folder, base = Path(kept), free_base_port(2)
        for plan in plans():
            (folder / f"{plan.name}.json").write_bytes(dump_plan(plan))
        (folder / "nodes.toml").write_text('[model]\ndevice = "cpu"\n')
        (folder / "worker.toml").write_text("" if own_anchors else "[cache]\nown_anchors = 0\n")
        options = ServeOptions(
            model=str(DEMO_MODEL),
            base_port=base,
            router=True,
            router_port=base + 10,
            config=folder / "worker.toml",
            nodes=folder / "nodes.toml",
            workflows=folder,
            log_dir=folder / "logs",
        )
        with Supervisor(options) as supervisor:
            assert supervisor.router is not None
            seconds = Rivals(supervisor.router.grpc_url).seconds(rounds)
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "seconds": seconds,
        "variants_vs_script": round(middle["variants_script"] / middle["variants"], 2),
        "detail_vs_script": round(middle["detail_script"] / middle["detail"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    ways = {
        name: measured(args.rounds, own_anchors=name == "own_anchors")
        for name in ("own_anchors", "without")
    }
    summary = {
        f"{name}{'' if way == 'own_anchors' else '_without_anchors'}": ways[way][name]
        for way in ways
        for name in ("variants_vs_script", "detail_vs_script")
    }
    print(json.dumps(summary, indent=2))
    write_json(
        {**about(hardware(torch.device("cpu"))), "summary": summary, "ways": ways}, args.json
    )
    return 0
