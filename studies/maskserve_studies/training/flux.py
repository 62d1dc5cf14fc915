"""The training of the demo model's transformer: small windows first, whole pictures last."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from maskserve_studies.training.attention import MatmulAttention
from maskserve_studies.training.data import KINDS
from maskserve_studies.training.exchange import Exchange
from maskserve_studies.training.hints import Hints, front_of
from maskserve_studies.training.loop import Step, Training
from maskserve_studies.training.sampler import Sampler
from maskserve_studies.training.transformer import loss_of, optimisers

TOKENS_PER_BATCH: Final = 3072  # image and text tokens together
_AVERAGE_EVERY: Final = 10  # steps between exchanges of weights
_WINDOWS: Final[tuple[int | None, ...]] = (6, 8, 11, None)  # tokens a side; None = whole picture


class _Phase(NamedTuple):
    """The content of batches from some progress on."""

    since: float
    objects: float
    """Share of steps that only learn the look of objects."""
    hints: float
    """Weight of the hints' cross entropies beside the flow-matching loss."""
    windows: tuple[float, ...]
    """Shares of the other batches by window."""
    kinds: tuple[float, ...]
    """Shares of the other batches by kind of KINDS."""


_PHASES: Final = (
    _Phase(0.0, 0.8, 0.2, (0.85, 0.15, 0.0, 0.0), (0.4, 0.55, 0.05)),
    _Phase(0.1, 0.3, 0.2, (0.85, 0.15, 0.0, 0.0), (0.25, 0.7, 0.05)),
    _Phase(0.45, 0.1, 0.1, (0.5, 0.3, 0.15, 0.05), (0.4, 0.45, 0.15)),
    _Phase(0.75, 0.0, 0.05, (0.1, 0.3, 0.3, 0.3), (0.45, 0.35, 0.2)),
)


def train(
    model: FluxTransformer2DModel,
    sampler: Sampler,
    masked_channels: int,
    folder: Path,
    *,
    seconds: float,
    rate: float,
    worker: int = 0,
    workers: int = 1,
) -> None:
    """Train `model` in place.

    Args:
        model: to train.
        sampler: where batches come from.
        masked_channels: number of the condition's last channels, which hold the mask's pixels.
        folder: where checkpoints and exchanged weights lie.
        seconds: CPU time of this process in all, with resumed runs.
        rate: peak learning rate.
        worker: number of this process among
        workers: number of processes that average their weights.
    """
    generator = torch.Generator().manual_seed(100 + worker + int(time.time()))
    rng = np.random.default_rng([worker, int(time.time())])
    hints = Hints(model)
    module = nn.ModuleDict({"model": model, "hints": hints})
    exchange = Exchange(folder, worker, workers, module)
    shape_shares: dict[str, list[float]] = defaultdict(list)
    model.train()
    model.set_attn_processor(MatmulAttention())
    front = front_of(model)

    def take(step: int, progress: float) -> Step:
        if workers > 1 and step and step % _AVERAGE_EVERY == 0:
            exchange.average()
        phase = next(phase for phase in reversed(_PHASES) if progress >= phase.since)
        objects = rng.random() < phase.objects
        if objects:
            batch = sampler.draw_objects(TOKENS_PER_BATCH)
        else:
            batch = sampler.draw(TOKENS_PER_BATCH, *_pick(rng, phase))
        active = batch.condition[..., -masked_channels:].amax(dim=2)
        loss = loss_of(front if objects else model, batch, active, generator)
        hints.shapes_right.clear()
        hint = hints.loss(batch, active)
        if bool((batch.token_objects >= 0).any()):  # far objects; one guess in six is right
            for head, share in hints.shapes_right.items():
                shape_shares[head].append(share)
        if objects:
            return Step(hint)
        return Step(loss + phase.hints * hint, len(batch.clean), loss.item())

    def shape_report() -> str:
        shares = (f"{head} {np.mean(last[-30:]):.0%}" for head, last in shape_shares.items())
        return " shapes right: " + ", ".join(shares)

    Training(
        "transformer",
        module,
        optimisers(module, rate),
        seconds,
        rate,
        averaged=model,
        checkpoint=folder / f"worker{worker}.pt",
        report_text=shape_report,
    ).run(take)


def merged_ema(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The mean of all workers' averaged weights, and the number of samples that they
    saw together.
    """
    states = [torch.load(p, weights_only=True) for p in sorted(folder.glob("worker*.pt"))]
    if not states:
        raise FileNotFoundError(f"no checkpoint under {folder}")
    weights = {
        name: torch.stack([s["ema"][name] for s in states]).mean(0) for name in states[0]["ema"]
    }
    return weights, sum(int(s["samples"]) for s in states)


def _pick(rng: np.random.Generator, phase: _Phase) -> tuple[str, int | None]:
    """Draw a kind of scenes and a window for the next batch."""
    kind = KINDS[int(rng.choice(len(KINDS), p=phase.kinds))]
    return kind, _WINDOWS[int(rng.choice(len(_WINDOWS), p=phase.windows))]
