"""diffusers' UNet with refresh steps, implemented the slow way. All tokens and maps are computed.
The cached ones are then replaced by values on the line through two dense calls, or on a curve that
bends from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.support.lookahead_flux import parabola


class Ahead:
    """Calls of a pipeline's UNet at the latents and timesteps of later steps.

    Args:
        scheduler: the pipeline's scheduler. Its noised images are recorded.
        steps: step → the later step whose lookahead it computes first.
        guidance: guidance_scale.
        inside: [h, w] bool, where latents are the edit's; None: everywhere.
    """

    def __init__(
        self, scheduler: Any, steps: Mapping[int, int], guidance: float, inside: Tensor | None
    ) -> None:
        self.steps, self._scheduler = steps, scheduler
        self._guidance, self._inside = guidance, inside
        self._images: tuple[Tensor, Tensor] | None = None
        noised = scheduler.add_noise

        def add_noise(image: Tensor, noise: Tensor, timesteps: Tensor) -> Any:
            self._images = image, noise
            return noised(image, noise, timesteps)

        scheduler.add_noise = add_noise

    def sample(
        self, to: int, last: Tensor, answer: Tensor, timestep: float
    ) -> tuple[Tensor, float]:
        """The model input of a later step, and its timestep, by one step of DDIM.

        Args:
            to: the later step.
            last: [passes, in_channels, h, w] the last model input.
            answer: [passes, C, h, w] the model's answer to `last`.
            timestep: the timestep of `last`.
        """
        then = float(self._scheduler.timesteps[to])
        (signal, share), (new, rest) = (self._levels(at) for at in (timestep, then))
        guided = self.guided(answer)
        latents = last[0, : answer.shape[1]]
        if self._scheduler.config.prediction_type == "v_prediction":
            clean, noise = signal * latents - share * guided, signal * guided + share * latents
        else:
            clean, noise = (latents - share * guided) / signal, guided
        moved = new * clean + rest * noise
        if self._inside is not None:
            assert self._images is not None
            image, first = self._images
            moved = torch.where(self._inside, moved, (new * image + rest * first)[0])
        whole = last.clone()
        whole[:, : answer.shape[1]] = moved
        return whole, then

    def velocity(self, sample: Tensor, answer: Tensor, timestep: float) -> Tensor:
        """[C, h, w] guided answer to a model input as velocity: signal · noise - share · clean."""
        guided, latents = self.guided(answer), sample[0, : answer.shape[1]]
        if self._scheduler.config.prediction_type == "v_prediction":
            return guided
        signal, share = self._levels(timestep)
        clean = (latents - share * guided) / signal
        return signal * guided - share * clean

    def guided(self, answer: Tensor) -> Tensor:
        """[C, h, w] of the model's [passes, C, h, w]."""
        if len(answer) == 1:
            return answer[0]
        return answer[0] + self._guidance * (answer[1] - answer[0])

    def _levels(self, timestep: float) -> tuple[float, float]:
        alphas_cumprod = float(self._scheduler.alphas_cumprod[int(timestep)])
        return alphas_cumprod**0.5, (1 - alphas_cumprod) ** 0.5


class LookaheadUnet:
    """Hooks of a UNet2DConditionModel that is called once per step.

    Args:
        model: the UNet.
        active: level → ids of the tokens that are computed at each step.
        dense: steps that compute all tokens.
        halo: positions round the box of the computed tokens that are convolved at each step.
        shape: (height, width) of the latents.
        ahead: lookahead calls, which are also dense and run first; None: none.
        second_order: whether tokens follow a curve through three calls instead of the line.
    """

    def __init__(
        self,
        model: Any,
        active: Mapping[int, NDArray[np.int64]],
        dense: set[int],
        halo: int,
        shape: tuple[int, int],
        ahead: Ahead | None = None,
        *,
        second_order: bool = False,
    ) -> None:
        self.second_order = second_order
        self.dense, self.step, self.timestep = dense, -1, 0.0
        self.ahead, self.looks = ahead, False
        self.last: tuple[Tensor, Tensor, float] | None = None
        self.residuals: dict[str, Any] = {}
        """A ControlNet's residuals for the lookahead call."""
        self.refreshed: dict[str, list[tuple[float, Tensor]]] = {}
        self.foreseen: dict[int, Tensor] = {}
        """Velocities of the lookaheads, by refresh step."""
        self.errors: dict[int, float] = {}
        """Relative difference between these and the model's, over the computed tokens."""
        self.idle: dict[int, Tensor] = {}
        self.boxes: dict[tuple[int, int], Tensor] = {}
        for level, ids in active.items():
            size = (-(-shape[0] // 2**level), -(-shape[1] // 2**level))
            idle = torch.ones(size[0] * size[1], dtype=torch.bool)
            idle[torch.from_numpy(ids)] = False
            self.idle[len(idle)] = idle
            rows, columns = np.divmod(ids, size[1])
            box = torch.zeros(size, dtype=torch.bool)
            top, maximum = max(0, rows.min() - halo), max(0, columns.min() - halo)
            box[top : rows.max() + 1 + halo, maximum : columns.max() + 1 + halo] = True
            self.boxes[size] = box
        self._hook(model)

    @property
    def anchor(self) -> bool:
        return self.looks or self.step in self.dense

    def line(self, name: str, now: Tensor, *, second_order: bool = False) -> Tensor:
        """The value that replaces a tensor. At a refresh step it is the tensor itself. Else it is
        the value on the line through the last two, or on the curve through the last three with
        `second_order`.
        """
        points = self.refreshed.setdefault(name, [])
        if self.anchor:
            points.append((self.timestep, now.clone()))
            return now
        (before, first), (last, second) = (points * 2)[-2:] if len(points) < 2 else points[-2:]
        times = 0.0 if before == last else (last - self.timestep) / (before - last)
        straight: Tensor = second + times * (second - first)
        if not second_order or len(points) < 3:
            return straight
        curve, share = parabola(self.timestep, points[-3:])
        return straight + share * (curve - straight)

    def _hook(self, model: Any) -> None:
        from diffusers.models.transformers.transformer_2d import Transformer2DModel

        for name, module in model.named_modules():
            if name.endswith("attn1"):
                module.to_k.register_forward_hook(self._tokens(f"{name}.k"))
                module.to_v.register_forward_hook(self._tokens(f"{name}.v"))
            elif isinstance(module, Transformer2DModel):
                module.register_forward_hook(self._stack(name), with_kwargs=True)
            elif isinstance(module, nn.GroupNorm):
                module.register_forward_hook(self._norm(name))
            elif isinstance(module, nn.Conv2d) and module.stride == (2, 2):
                module.register_forward_pre_hook(self._strided(name))
        self.whole, model.forward = model.forward, self.forward

    def answered(self, sample: Tensor, timestep: float, *args: Any, **named: Any) -> Any:
        self.timestep = timestep
        (answer,) = self.whole(sample, timestep, *args, **{**named, "return_dict": False})
        box = self.boxes[tuple(answer.shape[2:])]
        return torch.where(box, answer, self.line("answer", answer))

    def look(self, *args: Any, **named: Any) -> Any:
        """Make a lookahead call with the step's other arguments."""
        assert self.ahead is not None
        assert self.last is not None
        self.looks = True
        refresh_step = self.ahead.steps[self.step]
        sample, timestep = self.ahead.sample(refresh_step, *self.last)
        answered = self.answered(sample, timestep, *args, **named)
        self.looks = False
        if isinstance(answered, Tensor):  # a ControlNet's answers are residuals
            self.foreseen[refresh_step] = self.ahead.velocity(sample, answered, timestep)
        return answered

    def forward(self, sample: Tensor, timestep: Any, *args: Any, **named: Any) -> Any:
        self.step += 1
        if self.ahead is not None and self.step in self.ahead.steps:
            self.look(*args, **{**named, **self.residuals})
        answer = self.answered(sample, float(timestep), *args, **named)
        self.last = sample, answer, float(timestep)
        if self.ahead is not None and self.step in self.foreseen:
            computed = ~self.idle[answer.shape[2] * answer.shape[3]].view(answer.shape[2:])
            velocity = self.ahead.velocity(sample, answer, float(timestep)) * computed
            missed = velocity - self.foreseen[self.step] * computed
            self.errors[self.step] = float(missed.norm() / velocity.norm())
        return (answer,)

    def _tokens(self, name: str) -> Any:
        def hook(_: Any, __: Any, out: Tensor) -> Tensor:
            line = self.line(name, out, second_order=self.second_order)
            idle = self.idle[out.shape[1]]
            return torch.where(idle[:, None], line, out)

        return hook

    def _stack(self, name: str) -> Any:
        def hook(_: Any, args: Any, named: Any, out: Any) -> Any:
            x = args[0] if args else named["hidden_states"]
            changed = x + self.line(name, out[0] - x, second_order=self.second_order)
            idle = self.idle[x.shape[2] * x.shape[3]].view(x.shape[2:])
            return (torch.where(idle, changed, out[0]),)

        return hook

    def _norm(self, name: str) -> Any:
        """A hook that normalises with the means and variances of the box, and with the predicted
        ones outside of it.
        """

        def hook(norm: nn.GroupNorm, args: Any, out: Tensor) -> Tensor:
            x: Any = args[0]
            box = self.boxes[tuple(x.shape[2:])]
            if bool(box.all()):
                return out
            mixed: Any = torch.where(box, x, self.line(name, x))
            inside, outside = (
                x.unflatten(1, (norm.num_groups, -1))[..., where].flatten(2).double()
                for where in (box, ~box)
            )
            moments = torch.stack((outside.mean(2), outside.var(2, correction=0)))
            mean, variance = self.line(f"{name}.moments", moments)
            variance = variance.clamp_min(0)
            share = float(box.sum()) / box.numel()
            whole_mean = share * inside.mean(2) + (1 - share) * mean
            square = share * (inside**2).mean(2) + (1 - share) * (variance + mean**2)
            grouped = mixed.unflatten(1, (norm.num_groups, -1)).double()
            at = (slice(None), slice(None), None, None, None)
            normed = (grouped - whole_mean[at]) / (square - whole_mean**2 + norm.eps)[at].sqrt()
            flat: Tensor = normed.flatten(1, 2).to(x.dtype)
            return flat * norm.weight[:, None, None] + norm.bias[:, None, None]

        return hook

    def _strided(self, name: str) -> Any:
        def hook(_: Any, args: Any) -> Any:
            box = self.boxes[tuple(args[0].shape[2:])]
            return (torch.where(box, args[0], self.line(name, args[0])), *args[1:])

        return hook


class LookaheadNet(LookaheadUnet):
    """The same hooks for the UNet's ControlNet. It is called before the UNet and convolves the
    whole picture.

    Args:
        net: the ControlNet.
        base: hooks of the UNet.
        active: level → ids of the tokens that are computed at each step.
        dense: steps that compute all tokens.
        shape: (height, width) of the latents.
    """

    def __init__(
        self,
        net: Any,
        base: LookaheadUnet,
        active: Mapping[int, NDArray[np.int64]],
        dense: set[int],
        shape: tuple[int, int],
    ) -> None:
        super().__init__(net, active, dense, max(shape), shape, base.ahead)
        self._base = base

    def _norm(self, name: str) -> Any:
        return lambda norm, args, out: None

    def _strided(self, name: str) -> Any:
        return lambda conv, args: None

    def answered(self, sample: Tensor, timestep: float, *args: Any, **named: Any) -> Any:
        self.timestep = timestep
        return self.whole(sample[:, :4], timestep, *args, **named)

    def forward(self, sample: Tensor, timestep: Any, *args: Any, **named: Any) -> Any:
        self.step += 1
        if self.ahead is not None and self.step in self.ahead.steps:
            self.last = self._base.last
            down, middle = self.look(*args, **named)
            self._base.residuals = {
                "down_block_additional_residuals": down,
                "mid_block_additional_residual": middle,
            }
        return self.answered(sample, float(timestep), *args, **named)
