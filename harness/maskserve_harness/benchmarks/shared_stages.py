"""Memory of two workers whose encoder and decoder a service runs, beside two that have their own.

All processes of workers and service are counted, Triton's among them, by their proportional set
sizes: what processes share, such as torch's libraries, counts once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import psutil

from maskserve_client.client import Client
from maskserve_core.imaging.images import encode_png
from maskserve_core.worker.liveness import signed_in
from maskserve_core.worker.stages import STAGES
from maskserve_serving.options import ServeOptions
from maskserve_serving.ports import free_base_port
from maskserve_serving.supervisor import Supervisor

_SIDE = 128
_EDITS = 8
"""Of each worker, before it is looked at."""


def stages_memory(model: Path) -> dict[str, float]:
    """What sharing saves, as a share of one encoder's and one decoder's processes; and in MB."""
    own, both = _held(model, "")
    shared, _ = _held(model, "cpu")
    saved = own - shared
    return {
        "stages_memory": round(saved / both, 3),
        "stages_saved_mb": round(saved / 1e6, 1),
        "stages_of_a_worker_mb": round(both / 1e6, 1),
        "stages_own_mb": round(own / 1e6, 1),
        "stages_shared_mb": round(shared / 1e6, 1),
    }


def _held(model: Path, device: str) -> tuple[int, int]:
    """(bytes of all, bytes of one worker's encoder and decoder) once both workers have edited."""
    with tempfile.TemporaryDirectory() as kept:
        options = ServeOptions(
            model=str(model),
            workers=2,
            stages_device=device,
            base_port=free_base_port(2),
            log_dir=Path(kept),
        )
        with Supervisor(options) as supervisor:
            for worker in supervisor.workers:
                _edit(worker.grpc_url)
            processes = [*supervisor.workers, *supervisor.services]
            every = sum(_tree(each.pid) for each in processes if each.pid is not None)
            models = dict(signed_in(supervisor.workers[0].config.runtime_dir))
            return every, sum(_pss(models[stage]) for stage in STAGES)


def _edit(url: str) -> None:
    rng = np.random.default_rng(0)
    mask = np.zeros((_SIDE, _SIDE), np.uint8)
    mask[32:80, 40:96] = 255
    with Client(url) as client:
        for number in range(_EDITS):
            picture = rng.integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
            client.edit(encode_png(picture), encode_png(mask), f"a red star {number}", timeout=600)


def _tree(pid: int) -> int:
    return sum(_pss(each.pid) for each in [psutil.Process(pid), *_children(pid)])


def _children(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def _pss(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)
