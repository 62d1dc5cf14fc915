"""Systems that answer the same edits, and one measured run of one of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_benchmarks.perf.inputs import (
    Edit,
    InputOptions,
    find_photos,
    make_edits,
    write_edits,
)
from maskserve_benchmarks.perf.load import Load, Target
from maskserve_benchmarks.perf.results import Stamps
from maskserve_benchmarks.perf.run import Measurement, measure
from maskserve_benchmarks.perf.server import Server
from maskserve_benchmarks.perf.tool import Tool
from maskserve_benchmarks.probing.calls import decode
from maskserve_benchmarks.rivals.server import Rival, RivalServer

Figures = dict[str, Any]
IN_FLIGHT = 8
SLO = 2.0
"""Of the rival's latency alone: an answer within it is good."""
UNSEEN_STEPS = 20
"""Of edits of pictures that nobody has sent before: of fewer, more would be dense."""
WARM = 8
"""Edits that have each picture twice: a template's second sight primes it."""
THRESHOLD = 0.2
"""Of FirstBlockCache: the fastest at which the demo model's objects were still all judged right
(docs/benchmarks.md, frontier)."""


@dataclass(frozen=True, slots=True)
class System:
    """What answers edits."""

    key: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: Rival | None = None
    """None: maskserve, with these settings."""


TUNINGS = (
    Rival("b1", "whole", batch=1),
    Rival("b4", "whole", batch=4, delay_ms=50),
    Rival("b8", "whole", batch=8),
    Rival("b8_delay", "whole", batch=8, delay_ms=200),
    Rival("b4_two", "whole", batch=4, instances=2, threads=1),
)


WAYS = {
    "whole": ("diffusers", "diffusers' pipeline"),
    "first_block_cache": ("first_block", f"the same, FirstBlockCache {THRESHOLD}"),
    "crop": ("crop", "the same, only a crop"),
}
"""Ways of `pipeline_model`, with their system's key and label."""


def variants() -> dict[tuple[str, str], Rival]:
    """Each way in each tuning, by their names."""
    return {
        (way, tuning.name): replace(
            tuning, name=f"{way}_{tuning.name}", way=way, threshold=THRESHOLD
        )
        for way in WAYS
        for tuning in TUNINGS
    }


def systems(tuning: Rival, model: str, rings: Sequence[int]) -> list[System]:
    """In the order of the paper's comparison. With random weights nobody can say which threshold
    FirstBlockCache may have, so the larger model goes without.
    """
    compared = [
        System(key, label, rival=variants()[way, tuning.name])
        for way, (key, label) in WAYS.items()
        if model == "demo" or key != "first_block"
    ]
    compared.append(System("dense", "maskserve, all tokens", {"cache": "off"}))
    compared.append(System("maskserve", "maskserve"))
    if model == "demo":
        skipping = {"first_block_threshold": THRESHOLD}
        compared.append(System("skipping", f"maskserve, FirstBlockCache {THRESHOLD}", skipping))
    compared += [System(f"ring{n}", f"maskserve, ring {n}", {"mask_ring": n}) for n in rings]
    return compared


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured of a model."""

    size: int
    """Of the pictures, pixels."""
    edits: int
    """Of a run."""
    alone: int
    """One at a time, of a run."""
    rounds: int
    rates: tuple[float, ...]
    """Shares of the rival's edits per second at saturation."""
    paced: int
    """Edits of a run at such a rate. The longer it is held, the longer the queue of what saturates
    there."""
    limit_s: float
    """Of a run."""
    tunings: tuple[Rival, ...] = TUNINGS
    mixes: tuple[str, ...] = ("production",)
    judged: int = 8
    """Edits whose pictures are compared."""
    everywhere: bool = True
    """Whether all systems have the edits of `rates`; else the pipeline and maskserve alone."""
    rings: tuple[int, ...] = ()
    """Further systems: maskserve with other rings than its own."""
    batches: tuple[int, ...] = ()
    """Edits in flight, of the study of batch sizes."""
    ratios: tuple[float, ...] = ()
    """Of the study of mask ratios."""
    ablation: bool = False
    """Whether workers that lack a part are measured."""
    routed: bool = False
    """Whether policies of routing are compared."""
    loras: bool = False
    """Whether edits with LoRAs are measured; the demo model has some."""
    unseen: int = 0
    """Edits of a run of the study of pictures that nobody has sent before; 0: there is none."""
    study_rounds: int = 3
    """Of the studies that take turns."""


class Bench:
    """One model served by maskserve and by its rivals, both at hand and one at work.

    Args:
        tool: perf_analyzer.
        ours: maskserve's worker.
        theirs: the rivals' Triton; None: only maskserve is measured.
        plan: how much is measured.
        folder: for files.
    """

    def __init__(
        self, tool: Tool, ours: Server, theirs: RivalServer | None, plan: Plan, folder: Path
    ) -> None:
        self._tool, self.ours, self._theirs = tool, ours, theirs
        self.plan, self._folder = plan, folder

    def at(self, ours: Server, folder: Path) -> Bench:
        """The same with another of maskserve's workers."""
        return Bench(self._tool, ours, self._theirs, self.plan, folder)

    def saturated(
        self,
        system: System,
        in_flight: int,
        count: int,
        edits: Sequence[Edit] | None = None,
    ) -> float:
        """Edits per second with so many in flight; arguments as of `run`."""
        stamps = self.run(system, Load("concurrency", in_flight), count, edits)
        return round(stamps.answered_per_s, 3)

    @contextmanager
    def serving(self, system: System) -> Iterator[None]:
        """Within it the system takes edits."""
        if system.rival is None:
            yield
            return
        assert self._theirs is not None
        with self._theirs.serving(system.rival):
            yield

    def edits(self, mix: str) -> list[Edit]:
        """As many as a run has, of four pictures."""
        options = InputOptions(self.plan.size, self.plan.edits, 4, mix)
        return make_edits(options, find_photos(CHECKOUT / "assets"))

    def unseen(self, run: int) -> list[Edit]:
        """Edits of the production mix, each of a picture that no other has, in no run."""
        count, settings = self.plan.unseen, {"num_inference_steps": UNSEEN_STEPS}
        options = InputOptions(self.plan.size, count, count, seed=1 + run, settings=settings)
        return make_edits(options, find_photos(CHECKOUT / "assets"))

    def run(
        self, system: System, load: Load, count: int, edits: Sequence[Edit] | None = None
    ) -> Stamps:
        """Let perf_analyzer send edits, `count` in all.

        Args:
            system: that answers them.
            load: how they come.
            count: of edits.
            edits: that are sent in turn; None: those of the production mix. Their settings come
                before the system's.

        Raises:
            RuntimeError: an edit failed.
        """
        inputs = self._folder / f"{system.key}.json"
        write_edits(
            [
                replace(edit, settings={**system.settings, **edit.settings})
                for edit in edits or self.edits("production")
            ],
            inputs,
        )
        front, url = self._address(system)
        target = Target(front, "grpc")
        measurement = Measurement(target, load, url, count, inputs, 0, self.plan.limit_s)
        outcome = measure(self._tool, measurement)
        if outcome.stamps is None:
            raise RuntimeError(f"{system.key}: {'; '.join(outcome.errors)}")
        return outcome.stamps

    def _address(self, system: System) -> tuple[str, str]:
        """The model's name, and gRPC's host:port."""
        if system.rival is None:
            return "edit", self.ours.grpc
        assert self._theirs is not None
        return system.rival.name, self._theirs.grpc

    def pictures(self, system: System, edits: Sequence[Edit]) -> list[Any]:
        """What the system that serves answers, one edit after the other."""
        shape = [1] if system.rival is None else [1, 1]
        front, url = self._address(system)
        made = []
        with grpc_client.InferenceServerClient(url) as client:
            for edit in edits:
                system_edit = replace(edit, settings={**system.settings, **edit.settings})
                inputs = []
                for name, value in system_edit.tensors().items():
                    tensor = grpc_client.InferInput(name, shape, "BYTES")
                    tensor.set_data_from_numpy(np.array([value], object).reshape(shape))
                    inputs.append(tensor)
                answer = client.infer(front, inputs).as_numpy("IMAGE")
                made.append(decode(answer.reshape(-1)[0]))
        return made


def summed(runs: Mapping[str, Sequence[Stamps]], slo_ms: float) -> Figures:
    """Of each kind of run the medians over rounds, and what the rounds spread."""
    figures: Figures = {}
    for kind, stamps in runs.items():
        latencies = [s.latencies() for s in stamps]
        rates = [s.answered_per_s for s in stamps]
        good = [within(s, slo_ms) for s in stamps]
        figures[kind] = {
            "sent_per_s": round(statistics.median(s.sent_per_s for s in stamps), 3),
            "edits_per_s": round(statistics.median(rates), 3),
            "spread": [round(min(rates), 3), round(max(rates), 3)],
            "seconds": round(statistics.median(_span(s) for s in stamps), 1),
            **{
                f"{name}_ms": round(
                    statistics.median(getattr(latency, name) for latency in latencies), 1
                )
                for name in ("mean", "p50", "p95", "p99")
            },
            "waited_ms": round(statistics.median(waited_ms(s) for s in stamps), 1),
            "good_share": round(statistics.median(good), 3),
        }
    return figures


def _span(stamps: Stamps) -> float:
    return (max(r[-1] for r in stamps.responses) - stamps.sent[0]) / 1e9


def within(stamps: Stamps, slo_ms: float) -> float:
    """The share of edits that were answered within the SLO."""
    pairs = zip(stamps.sent, stamps.responses, strict=True)
    return float(np.mean([(r[-1] - start_ns) / 1e6 <= slo_ms for start_ns, r in pairs]))


def waited_ms(stamps: Stamps) -> float:
    """The mean time before an edit is worked on: until maskserve has a row for it, until the
    rival's model is called with it.
    """
    waited = [
        meta["timings_ms"]["queue"]
        if "timings_ms" in meta
        else (r[-1] - start_ns) / 1e6 - meta["call_ms"]
        for start_ns, r, meta in zip(stamps.sent, stamps.responses, stamps.metas, strict=True)
    ]
    return float(np.mean(waited))
