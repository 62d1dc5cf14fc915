"""The demo UNet's training loop: small windows first, whole pictures last; resumable."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from maskserve_training.transformer import optimisers
from maskserve_training.unet import loss_of
from maskserve_training.unet_data import Sampler

LATENTS_PER_BATCH: Final = 12_288
_WINDOWS: Final[tuple[int | None, ...]] = (8, 11, None)  # tokens a side; None = whole picture
_MIX: Final = (  # from this progress on, the windows' shares of batches
    (0.0, (0.9, 0.1, 0.0)),
    (0.4, (0.6, 0.3, 0.1)),
    (0.7, (0.3, 0.3, 0.4)),
    (0.9, (0.1, 0.2, 0.7)),  # GroupNorm reads the whole picture: what is served must be trained
)
_SAVE_EVERY: Final = 90.0  # seconds of the clock


def train(
    model: UNet2DConditionModel,
    sampler: DDIMScheduler,
    data: Sampler,
    path: Path,
    seconds: float,
    rate: float = 2e-3,
) -> None:
    """Train `model` in place, saving to `path` on the way.

    Args:
        model: to train.
        sampler: its noise schedule.
        data: where batches come from.
        path: of the checkpoint; a run goes on from it if it is there.
        seconds: CPU time in all, of this and resumed runs: a paused or starved one waits.
        rate: peak learning rate.
    """
    rng = np.random.default_rng(int(time.time()))
    generator = torch.Generator().manual_seed(int(time.time()))
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    opts = optimisers(model, rate)
    spent, step, samples = 0.0, 0, 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        ema.load_state_dict(state["ema"])
        for opt, saved in zip(opts, state["optimisers"], strict=True):
            opt.load_state_dict(saved)
        spent, step, samples = state["spent"], state["step"], state["samples"]
    model.train()
    # PyTorch's fused attention is slow backwards on CPUs; plain matrix products are not.
    model.set_attn_processor(AttnProcessor())
    losses: list[float] = []
    last, saved_at = time.process_time(), time.monotonic()
    while spent < seconds:
        progress = spent / seconds
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = rate * _rate_factor(step, progress)
        window = _pick_window(rng, progress)
        side = 32 if window is None else 2 * window
        batch = data.draw(LATENTS_PER_BATCH // side**2, window)
        loss = loss_of(model, batch, sampler, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        samples += len(batch.clean)
        decay = min(0.998, step / (step + 20))
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
        losses.append(loss.item())
        now = time.process_time()
        spent, last = spent + now - last, now
        if step % 20 == 0:
            print(
                f"{time.strftime('%H:%M:%S')} train {progress:6.1%} step {step} samples {samples}"
                f" cpu {spent:.0f} s loss {np.mean(losses[-100:]):.4f}",
                flush=True,
            )
        if time.monotonic() - saved_at > _SAVE_EVERY or spent >= seconds:
            saved_at = time.monotonic()
            state = {
                "model": model.state_dict(),
                "ema": ema.state_dict(),
                "optimisers": [opt.state_dict() for opt in opts],
                "spent": spent,
                "step": step,
                "samples": samples,
            }
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


def _rate_factor(step: int, progress: float) -> float:
    """Warm-up over 100 steps, flat, then linear decay over the last 45 %."""
    return min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - progress) / 0.45))


def _pick_window(rng: np.random.Generator, progress: float) -> int | None:
    shares = next(mix for begin, mix in reversed(_MIX) if progress >= begin)
    return _WINDOWS[int(rng.choice(len(_WINDOWS), p=shares))]
