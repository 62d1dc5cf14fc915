"""One rank of diffusers' own sequence parallelism on CPUs: a process that runs a pipeline.

    python -m tests.support.diffusers_parallel RANK RANKS FOLDER

FOLDER has `model` (a FluxFillPipeline) and `case` (a pickled `Case`); rank 0 leaves the latents in
`latents.npy`.

diffusers 0.42 refuses machines without an accelerator, and nothing but that: for the rank's device
`_resolve_parallel_config` divides by `torch.accelerator.device_count()`, which is 0. Nothing can be
given instead (a mesh of one's own comes after that line), so here the count is 1. Attention by
torch (`native`) takes CPU tensors and gloo as they are.
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
        # Any number of tokens and heads: else both have to divide.
        config=ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=True)
    )
    torch.accelerator.device_count = counted
    latents = diffusers_latents(pipeline, pickle.loads((folder / "case").read_bytes()))
    if rank == 0:
        np.save(folder / "latents.npy", latents)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
