"""The loop in which an adapter beside a frozen demo model learns: a LoRA or a ControlNet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_SIZES: Final = ((128, 128), (128, 128), (96, 160), (160, 96))
"""(height, width) of pictures to draw from."""
_SAVE_EVERY: Final = 120.0  # seconds of the clock


def train_adapter(
    name: str,
    learnt: Sequence[torch.nn.Parameter],
    loss_of: Callable[[np.random.Generator, tuple[int, int], torch.Generator], Tensor],
    save: Callable[[], None],
    *,
    seed: int,
    seconds: float,
    rate: float,
) -> None:
    """Train for so much CPU time, and save on the way and at the end.

    Args:
        name: in what is printed.
        learnt: parameters of the adapter.
        loss_of: of a batch that it draws, of pictures of this size (height, width).
        save: writes the adapter.
        seed: of what is drawn.
        seconds: of this process's CPU time.
        rate: peak learning rate.
    """
    optimiser = torch.optim.AdamW(learnt, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    begin, step, losses, saved_at = time.process_time(), 0, list[float](), time.monotonic()
    while (spent := time.process_time() - begin) < seconds:
        progress = spent / seconds
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, max(0.02, (1 - progress) / 0.5))
        size = _SIZES[int(rng.integers(len(_SIZES)))]
        loss = loss_of(rng, size, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            mean = float(np.mean(losses[-100:]))
            print(f"{name} {progress:6.1%} step {step} loss {mean:.4f}", flush=True)
        if time.monotonic() - saved_at > _SAVE_EVERY:
            save()
            saved_at = time.monotonic()
    save()
