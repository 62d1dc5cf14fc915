"""Memory and edits per second of two workers that share the encoder and decoder of a service,
compared with two workers with their own. Also a second replica of the service alone, and edits
while a replica is killed.

All processes of workers and service count, Triton's included, by their proportional set sizes:
shared memory, such as torch's libraries, counts once. Edits per second are measured with both
workers' rows full. Each edit has a new picture and a new prompt. Both sides run all the time, and
have their rounds in turn.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from maskserve_benchmarks.timing import rates_in_turn
from maskserve_client import Client, MaskserveError
from maskserve_common.files.stages import STAGES
from maskserve_common.imaging.images import encode_png
from maskserve_common.liveness import signed_in
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

_SIDE = 128
_EDITS = 8
"""Edits of each worker before its memory is measured."""
_AT_ONCE, _OF_A_ROUND = 16, 48
"""Edits in flight, eight at each worker, and edits of a round."""


def stages_memory(model: Path) -> dict[str, float]:
    """The memory that sharing saves, as a share of one encoder's and one decoder's processes, and
    in MB.
    """
    separate_bytes, worker_stage_bytes = _memory(model, 0)
    shared, _ = _memory(model, 1)
    saved = separate_bytes - shared
    return {
        "stages_memory": round(saved / worker_stage_bytes, 3),
        "stages_saved_mb": round(saved / 1e6, 1),
        "stages_of_a_worker_mb": round(worker_stage_bytes / 1e6, 1),
        "stages_own_mb": round(separate_bytes / 1e6, 1),
        "stages_shared_mb": round(shared / 1e6, 1),
    }


def stages_edits(model: Path, rounds: int) -> dict[str, Any]:
    """Edits per second with shared stages, over those with own stages; medians."""
    with _serving(model, 0) as separate, _serving(model, 1) as shared:
        sides = {"own": separate, "shared": shared}
        for side in sides.values():
            _edits_s(side, _AT_ONCE)
        rates = rates_in_turn(sides, lambda side: _edits_s(side, _OF_A_ROUND), rounds)
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    return {
        "stages_edits_ratio": round(medians["shared"] / medians["own"], 3),
        "seconds_stages_edits_s": rates,
    }


def replicas_edits(model: Path, rounds: int, count: int = _OF_A_ROUND) -> dict[str, Any]:
    """Edits per second with two replicas of the stage service, over those with one; medians. Edits
    have one step, so the stages are the bottleneck, and only they are scaled.
    """
    with _serving(model, 1) as one, _serving(model, 2) as two:
        sides = {"one": one, "two": two}
        for side in sides.values():
            _edits_s(side, _AT_ONCE, steps=1)
        rates = rates_in_turn(sides, lambda side: _edits_s(side, count, steps=1), rounds)
    medians = {name: statistics.median(samples) for name, samples in rates.items()}
    return {
        "replicas_edits_ratio": round(medians["two"] / medians["one"], 3),
        "seconds_replicas_edits_s": rates,
    }


def replica_killed(model: Path, seed: int, count: int = _OF_A_ROUND) -> dict[str, Any]:
    """Kill one of two replicas of the stage service while edits run: how many edits have no answer,
    or other bytes than in a run without a kill.
    """
    rng = np.random.default_rng(seed)
    with _serving(model, 2) as supervisor:
        urls = [worker.grpc_url for worker in supervisor.workers]

        def edited(number: int) -> bytes | None:
            try:
                return _edit(
                    urls[number % len(urls)],
                    np.random.default_rng((seed, number)),
                    seed=number,
                    reproducible=True,
                    cache="off",
                )
            except MaskserveError:
                return None

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            expected = list(pool.map(edited, range(count)))
            begin = time.monotonic()
            list(pool.map(edited, range(count)))
            run_s = time.monotonic() - begin
            answers = pool.map(edited, range(count))
            time.sleep(rng.uniform(0.2, 0.6) * run_s)
            killed = supervisor.services[1]
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            pictures = list(answers)
    pairs = zip(pictures, expected, strict=True)
    return {
        "killed_edits": count,
        "killed_lost": pictures.count(None),
        "killed_wrong": sum(one is not None and one != other for one, other in pairs),
    }


def _edits_s(supervisor: Supervisor, count: int, **settings: Any) -> float:
    """Edits per second of `count` edits, half of them at each worker."""
    urls = [worker.grpc_url for worker in supervisor.workers]
    begin = time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rngs = np.random.default_rng().spawn(count)
        edit = partial(_edit, **settings)
        list(pool.map(edit, (urls[number % len(urls)] for number in range(count)), rngs))
    return count / (time.monotonic() - begin)


@contextmanager
def _serving(model: Path, services: int) -> Iterator[Supervisor]:
    with tempfile.TemporaryDirectory() as directory:
        options = ServeOptions(
            model=str(model),
            workers=2,
            services=("encoder,decoder@cpu",) * services,
            base_port=free_base_port(3),
            log_dir=Path(directory),
        )
        with Supervisor(options) as supervisor:
            yield supervisor


def _memory(model: Path, services: int) -> tuple[int, int]:
    """(bytes of all, bytes of one worker's encoder and decoder) after edits at both workers."""
    with _serving(model, services) as supervisor:
        for worker in supervisor.workers:
            rng = np.random.default_rng(0)
            for _ in range(_EDITS):
                _edit(worker.grpc_url, rng)
        processes = [*supervisor.workers, *supervisor.services]
        total_bytes = sum(_tree(process.pid) for process in processes if process.pid is not None)
        models = dict(signed_in(supervisor.workers[0].config.runtime_dir))
        return total_bytes, sum(_pss(models[stage]) for stage in STAGES)


def _edit(url: str, rng: np.random.Generator, *, steps: int | None = None, **more: Any) -> bytes:
    mask = np.zeros((_SIDE, _SIDE), np.uint8)
    mask[32:80, 40:96] = 255
    picture = rng.integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    prompt = f"a red star {rng.integers(2**32)}"
    with Client(url) as client:
        result = client.edit(
            encode_png(picture),
            encode_png(mask),
            prompt,
            num_inference_steps=steps,
            timeout=600,
            **more,
        )
    return result.encoded


def _tree(pid: int) -> int:
    return sum(_pss(process.pid) for process in [psutil.Process(pid), *_children(pid)])


def _children(pid: int) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return children


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)
