"""The sides of a comparison: each answers the same edits, one or several at a time.

maskserve answers through a Triton worker, or, if none starts, through the same parts in this
process. diffusers' pipeline runs in this process.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from maskserve_benchmarks.edits.direct import Direct
from maskserve_benchmarks.edits.edit import Site, worker_of
from maskserve_benchmarks.perf.inputs import Edit
from maskserve_benchmarks.rivals.measurement import THRESHOLD
from maskserve_benchmarks.rivals.pipeline_model import Pipeline
from maskserve_common.config_file import config_of
from maskserve_engine.stages.quantise import quantise

_LOG_LINES = 40
Figures = dict[str, Any]
Tables = Mapping[str, Mapping[str, Any]]
RIVALS = {
    "as it is": ("whole", "bf16", False),
    "compiled": ("whole", "bf16", True),
    "fp8, compiled": ("whole", "fp8", True),
    "FirstBlockCache": ("first_block_cache", "bf16", False),
    "crop and stitch": ("crop", "bf16", False),
}
"""Names → mode of `pipeline_model`, form of the weights, and whether its blocks are compiled."""


class Side(Protocol):
    """One system."""

    def prime(self, image: bytes) -> None:
        """Do at once what the system keeps of a picture."""

    def run(self, edits: Sequence[Edit], at_once: int) -> Figures:
        """Answer edits, and return `edits_per_s` and what else the system reports."""

    def one(self, edit: Edit) -> object:
        """Answer an edit; several threads may call this."""


class TritonSide:
    """maskserve behind Triton."""

    def __init__(self, site: Site) -> None:
        self.prime, self.run = site.prime, site.run
        self._site = site

    def one(self, edit: Edit) -> object:
        return self._site.grpc.edit(edit.tensors())


class InProcess:
    """The parts of a worker in this process: the fallback where no Triton starts."""

    def __init__(self, model: Path, tables: Tables) -> None:
        whole = {**tables, "model": {**tables.get("model", {}), "path": str(model)}}
        self._direct = Direct(config_of(whole))
        self._stages = threading.Lock()

    def prime(self, image: bytes) -> None:
        """Do nothing: the second edit of a picture primes it."""

    def one(self, edit: Edit) -> object:
        with self._stages:
            [job] = self._direct.jobs([(edit.image, edit.mask, edit.prompt)], edit.settings)
        final = self._direct.denoise(job)
        with self._stages:
            return self._direct.decoder.decode(final.latents)

    def run(self, edits: Sequence[Edit], at_once: int) -> Figures:
        begin = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(self.one, edits))
        rate = len(edits) / (time.perf_counter() - begin)
        return {"edits": len(edits), "edits_per_s": round(rate, 4)}

    def close(self) -> None:
        self._direct.engine.close(5.0)


class Rival:
    """diffusers' pipeline: edits at once are one batch.

    Args:
        model: folder.
        name: key of `RIVALS`.
        weights: a rival of the same folder, whose weights are shared; None: load them.
    """

    def __init__(self, model: Path, name: str, weights: Rival | None = None) -> None:
        mode, self.form, is_compiled = RIVALS[name]
        shared = None if weights is None else weights._pipeline
        self._pipeline: Pipeline = Pipeline(str(model), mode, THRESHOLD, weights=shared)
        if self.form == "fp8":
            quantise(self._pipeline.pipe.transformer, "fp8", self._pipeline.device)
        if is_compiled:
            self._pipeline.pipe.transformer.compile_repeated_blocks(fullgraph=True)

    def prime(self, image: bytes) -> None:
        """Do nothing: it keeps nothing of a picture."""

    def one(self, edit: Edit) -> object:
        return self.batch([edit])

    @torch.inference_mode()
    def batch(self, edits: Sequence[Edit]) -> list[tuple[bytes, Figures]]:
        return self._pipeline.pictures([self._pipeline.read(edit.tensors()) for edit in edits])

    def run(self, edits: Sequence[Edit], at_once: int) -> Figures:
        begin, sides = time.perf_counter(), list[int]()
        for start in range(0, len(edits), at_once):
            sides += [meta["side"] for _, meta in self.batch(edits[start : start + at_once])]
        rate = len(edits) / (time.perf_counter() - begin)
        shares = {"edits": len(edits), "side": round(statistics.mean(sides), 1)}
        return {"edits_per_s": round(rate, 4), **shares}


@contextmanager
def through_triton(
    model: Path, folder: Path, tables: Tables, *, mps: bool = False
) -> Iterator[Side]:
    """Serve by a Triton worker while the context lasts; print the ends of its logs if it fails."""
    try:
        with worker_of(model, folder, tables=tables, mps=mps) as site:
            yield TritonSide(site)
    except BaseException:
        for log in sorted(folder.rglob("*.log*")):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            print("\n".join((f"{log.name}:", *lines)), file=sys.stderr, flush=True)
        raise


@contextmanager
def in_process(model: Path, tables: Tables) -> Iterator[Side]:
    side = InProcess(model, tables)
    try:
        yield side
    finally:
        side.close()


def poisson(side: Side, edits: Sequence[Edit], gaps: Sequence[float]) -> list[float]:
    """Return the seconds that each edit takes from its arrival, when they arrive after `gaps`."""
    begin, due = time.perf_counter(), 0.0
    arrivals = []
    for gap in gaps:
        due += gap
        arrivals.append(begin + due)

    def answer(item: tuple[Edit, float]) -> float:
        edit, arrival = item
        time.sleep(max(0.0, arrival - time.perf_counter()))
        side.one(edit)
        return time.perf_counter() - arrival

    with ThreadPoolExecutor(len(edits)) as pool:
        return list(pool.map(answer, zip(edits, arrivals, strict=True)))


def static_batches(
    batch: Callable[[Sequence[Edit]], object],
    edits: Sequence[Edit],
    gaps: Sequence[float],
    most: int,
) -> list[float]:
    """Return the same for a system that takes all waiting edits, at most `most`, as one batch and
    runs it to its end.
    """
    arrivals, due = [], time.perf_counter()
    for gap in gaps:
        due += gap
        arrivals.append(due)
    took: list[float] = []
    while len(took) < len(edits):
        first = len(took)
        time.sleep(max(0.0, arrivals[first] - time.perf_counter()))
        now = time.perf_counter()
        waiting = max(1, sum(arrival <= now for arrival in arrivals[first : first + most]))
        batch(edits[first : first + waiting])
        end = time.perf_counter()
        took += [end - arrival for arrival in arrivals[first : first + waiting]]
    return took
