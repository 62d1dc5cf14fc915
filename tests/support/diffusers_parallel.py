"""One rank of diffusers' own sequence parallelism on CPUs: a process that runs a pipeline.

    python -m tests.support.diffusers_parallel RANK RANKS FOLDER

FOLDER has `model` (a FluxFillPipeline) and `case` (a pickled `Case`). Rank 0 writes the latents to
`latents.npy`.

diffusers 0.42 fails on machines without an accelerator, at one place only:
`_resolve_parallel_config` divides by `torch.accelerator.device_count()`, which is 0, to get the
rank's device. A caller's own mesh does not help, because it is used after that line. So the count
is 1 here. Attention by torch (`native`) takes CPU tensors and gloo as they are.
"""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from tests.fakes.pipelines import diffusers_latents


def main(rank: int, ranks: int, folder: Path) -> None:
    from diffusers import ContextParallelConfig, FluxFillPipeline

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'ranks'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    pipeline: Any = FluxFillPipeline.from_pretrained(folder / "model")
    pipeline.set_progress_bar_config(disable=True)
    counted = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    pipeline.transformer.enable_parallelism(
        # This allows any number of tokens and heads; else the ranks must divide both.
        config=ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=True)
    )
    torch.accelerator.device_count = counted
    latents = diffusers_latents(pipeline, pickle.loads((folder / "case").read_bytes()))
    if rank == 0:
        np.save(folder / "latents.npy", latents)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
