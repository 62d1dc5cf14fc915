"""The transformer's training loop: small windows first, whole pictures last; resumable."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from maskserve_training.attention import MatmulAttention
from maskserve_training.data import KINDS
from maskserve_training.exchange import Exchange
from maskserve_training.hints import Hints, front_of
from maskserve_training.sampler import Sampler
from maskserve_training.transformer import loss_of, optimisers

TOKENS_PER_BATCH: Final = 3072  # image and text tokens together
_WINDOWS: Final[tuple[int | None, ...]] = (6, 8, 11, None)  # tokens a side; None = whole picture


class _Phase(NamedTuple):
    """What batches hold from some progress on."""

    since: float
    objects: float
    """Share of steps that only learn what objects look like."""
    hints: float
    """Weight of the hints' cross entropies beside the flow-matching loss."""
    windows: tuple[float, ...]
    """Shares of the other batches by window."""
    kinds: tuple[float, ...]
    """The same by kind of KINDS."""


_PHASES: Final = (
    _Phase(0.0, 0.8, 0.2, (0.85, 0.15, 0.0, 0.0), (0.4, 0.55, 0.05)),
    _Phase(0.1, 0.3, 0.2, (0.85, 0.15, 0.0, 0.0), (0.25, 0.7, 0.05)),
    _Phase(0.45, 0.1, 0.1, (0.5, 0.3, 0.15, 0.05), (0.4, 0.45, 0.15)),
    _Phase(0.75, 0.0, 0.05, (0.1, 0.3, 0.3, 0.3), (0.45, 0.35, 0.2)),
)


@dataclass(frozen=True)
class Plan:
    """What to do and for how long."""

    folder: Path
    """Where checkpoints and exchanged weights lie."""
    seconds: float
    """CPU time of this worker in all, of this and resumed runs: a paused or starved one waits."""
    rate: float = 3e-3
    """Peak learning rate."""
    worker: int = 0
    workers: int = 1
    save_every: float = 120.0
    """Seconds between checkpoints."""
    average_every: int = 10
    """Steps between exchanges of weights."""


def checkpoint_path(folder: Path, worker: int) -> Path:
    """Where `worker` keeps its state."""
    return folder / f"worker{worker}.pt"


def train(
    model: FluxTransformer2DModel, sampler: Sampler, masked_channels: int, plan: Plan
) -> None:
    """Train `model` in place until `plan.seconds` have been spent, saving on the way."""
    generator = torch.Generator().manual_seed(100 + plan.worker + int(time.time()))
    rng = np.random.default_rng([plan.worker, int(time.time())])
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    hints = Hints(model)
    trained = nn.ModuleDict({"model": model, "hints": hints})
    opts = optimisers(trained, plan.rate)
    path = checkpoint_path(plan.folder, plan.worker)
    spent, step, samples = 0.0, 0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        trained.load_state_dict(state["trained"])
        ema.load_state_dict(state["ema"])
        for opt, saved in zip(opts, state["optimisers"], strict=True):
            opt.load_state_dict(saved)
        spent, step, samples = state["spent"], state["step"], state["samples"]
    exchange = Exchange(plan.folder, plan.worker, plan.workers, trained)
    cpu, saved_at = time.process_time(), time.monotonic()
    losses: list[float] = []
    told: dict[str, list[float]] = defaultdict(list)
    model.train()
    model.set_attn_processor(MatmulAttention())
    front = front_of(model)
    while spent < plan.seconds:
        progress = spent / plan.seconds
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = plan.rate * _rate_factor(step, progress)
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
        (hint if objects else loss + phase.hints * hint).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        samples += 0 if objects else len(batch.clean)
        _follow(ema, model, min(0.998, step / (step + 20)))
        if plan.workers > 1 and step % plan.average_every == 0:
            exchange.average()
        if not objects:
            losses.append(loss.item())
        if bool((batch.seen >= 0).any()):  # far objects: guessed shapes are right in a sixth
            for head, share in hints.shapes_right.items():
                told[head].append(share)
        now = time.process_time()
        spent, cpu = spent + now - cpu, now
        if step % 50 == 0:
            print(
                f"{time.strftime('%H:%M:%S')} train {progress:6.1%} step {step} samples {samples}"
                f" loss {np.mean(losses[-200:]):.4f} last {np.mean(losses[-50:]):.4f}"
                " shapes told: "
                + ", ".join(f"{head} {np.mean(last[-30:]):.0%}" for head, last in told.items()),
                flush=True,
            )
        if time.monotonic() - saved_at > plan.save_every or spent >= plan.seconds:
            saved_at = time.monotonic()
            torch.save(
                {
                    "trained": trained.state_dict(),
                    "ema": ema.state_dict(),
                    "optimisers": [opt.state_dict() for opt in opts],
                    "spent": spent,
                    "step": step,
                    "samples": samples,
                },
                path.with_suffix(".tmp"),
            )
            path.with_suffix(".tmp").replace(path)


def merged_ema(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """The mean of all workers' averaged weights, and the samples they saw together."""
    states = [torch.load(p, weights_only=True) for p in sorted(folder.glob("worker*.pt"))]
    if not states:
        raise FileNotFoundError(f"no checkpoint under {folder}")
    weights = {
        name: torch.stack([s["ema"][name] for s in states]).mean(0) for name in states[0]["ema"]
    }
    return weights, sum(int(s["samples"]) for s in states)


def _rate_factor(step: int, progress: float) -> float:
    """Warm-up over 50 steps, flat, then linear decay over the last 45 %."""
    return min(1.0, (step + 1) / 50) * max(0.01, min(1.0, (1 - progress) / 0.45))


def _pick(rng: np.random.Generator, phase: _Phase) -> tuple[str, int | None]:
    """A kind of scenes and a window for the next batch."""
    kind = KINDS[int(rng.choice(len(KINDS), p=phase.kinds))]
    return kind, _WINDOWS[int(rng.choice(len(_WINDOWS), p=phase.windows))]


@torch.no_grad()
def _follow(ema: nn.Module, model: nn.Module, decay: float) -> None:
    for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
