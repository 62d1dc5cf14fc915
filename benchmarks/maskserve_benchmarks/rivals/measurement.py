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
from maskserve_benchmarks.rivals.adapters import with_adapters
from maskserve_benchmarks.rivals.server import Rival, RivalServer
from maskserve_benchmarks.triton_calls import decode
from maskserve_common.contracts.request import EditKind

Figures = dict[str, Any]
IN_FLIGHT = 8
SLO = 2.0
"""Latency limit of a good answer, as a multiple of the latency of one edit alone at the rival."""
UNSEEN_STEPS = 20
"""Steps of edits with new pictures: with fewer steps a larger share would be dense."""
WARM = 8
"""Number of warm-up edits; edits with a mask come twice, as a template's second edit primes it."""
THRESHOLD = 0.2
"""Threshold of FirstBlockCache: the fastest at which the judge still found all of the demo model's
objects right (docs/benchmarks.md, frontier)."""
INTERVAL = 3
"""`step_interval` of a system of ours: the model runs in 8 of 20 steps."""


@dataclass(frozen=True, slots=True)
class System:
    """A server and settings that answer edits."""

    key: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rival: Rival | None = None
    """None: maskserve with these settings."""


TUNINGS = (
    Rival("b1", "whole", batch=1),
    Rival("b4", "whole", batch=4, delay_ms=50),
    Rival("b8", "whole", batch=8),
    Rival("b8_delay", "whole", batch=8, delay_ms=200),
    Rival("b4_two", "whole", batch=4, instances=2, threads=1),
)


MODES = {
    "whole": ("diffusers", "diffusers' pipeline"),
    "first_block_cache": ("first_block", f"the same, FirstBlockCache {THRESHOLD}"),
    "crop": ("crop", "the same, only a crop"),
}
"""Modes of `pipeline_model` → key and label of their system."""


Rivals = Mapping[tuple[str, str], Rival]
"""Rivals by the names of their mode and their tuning."""


def variants(loras: str = "", nets: str = "") -> dict[tuple[str, str], Rival]:
    """Return each mode in each tuning, with these folders of LoRAs and ControlNets."""
    return {
        (mode, tuning.name): replace(
            tuning,
            name=f"{mode}_{tuning.name}",
            mode=mode,
            threshold=THRESHOLD,
            loras=loras,
            nets=nets,
        )
        for mode in MODES
        for tuning in TUNINGS
    }


def systems(rivals: Rivals, tuning: Rival, model: str, rings: Sequence[int]) -> list[System]:
    """Return the systems in the order of the paper's comparison. The larger model has random
    weights, which cannot show an acceptable threshold, so it runs without FirstBlockCache. Text to
    image has no mask, so there is one way to compute it.
    """
    if model in ("pictures", "adapters"):
        key, label = MODES["whole"]
        rival = rivals["whole", tuning.name]
        return [System(key, label, rival=rival), System("maskserve", "maskserve")]
    all_systems = [
        System(key, label, rival=rivals[mode, tuning.name])
        for mode, (key, label) in MODES.items()
        if model == "demo" or key != "first_block"
    ]
    all_systems.append(System("dense", "maskserve, all tokens", {"cache": "off"}))
    all_systems.append(System("maskserve", "maskserve"))
    if model == "demo":
        interval = {"step_interval": INTERVAL}
        all_systems.append(System("interval", f"maskserve, step_interval {INTERVAL}", interval))
    all_systems += [System(f"ring{n}", f"maskserve, ring {n}", {"mask_ring": n}) for n in rings]
    return all_systems


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of the measurement of one model."""

    size: int
    """Side of the pictures in pixels."""
    edits: int
    """Number of edits of a run at saturation."""
    alone: int
    """Number of edits of a run that sends one edit at a time."""
    rounds: int
    rates: tuple[float, ...]
    """Request rates, as shares of the rival's edits per second at saturation."""
    paced: int
    """Number of edits of a run at such a rate. A longer run makes the queue of a saturated system
    longer."""
    limit_s: float
    """Seconds that a run may take."""
    tunings: tuple[Rival, ...] = TUNINGS
    mixes: tuple[str, ...] = ("production",)
    judged: int = 8
    """Number of edits whose pictures are compared."""
    everywhere: bool = True
    """Whether all systems run at `rates`; else only the pipeline and maskserve do."""
    rings: tuple[int, ...] = ()
    """Rings of further systems: maskserve with rings other than its default."""
    batches: tuple[int, ...] = ()
    """Numbers of edits in flight in the study of batch sizes."""
    ratios: tuple[float, ...] = ()
    """Mask ratios of the study of mask ratios."""
    ablation: bool = False
    """Whether to measure workers that lack a part."""
    routed: bool = False
    """Whether to compare routing policies."""
    loras: bool = False
    """Whether to measure edits with LoRAs; the demo model has some."""
    unseen: int = 0
    """Number of edits of a run in the study of new pictures; 0: no study."""
    study_rounds: int = 3
    """Number of rounds of the studies in which systems take turns."""
    kind: EditKind = "inpaint"
    """Kind of the edits; `generate` is text to image."""
    steps: int = 0
    """Steps of the edits; 0: the model folder's number."""
    sizes: tuple[str, ...] = ()
    """Sizes of pictures without a source, which take turns; empty: all have `size`."""
    adapters: bool = False
    """Whether edits have ControlNets and LoRAs (`adapters`)."""


class Bench:
    """One model, served by maskserve and by its rivals. Both are ready, and one works at a time.

    Args:
        tool: perf_analyzer.
        worker: maskserve's worker.
        rivals: the rivals' Triton; None: only maskserve is measured.
        plan: extent of the measurement.
        folder: folder for files.
    """

    def __init__(
        self, tool: Tool, worker: Server, rivals: RivalServer | None, plan: Plan, folder: Path
    ) -> None:
        self._tool, self.worker, self._rivals = tool, worker, rivals
        self.plan, self._folder = plan, folder

    def at(self, worker: Server, folder: Path) -> Bench:
        """Return the same bench with another worker of maskserve."""
        return Bench(self._tool, worker, self._rivals, self.plan, folder)

    def saturated(
        self,
        system: System,
        in_flight: int,
        count: int,
        edits: Sequence[Edit] | None = None,
    ) -> float:
        """Return edits per second with `in_flight` edits in flight. The other arguments go to
        `run`.
        """
        stamps = self.run(system, Load("concurrency", in_flight), count, edits)
        return round(stamps.answered_per_s, 3)

    @contextmanager
    def serving(self, system: System) -> Iterator[None]:
        """Make the system take edits while the context lasts."""
        if system.rival is None:
            yield
            return
        assert self._rivals is not None
        with self._rivals.serving(system.rival):
            yield

    def edits(self, mix: str) -> list[Edit]:
        """Return the edits of a run, of four pictures."""
        settings = {"num_inference_steps": self.plan.steps} if self.plan.steps else {}
        options = InputOptions(
            self.plan.size, self.plan.edits, 4, mix, self.plan.kind, settings=settings
        )
        edits = make_edits(options, find_photos(CHECKOUT / "assets"))
        if self.plan.adapters:
            return with_adapters(edits, self.plan.size)
        return of_sizes(edits, self.plan.sizes)

    def unseen(self, run: int) -> list[Edit]:
        """Return edits of the production mix, each with a picture that occurs in no other edit or
        run.
        """
        count, settings = self.plan.unseen, {"num_inference_steps": UNSEEN_STEPS}
        options = InputOptions(self.plan.size, count, count, seed=1 + run, settings=settings)
        return make_edits(options, find_photos(CHECKOUT / "assets"))

    def run(
        self, system: System, load: Load, count: int, edits: Sequence[Edit] | None = None
    ) -> Stamps:
        """Let perf_analyzer send `count` edits.

        Args:
            system: the system that answers the edits.
            load: the pattern of arrivals.
            count: number of edits.
            edits: edits to send in turn; None: those of the production mix. Their settings override
                the system's.

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
        """Return the model's name, and gRPC's host:port."""
        if system.rival is None:
            return "edit", self.worker.grpc
        assert self._rivals is not None
        return system.rival.name, self._rivals.grpc

    def pictures(self, system: System, edits: Sequence[Edit]) -> list[Any]:
        """Return the system's pictures of the edits, requested one after the other."""
        batch = [] if system.rival is None else [1]
        front, url = self._address(system)
        pictures = []
        with grpc_client.InferenceServerClient(url) as client:
            for edit in edits:
                system_edit = replace(edit, settings={**system.settings, **edit.settings})
                inputs = []
                for name, values in system_edit.elements().items():
                    shape = [*batch, len(values)]
                    tensor = grpc_client.InferInput(name, shape, "BYTES")
                    tensor.set_data_from_numpy(np.array(values, object).reshape(shape))
                    inputs.append(tensor)
                answer = client.infer(front, inputs).as_numpy("IMAGE")
                pictures.append(decode(answer.reshape(-1)[0]))
        return pictures


def of_sizes(edits: Sequence[Edit], sizes: Sequence[str]) -> list[Edit]:
    """Return the edits with these sizes in turn, shuffled; with their own if `sizes` is empty."""
    if not sizes:
        return list(edits)
    order = np.random.default_rng(0).permutation(len(edits))
    return [
        replace(edit, settings={**edit.settings, "size": sizes[number % len(sizes)]})
        for edit, number in zip(edits, order, strict=True)
    ]


def run_figures(runs: Mapping[str, Sequence[Stamps]], slo_ms: float) -> Figures:
    """Return for each kind of run the medians over rounds, and the spread of the rounds."""
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
    """Return the share of edits answered within the SLO."""
    pairs = zip(stamps.sent, stamps.responses, strict=True)
    return float(np.mean([(r[-1] - start_ns) / 1e6 <= slo_ms for start_ns, r in pairs]))


def waited_ms(stamps: Stamps) -> float:
    """Return the mean time until work on an edit starts: at maskserve until it has a row, at the
    rival until its model is called.
    """
    waited = [
        meta["timings_ms"]["queue"]
        if "timings_ms" in meta
        else (r[-1] - start_ns) / 1e6 - meta["call_ms"]
        for start_ns, r, meta in zip(stamps.sent, stamps.responses, stamps.metas, strict=True)
    ]
    return float(np.mean(waited))
