"""diffusers' FLUX pipelines with refresh steps, implemented the slow way. All tokens are computed.
The cached tokens are then replaced by values on the line through two dense calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.step_cache import RefreshSchedule
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import FlowRow


class LookaheadAttention:
    """An attention processor of a FluxTransformer2DModel. At refresh steps it remembers the keys
    and values of all tokens. At other steps it replaces those of the cached tokens by values on the
    line through the last two refresh steps. If the schedule bends lines, the values leave the line
    accordingly.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.refreshed: list[tuple[float, Tensor, Tensor]] = []

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None, image_rotary_emb: Any = None,
    ) -> Any:  # fmt: skip
        from diffusers.models.embeddings import apply_rotary_emb

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, attn.head_dim))

        image = [heads(layer(hidden_states)) for layer in (attn.to_q, attn.to_k, attn.to_v)]
        q, k, v = attn.norm_q(image[0]), attn.norm_k(image[1]), image[2]
        if encoder_hidden_states is not None:
            added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
            text = [heads(layer(encoder_hidden_states)) for layer in added]
            q = torch.cat((attn.norm_added_q(text[0]), q), dim=1)
            k = torch.cat((attn.norm_added_k(text[1]), k), dim=1)
            v = torch.cat((text[2], v), dim=1)
        q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        sigma, cached = self.state.sigma, self.state.cached
        if self.state.anchor:
            self.refreshed.append((sigma, k, v))
        else:
            before, last = self.refreshed[-2:] if len(self.refreshed) > 1 else self.refreshed * 2
            times = self.state.times(before[0], last[0])
            k, v = k.clone(), v.clone()
            for tensor, at in ((k, 1), (v, 2)):
                line = last[at] + times * (last[at] - before[at])
                if self.state.second_order and len(self.refreshed) > 2:
                    curve, share = self.state.parabola([(x[0], x[at]) for x in self.refreshed[-3:]])
                    line = line + share * (curve - line)
                tensor[:, cached] = line[:, cached]
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v))
        )
        out = out.transpose(1, 2).flatten(2)
        if encoder_hidden_states is None:
            return out
        words = encoder_hidden_states.shape[1]
        return attn.to_out[0](out[:, words:]), attn.to_add_out(out[:, :words])


class State:
    """The step's data for the processors."""

    sigma = 0.0
    anchor = True
    cached: Tensor

    def __init__(self, power: float, *, second_order: bool) -> None:
        self.power, self.second_order = power, second_order

    def times(self, before: float, last: float) -> float:
        """The way since the last refresh step, as a multiple of the way between the last two."""
        a, b, now = (sigma**self.power for sigma in (before, last, self.sigma))
        return 0.0 if a == b else (b - now) / (a - b)

    def parabola(self, through: Sequence[tuple[float, Tensor]]) -> tuple[Tensor, float]:
        """The value now on the parabola through three points, each with its sigma, and the second
        result of `parabola`.
        """
        return parabola(self.sigma**self.power, [(sigma**self.power, x) for sigma, x in through])


def parabola(now: float, through: Sequence[tuple[float, Tensor]]) -> tuple[Tensor, float]:
    """The value at `now` on the parabola through three points. The second result is the way between
    the first two points over the way between the last two.
    """
    places = [place for place, _ in through]
    shares = [
        math.prod((now - other) / (place - other) for other in places if other != place)
        for place in places
    ]
    total = sum(share * x for share, (_, x) in zip(shares, through, strict=True))
    return torch.as_tensor(total), (places[0] - places[1]) / (places[1] - places[2])


def ahead(row: FlowRow, tokens_now: Tensor, change: float, moved: Tensor, at: int) -> Tensor:
    """[1, N, in_channels] the model's input at a lookahead, made from its input now."""
    assert row.image.unmasked is not None
    outside: Any = row.image.unmasked.latents
    index = row.image.unmasked.ids[: len(outside.clean)]
    total, channels = len(index) + len(row.latents), row.channels
    tokens, sigma = tokens_now.clone(), row.schedule.sigmas[at]
    tokens[0, :total, :channels] += change * moved[0, :total]
    if row.image.masked.blend is not None:
        active = row.image.masked.ids
        token = tokens[0, active, :channels]
        tokens[0, active, :channels] = row.image.masked.blend.apply(token, sigma, at, row.steps)
        tokens[0, index, :channels] = outside.blend.source(sigma)
    return tokens


class LookaheadFlux:
    """Make a pipeline, and its ControlNet if it has one, compute all tokens at each step. The
    results of the cached tokens are replaced in attention and, as velocity, after the model. A
    lookahead is a further call of each model before the step's call.

    Args:
        pipeline: for one edit.
        adapter: the model in our engine.
        job: the edit.
        schedule: of its refresh steps.
    """

    def __init__(
        self, pipeline: Any, adapter: FluxAdapter, job: EditJob, schedule: RefreshSchedule
    ) -> None:
        self.row, self.schedule = adapter.refreshing_row(job, schedule), schedule
        self.state = State(schedule.power, second_order=schedule.second_order)
        self.sigmas = [timestep / 1000 for _, timestep in adapter.sigmas(job)]
        prepared: Any = adapter.prepare(job).prepared
        self.active = torch.from_numpy(
            prepared.tokens.inner if schedule.ring else prepared.tokens.active
        )
        self.step = -1
        self.answers: list[Tensor] = []
        self.velocities: list[tuple[float, Tensor]] = []
        self.residuals: dict[str, Any] = {}
        self.net = getattr(pipeline, "controlnet", None)
        models = [pipeline.transformer, *([] if self.net is None else [self.net])]
        for model in models:
            model.set_attn_processor(
                {name: LookaheadAttention(self.state) for name in model.attn_processors}
            )
        self.whole, pipeline.transformer.forward = pipeline.transformer.forward, self.forward
        if self.net is not None:
            self.whole_net, self.net.forward = self.net.forward, self.controlled

    def controlled(self, **inputs: Any) -> Any:
        """Replaces the ControlNet's forward, which runs before the model's."""
        idle = self._begin(inputs)
        lookahead = self._lookahead(inputs, idle)
        if lookahead is not None:
            double, single = self.whole_net(**{**inputs, **lookahead})
            names = "controlnet_block_samples", "controlnet_single_block_samples"
            self.residuals = dict(zip(names, (double, single), strict=True))
        self._turn_to_step()
        return self.whole_net(**inputs)

    def forward(self, **inputs: Any) -> Any:
        """Replaces the model's forward."""
        idle = self._begin(inputs) if self.net is None else self._idle(inputs)
        lookahead = self._lookahead(inputs, idle)
        if lookahead is not None:
            [velocity] = self.whole(**{**inputs, **lookahead, **self.residuals})
            self.velocities.append((self.state.sigma, velocity.clone()))
        self._turn_to_step()
        [velocity] = self.whole(**inputs)
        self.answers.append(velocity)
        if self.state.anchor:
            self.velocities.append((self.state.sigma, velocity.clone()))
        else:
            (s1, before), (s0, last) = (self.velocities * 2)[-2:]
            times = self.state.times(s1, s0)
            velocity[:, idle] = (last + times * (last - before))[:, idle]
        return (velocity,)

    def errors(self) -> dict[int, float]:
        """Relative difference between each lookahead's velocity and the model's at its refresh
        step, over the computed tokens.
        """
        errors = {}
        for sigma, ahead in self.velocities[1:]:
            step = self.sigmas.index(sigma)
            expected, foreseen = self.answers[step][:, self.active], ahead[:, self.active]
            errors[step] = float((expected - foreseen).norm() / expected.norm())
        return errors

    def _begin(self, inputs: dict[str, Any]) -> Tensor:
        self.step += 1
        return self._idle(inputs)

    def _idle(self, inputs: dict[str, Any]) -> Tensor:
        words, count = inputs["encoder_hidden_states"].shape[1], inputs["hidden_states"].shape[1]
        idle = torch.ones(count, dtype=torch.bool)
        idle[self.active] = False
        self.state.cached = torch.cat((torch.full((words,), self.schedule.text), idle))
        return idle

    def _turn_to_step(self) -> None:
        self.state.sigma, self.state.anchor = (
            self.sigmas[self.step],
            self.step in self.schedule.dense,
        )

    def _lookahead(self, inputs: dict[str, Any], idle: Tensor) -> dict[str, Tensor] | None:
        """Inputs of the lookahead call; None: this step has no lookahead."""
        step, at = self.step, self.schedule.next_refresh(self.step)
        if not (step and step in self.schedule.computed_at and at is not None):
            return None
        moved, self.state.sigma, self.state.anchor = self.answers[-1].clone(), self.sigmas[at], True
        moved[:, idle] = self.velocities[-1][1][:, idle]
        change = self.sigmas[at] - self.sigmas[step]
        tokens = ahead(self.row, inputs["hidden_states"], change, moved, at)
        timestep = inputs["timestep"] * 0 + self.sigmas[at]
        return {"hidden_states": tokens, "timestep": timestep}
