"""The training loop of all demo models: it runs for a given CPU time and can resume."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from maskserve_benchmarks.checkout import CHECKOUT


class Step(NamedTuple):
    """The loss and the samples of one step."""

    loss: torch.Tensor
    samples: int = 0
    """Samples of the step; the checkpoint counts them."""
    value: float | None = None
    """The value whose mean is printed; None: this step prints none."""


@dataclass
class Training:
    """The module to train, its learning rate and its time."""

    name: str
    """Name in the output."""
    module: nn.Module
    """Module to train. Its parameters that need gradients learn."""
    optimisers: Sequence[torch.optim.Optimizer]
    seconds: float
    """CPU time of this process in all, with resumed runs. Pauses do not count."""
    rate: float
    """Peak learning rate."""
    warm_up: int = 50
    """Steps until the peak learning rate is reached."""
    decay: float = 0.45
    """Last share of the time, in which the rate falls to almost nothing."""
    averaged: nn.Module | None = None
    """Part of `module` whose mean over time is kept."""
    checkpoint: Path | None = None
    """File of the checkpoint. An existing one is resumed."""
    save: Callable[[], None] = lambda: None
    """Called at every checkpoint and at the end."""
    save_every: float = 120.0
    """Seconds of wall-clock time between checkpoints."""
    report_every: int = 50
    """Steps between lines of output."""
    report_text: Callable[[], str] = lambda: ""
    """Further text for each line of output."""

    def run(self, take: Callable[[int, float], Step]) -> None:
        """Train.

        Args:
            take: draws a step's samples. It gets the step's number and the progress from 0 to 1.
        """
        ema = copy.deepcopy(self.averaged)
        if ema is not None:
            ema.eval().requires_grad_(False)
        parts: dict[str, Any] = {"learnt": self.module}
        parts |= {} if ema is None else {"ema": ema}
        parts |= {f"optimiser{i}": optimiser for i, optimiser in enumerate(self.optimisers)}
        spent, step, samples = self._resumed(parts)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        last, saved_at = time.process_time(), time.monotonic()
        losses: list[float] = []
        while spent < self.seconds:
            progress = spent / self.seconds
            for group in (group for opt in self.optimisers for group in opt.param_groups):
                group["lr"] = self.rate * self._factor(step, progress)
            outcome = take(step, progress)
            outcome.loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for opt in self.optimisers:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step, samples = step + 1, samples + outcome.samples
            if ema is not None and self.averaged is not None:
                _follow(ema, self.averaged, min(0.998, step / (step + 20)))
            losses += [] if outcome.value is None else [outcome.value]
            now_s = time.process_time()
            spent, last = spent + now_s - last, now_s
            if step % self.report_every == 0:
                print(
                    f"{time.strftime('%H:%M:%S')} {self.name} {progress:6.1%} step {step} "
                    f"samples {samples} loss {np.mean(losses[-200:]):.4f} "
                    f"last {np.mean(losses[-50:]):.4f}{self.report_text()}",
                    flush=True,
                )
            if time.monotonic() - saved_at > self.save_every or spent >= self.seconds:
                saved_at = time.monotonic()
                self._write(parts, spent, step, samples)
                self.save()

    def _factor(self, step: int, progress: float) -> float:
        """Factor of the learning rate: warm-up, flat, then a linear decay."""
        return min(1.0, (step + 1) / self.warm_up) * max(
            0.01, min(1.0, (1 - progress) / self.decay)
        )

    def _resumed(self, parts: dict[str, Any]) -> tuple[float, int, int]:
        """Load the parts from the checkpoint. Returns its CPU seconds, steps and samples."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return 0.0, 0, 0
        state = torch.load(self.checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return state["spent"], state["step"], state["samples"]

    def _write(self, parts: dict[str, Any], spent: float, step: int, samples: int) -> None:
        if self.checkpoint is None:
            return
        state = {name: part.state_dict() for name, part in parts.items()}
        aside = self.checkpoint.with_suffix(".tmp")
        torch.save({**state, "spent": spent, "step": step, "samples": samples}, aside)
        aside.replace(self.checkpoint)


def node_options(
    about: str, folder: Path, *, minutes: float, rate: float
) -> argparse.ArgumentParser:
    """The options of a node server model's training. The checkpoint has the folder's name.

    Args:
        about: a line about the command.
        folder: of the written model.
        minutes: of CPU time, in all.
        rate: peak learning rate.
    """
    parser = argparse.ArgumentParser(description=about)
    add, checkpoint = parser.add_argument, CHECKOUT / ".cache" / f"{folder.name}.pt"
    add("--minutes", type=float, default=minutes, help="CPU time in all")
    add("--rate", type=float, default=rate, help="peak learning rate")
    add("--out", type=Path, default=folder, help="folder to write to")
    add("--checkpoint", type=Path, default=checkpoint, help="to go on from")
    return parser


@torch.no_grad()
def _follow(ema: nn.Module, model: nn.Module, decay: float) -> None:
    for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
